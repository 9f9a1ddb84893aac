"""How busy other programs keep the machine."""

import pytest

from gradring.machine import Usage, busy_s, share_of_others

STAT = "cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 0\n"


def test_busy_time_leaves_out_idling_and_counts_guests_once() -> None:
    assert busy_s(STAT, ticks_per_s=100) == pytest.approx(1.71)


def test_the_share_of_others_leaves_out_our_own_processes() -> None:
    before = Usage(machine_s=100.0, children_s=1.0, moment_s=50.0)
    after = Usage(machine_s=118.0, children_s=14.0, moment_s=60.0)
    assert share_of_others(before, after, cores=2) == pytest.approx(0.25)


def test_the_share_of_others_is_never_negative() -> None:
    usage = Usage.now()
    assert share_of_others(usage, Usage.now(), cores=1) >= 0.0
