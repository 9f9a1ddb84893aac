"""Starts of the ranks of an elastic job: which, when and where, without processes."""

import signal
from typing import Any

from gradring.launch.hosts import Host, parse_hosts
from gradring.launch.slots import LIVED_S, LONGEST_PAUSE_S, Limits, Slots, Start

KILLED = -signal.SIGKILL
GIVEN_UP = (
    "{} is given up after 3 failures in a row, and the worker is started again where there is room"
)


class Job:
    """Slots whose hosts answer at once with the ports 1, 2, 3..."""

    def __init__(
        self,
        hosts: str,
        founders: int,
        *,
        least: int | None = None,
        most: int | None = None,
        restarts: int | None = None,
        host_failures: int = 3,
        cooldown_s: float | None = None,
        discovers: bool = False,
    ) -> None:
        workers = (founders, least or founders, most or founders)
        limits = Limits(*workers, 300.0, restarts, host_failures, cooldown_s)
        self.now = 0.0
        self.slots = Slots(limits, parsed(hosts), self.now, discovers=discovers)
        self.tell_ports()

    def tell_ports(self) -> None:
        for host in self.slots.to_ask(self.now):
            self.slots.answered(host, range(1, 100))

    def after(self, seconds: float) -> list[Start]:
        self.now += seconds
        self.tell_ports()
        return self.slots.to_start(self.now)

    def placed_after(self, seconds: float) -> list[tuple[int, str]]:
        return [(start.slot, start.host.name) for start in self.after(seconds)]

    def ends(self, slot: int, exit_code: int = 1, *, without_group: bool = False) -> str | None:
        words = self.slots.ended({slot: exit_code}, self.now, without_group=[slot] * without_group)
        return words.get(slot)

    def offer(self, hosts: str) -> list[int]:
        return self.slots.offer(parsed(hosts), self.now)


def begun(hosts: str, founders: int, **options: Any) -> Job:
    """A job whose first ranks run."""
    job = Job(hosts, founders, **options)
    job.after(0)
    return job


def parsed(hosts: str) -> list[Host]:
    return parse_hosts(hosts) if hosts else []


def test_the_first_ranks_fill_the_hosts_in_order() -> None:
    job = Job("a:2,b:2", 3)
    starts = job.after(0)
    assert [(s.slot, s.host.name, s.port, s.attempt) for s in starts] == [
        (0, "a", 1, 0),
        (1, "a", 2, 0),
        (2, "b", 1, 0),
    ]
    assert job.after(1000) == []


def test_a_rank_that_fails_starts_again_at_its_address_after_a_pause() -> None:
    job = Job("a:2", 2)
    first = job.after(0)[1]
    assert job.ends(1, KILLED) == "it is started again in 1 s, to join the others"
    assert job.after(0.9) == []
    (second,) = job.after(0.1)
    assert (second.slot, second.host, second.port) == (1, first.host, first.port)
    assert (first.attempt, second.attempt) == (0, 1)


def test_a_rank_does_not_start_while_something_of_its_last_process_is_left() -> None:
    job = begun("a:2", 2)
    job.ends(1)
    assert job.slots.to_start(5.0, busy=[1]) == []
    assert len(job.slots.to_start(5.0)) == 1


def test_the_pause_doubles_up_to_a_bound_and_is_short_again_after_a_long_life() -> None:
    job = begun("a:2", 2, host_failures=0)
    pauses = []
    for _ in range(9):
        words = job.ends(1)
        assert words is not None
        pauses.append(float(words.split()[5]))
        assert len(job.after(pauses[-1])) == 1
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    job.now += LIVED_S
    assert job.ends(1) == "it is started again in 1 s, to join the others"


def test_a_host_where_a_rank_keeps_failing_is_given_up_and_the_rank_moves() -> None:
    job = begun("a:2,b:2", 3)
    assert job.placed_after(1) == []
    for pause in (1, 2):
        job.ends(2)
        assert job.placed_after(pause) == [(2, "b")]
    words = job.ends(2)
    assert words == GIVEN_UP.format("b")
    assert job.placed_after(1000) == []
    # Room on the other host is taken as soon as there is some.
    job.offer("a:3,b:2")
    assert job.placed_after(1) == [(2, "a")]


def test_a_host_that_is_given_up_comes_back_after_its_cool_down_which_doubles() -> None:
    job = begun("a:1,b:1", 2, host_failures=1, cooldown_s=10.0)
    for pause in (10, 20, 40):
        words = job.ends(1)
        assert words is not None
        assert words.startswith(f"b is given up for {pause} s after 1 failures in a row")
        assert job.placed_after(pause - 1) == []
        assert job.placed_after(1) == [(1, "b")]


