"""Nothing in the tests of `make test` depends on chance: who is faster, or which port is free.

Each pattern has a list of the places that may have it, and why.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from support.documents import ROOT

TESTS = ROOT / "tests"
OTHERS = ("soak", "engines", "machines", "conformance")
"""Directories whose own tests decide what is chance there: they run for minutes, not in CI."""
FOR_EVER_S = 60.0
"""Who sleeps for so long hangs until something ends it."""
HANGS = "LONG_S"
POLL = re.compile(r"while .*:\s*time\.sleep\(")
TIMES = re.compile(r"(?<!lateness)_s$|^(seconds|elapsed|took|monotonic|perf_counter)$")

Rule: TypeAlias = Callable[[ast.AST], Iterator[ast.AST]]

LATE = "being late or slow is the fact, and later does no harm"
ANY_MOMENT = "any moment is as good"
NOTHING_HAPPENS = "for so long, nothing may happen"

SLEEPS = {
    "collectives/test_point_to_point.py::closes_beside_one_that_is_stopped": (
        "the look at a silent partner begins by time, and shows nowhere"
    ),
    "collectives/test_point_to_point.py::differing": LATE,
    "collectives/test_point_to_point.py::end": ANY_MOMENT,
    "collectives/test_point_to_point.py::waits_with_patience": LATE,
    "collectives/test_streams.py::leave_first": LATE,
    "elastic/test_run.py::calls_before_it_tells_why": LATE,
    "elastic/test_run.py::stopped_for_a_moment": NOTHING_HAPPENS,
    "faults/test_collectives.py::struck": ANY_MOMENT,
    "faults/test_forks.py::fork_in_every_way": NOTHING_HAPPENS,
    "faults/test_liveness.py::be_late": LATE,
    "launch/test_run_exit_codes.py::test_survivors_have_time_to_report_their_own_errors": LATE,
    "launch/test_run_exit_codes.py::test_the_first_failing_ranks_traceback_comes_last": LATE,
    "launch/test_run_hosts.py::test_what_ended_a_rank_on_another_host_is_relayed": LATE,
    "launch/test_run_output.py::test_a_full_disk_ends_no_rank": ANY_MOMENT,
    "launch/test_run_signals.py::test_a_job_suspended_for_longer_than_silence_trains_on": LATE,
    "observability/test_metrics.py::train": LATE,
    "observability/test_monitor.py::log": LATE,
    "observability/test_monitor.py::measure_batches": LATE,
    "observability/test_monitor.py::test_a_pause_is_no_step": LATE,
    "observability/test_monitor.py::train": LATE,
    "observability/test_slowest.py::late_rank": LATE,
    "security/test_strangers.py::besiege": NOTHING_HAPPENS,
    "security/test_strangers.py::trickle": LATE,
    "tensorflow/test_interrupts.py::caught_before": NOTHING_HAPPENS,
    "tensorflow/test_interrupts.py::handled_by_the_program": NOTHING_HAPPENS,
    "tensorflow/test_live_line.py::fit": LATE,
    "tensorflow/test_live_line.py::fit_slow_input": LATE,
    "updates/test_digits.py::train_by": LATE,
}
WALL_TIMES = {
    "bench/test_benches.py::test_auto_is_simulated_to_be_near_the_best_algorithm": "simulated time",
    "support/waiting.py::wait_until": "the deadline of all waits",
}
RETRIES = {"elastic/drill.py::drill": "the fault came when its phase was over"}
PORTS: dict[str, str] = {}


def fixed_sleeps(tree: ast.AST) -> Iterator[ast.AST]:
    """Sleeps for a second or so, in no loop that asks for a fact; also in programs of tests."""
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.While))
    polls = {id(part) for loop in loops for part in ast.walk(loop)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name("time"), "sleep"), [given]):
                seconds = getattr(given, "value", 0.0)
                hangs = isinstance(seconds, int | float) and seconds >= FOR_EVER_S
                if not hangs and ast.unparse(given) != HANGS and id(node) not in polls:
                    yield node
            case ast.Constant(str(text)):
                times = re.findall(r"time\.sleep\(([\d.]+)\)", POLL.sub("", text))
                if any(float(seconds) < FOR_EVER_S for seconds in times):
                    yield node


def wall_times(tree: ast.AST) -> Iterator[ast.AST]:
    """Assertions that a real process was fast."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.Lt | ast.LtE):
                    names = re.findall(r"\w+", ast.unparse(part.left))
                    if any(map(TIMES.search, names)):
                        yield part


def retries(tree: ast.AST) -> Iterator[ast.AST]:
    """Loops that go on until something has worked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and re.search(
            r"ATTEMPTS|RETRIES|TRIES", ast.unparse(node.iter)
        ):
            yield node
        if isinstance(node, ast.Attribute) and node.attr == "flaky":
            yield node


def unbound_ports(tree: ast.AST) -> Iterator[ast.AST]:
    """Ports that the kernel gave to a socket that does not keep them.

    `gradring.machine.ports.free_ports` gives what a list of addresses must name before a
    process binds it: by chance, from the ports that the kernel gives to nobody.
    """
    listens = any(getattr(node, "attr", "") == "listen" for node in ast.walk(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(_, "bind"), [ast.Tuple([_, ast.Constant(0)])]):
                if not listens:
                    yield node


RULES: dict[Rule, dict[str, str]] = {
    fixed_sleeps: SLEEPS,
    wall_times: WALL_TIMES,
    retries: RETRIES,
    unbound_ports: PORTS,
}


def places(rule: Rule) -> Iterator[tuple[str, int]]:
    """Where the tests have what a rule finds: the file and the outermost function, and the line."""
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS)
        if name.parts[0] in OTHERS or path == Path(__file__):
            continue
        for node in ast.parse(path.read_text()).body:
            for found in rule(node):
                yield f"{name}::{getattr(node, 'name', '')}", getattr(found, "lineno", 0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_nothing_depends_on_chance(rule: Rule) -> None:
    found = list(places(rule))
    unexplained = [f"{place} line {line}" for place, line in found if place not in RULES[rule]]
    assert not unexplained, f"{rule.__doc__}\n" + "\n".join(unexplained)
    unused = set(RULES[rule]) - {place for place, _ in found}
    assert not unused, f"explained, but no longer there: {unused}"