def test_ranks_that_run_on_a_host_that_is_given_up_go_on_and_move_when_they_fail() -> None:
    job = begun("a:2,b:2", 4, most=4, discovers=True)
    for _ in range(3):
        job.ends(3)
        job.after(60)
    assert job.offer("a:2,b:2,c:2") == []
    assert job.placed_after(1) == [(3, "c")]
    assert job.ends(2) == "it is started again where there is room"
    assert job.placed_after(60) == [(2, "c")]


def test_one_incident_that_ends_several_ranks_of_a_host_gives_up_no_host() -> None:
    job = begun("a:1,b:4", 5)
    words = job.slots.ended(dict.fromkeys((1, 2, 3, 4), KILLED), job.now)
    assert set(words.values()) == {"it is started again in 1 s, to join the others"}
    assert job.placed_after(1) == [(1, "b"), (2, "b"), (3, "b"), (4, "b")]


def test_failures_after_a_long_life_are_not_the_hosts() -> None:
    job = begun("a:2", 2)
    for _ in range(10):
        job.now += LIVED_S
        assert job.ends(1) == "it is started again in 1 s, to join the others"
        assert job.placed_after(1) == [(1, "a")]


def test_a_rank_that_never_finds_the_group_has_failed_however_long_it_has_tried() -> None:
    job = begun("a:2", 2)
    for _ in range(2):
        job.now += 300
        job.ends(1, without_group=True)
        assert job.placed_after(60) == [(1, "a")]
    job.now += 300
    assert job.ends(1, without_group=True) == GIVEN_UP.format("a")


def test_a_rank_that_is_told_to_leave_from_outside_is_no_failure_of_its_host() -> None:
    job = begun("a:2", 2)
    for exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM) * 3:
        assert job.ends(1, exit_code) == "it is started again in 1 s, to join the others"
        assert job.placed_after(1) == [(1, "a")]


def test_restarts_of_the_whole_job_are_bounded() -> None:
    job = begun("a:3", 3, restarts=2)
    for slot in (1, 2):
        job.ends(slot)
        assert job.placed_after(1) == [(slot, "a")]
    assert job.ends(1) == "it is not started again (--max-restarts 2)"
    assert job.after(1000) == [] and not job.slots.over


def test_a_rank_that_ends_well_completes_the_job() -> None:
    job = begun("a:3", 3, most=4, discovers=True)
    job.ends(1)
    assert job.ends(0, 0) is None and job.slots.completed
    assert job.after(1000) == [] and job.offer("b") == []
    assert not job.slots.over
    job.ends(2, 0)
    assert job.slots.over


def test_the_job_is_over_when_no_rank_is_left() -> None:
    job = begun("a:3", 3)
    job.ends(1)
    assert job.slots.ended({0: 1, 2: KILLED}, 0.5) == {}
    assert job.slots.over and job.after(1000) == []


def test_new_hosts_get_new_ranks_up_to_the_most() -> None:
    job = begun("a:2", 2, most=5, discovers=True)
    job.offer("a:2,b:2,c:2")
    assert job.placed_after(1) == [(2, "b"), (3, "b"), (4, "c")]
    assert job.placed_after(1) == []


def test_hosts_with_more_room_than_first_ranks_get_further_ranks() -> None:
    job = Job("a:4", 2, most=3)
    assert job.placed_after(0) == [(0, "a"), (1, "a")]
    assert job.placed_after(0) == [(2, "a")]
    assert job.placed_after(0) == []


def test_ranks_leave_a_host_that_is_no_longer_listed_and_start_elsewhere() -> None:
    job = begun("a:2,b:2", 4, most=4, discovers=True)
    assert job.offer("a:2") == [2, 3] and job.slots.leaving == {2, 3}
    # To end well is to leave, not to complete the job.
    assert job.ends(2, 0) == "it is started again where there is room"
    assert job.ends(3, KILLED) == "it is started again where there is room"
    assert job.after(100) == [] and not job.slots.completed
    job.offer("a:2,c")
    assert job.placed_after(0) == [(2, "c")]


def test_a_rank_that_waits_for_its_restart_moves_when_its_host_goes() -> None:
    job = begun("a:2,b:1", 3, discovers=True)
    job.ends(2)
    assert job.offer("a:2,c:1") == []
    assert job.placed_after(1) == [(2, "c")]


def test_a_host_with_fewer_ranks_than_before_keeps_the_first() -> None:
    job = begun("a:3", 3, discovers=True)
    assert job.offer("a:1") == [1, 2]


def test_a_host_that_comes_back_is_a_new_one() -> None:
    job = begun("a,b", 2, discovers=True)
    for _ in range(3):
        job.ends(1)
        job.after(60)
    assert job.after(0) == []
    job.offer("a")
    job.offer("a,b")
    assert job.placed_after(0) == [(1, "b")]


def test_the_job_begins_with_fewer_ranks_when_there_is_no_room_for_more() -> None:
    job = Job("", 4, least=2, discovers=True)
    assert job.after(1) == []
    job.offer("a")
    assert job.after(1) == []
    job.offer("a,b:2")
    assert job.placed_after(1) == [(0, "a"), (1, "b"), (2, "b")]
    job.offer("a,b:2,c:4")
    assert job.placed_after(1) == [(3, "c")]


def test_a_job_that_never_gets_room_says_so() -> None:
    job = Job("", 4, least=2, discovers=True)
    job.offer("a")
    assert job.after(299) == [] and not job.slots.over
    assert job.after(1) == [] and job.slots.over
    assert job.slots.problem == (
        "there is room for 1 workers, and the job needs 2; give more hosts, or a smaller --min-np"
    )


def test_first_ranks_wait_for_the_answers_of_all_hosts() -> None:
    limits = Limits(2, 2, 2, 300.0)
    slots = Slots(limits, parsed("a:2,b:2"), 0.0, discovers=False)
    a, b = slots.to_ask(0.0)
    slots.answered(b, [7, 8])
    assert slots.to_start(1.0) == [] and slots.to_ask(1.0) == []
    slots.answered(a, [5, 6])
    assert [start.host.name for start in slots.to_start(1.0)] == ["a", "a"]


def test_a_host_that_does_not_answer_is_asked_again_and_then_given_up() -> None:
    slots = Slots(Limits(4, 2, 4, 300.0), parsed("a:2,b:2"), 0.0, discovers=False)
    a, b = slots.to_ask(0.0)
    slots.answered(a, [5, 6])
    assert slots.unanswered(b, 1.0) == "it is asked again in 1 s"
    assert slots.to_ask(1.5) == [] and slots.to_start(1.5) == []
    assert slots.to_ask(2.0) == [b]
    assert slots.unanswered(b, 3.0) == "it is asked again in 2 s"
    assert slots.to_ask(5.0) == [b]
    assert slots.unanswered(b, 6.0) == "it is given up"
    assert [start.host.name for start in slots.to_start(6.0)] == ["a", "a"]
    assert slots.to_ask(1000.0) == []


def test_a_host_that_was_given_up_without_an_answer_is_asked_again_after_its_cool_down() -> None:
    limits = Limits(2, 1, 2, 300.0, host_failures=1, cooldown_s=10.0)
    slots = Slots(limits, parsed("a:1,b:1"), 0.0, discovers=False)
    a, b = slots.to_ask(0.0)
    slots.answered(a, [5])
    assert slots.unanswered(b, 1.0) == "it is given up for 10 s"
    assert [start.host.name for start in slots.to_start(1.0)] == ["a"]
    assert slots.to_ask(10.9) == []
    assert slots.to_ask(11.0) == [b]
    slots.answered(b, [5])
    assert [start.host.name for start in slots.to_start(11.0)] == ["b"]


def test_a_job_ends_at_once_when_all_its_hosts_are_given_up_before_it_began() -> None:
    for discovers in (False, True):
        slots = Slots(
            Limits(2, 1, 2, 300.0, host_failures=1), parsed("a,b"), 0.0, discovers=discovers
        )
        a, b = slots.to_ask(0.0)
        slots.unanswered(a, 1.0)
        assert slots.to_start(1.0) == [] and not slots.over
        slots.unanswered(b, 2.0)
        assert slots.to_start(2.0) == [] and slots.over
        assert slots.problem == (
            "no host is left: a and b could not be used and were given up; correct the errors "
            "above, or give other hosts"
        )


def test_a_job_waits_for_hosts_that_are_given_up_for_a_time() -> None:
    limits = Limits(1, 1, 1, 300.0, host_failures=1, cooldown_s=10.0)
    slots = Slots(limits, parsed("a"), 0.0, discovers=True)
    (a,) = slots.to_ask(0.0)
    slots.unanswered(a, 1.0)
    assert slots.to_start(1.0) == [] and not slots.over
    slots.answered(slots.to_ask(11.0)[0], [5])
    assert [start.host.name for start in slots.to_start(11.0)] == ["a"]


def test_ports_that_are_known_already_are_asked_for_again() -> None:
    slots = Slots(Limits(2, 2, 2, 300.0), parsed("a:2"), 0.0, discovers=False)
    slots.answered(slots.to_ask(0.0)[0], [5, 5])
    assert slots.to_ask(0.0) == [Host("a", 1)]


def test_an_answer_of_a_host_that_is_no_longer_listed_is_for_nobody() -> None:
    slots = Slots(Limits(2, 1, 2, 300.0, host_failures=1), parsed("a,b"), 0.0, discovers=True)
    a, b = slots.to_ask(0.0)
    slots.answered(a, [5])
    slots.offer([a], 1.0)
    slots.answered(b, [5])
    assert slots.unanswered(b, 1.0) == "it is no longer listed"
    assert [start.host.name for start in slots.to_start(1.0)] == ["a"]
