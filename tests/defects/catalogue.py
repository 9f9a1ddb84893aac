"""Deliberate defects, in the order of layers.

What unit tests of schedules, wire formats, consensus, parameters and the drive loop find is left to
`make mutants`, which changes these at every place.
"""

from __future__ import annotations

from dataclasses import dataclass

from support.documents import ROOT


@dataclass(frozen=True)
class Defect:
    """One change that makes something wrong."""

    file: str
    right: str
    """Stands in the file once."""
    wrong: str
    found_by: str
    """What pytest is to run, or behind `cargo test -p`; at least one of these tests must fail."""


PACKAGE = "python/gradring/"
TESTS = "tests/"


def _of(folder: str, tests: str, *defects: tuple[str, str, str, str]) -> list[Defect]:
    return [
        Defect(path := _path(f"{folder}{file}"), right, wrong, f"{_tests(tests, path)}{found_by}")
        for file, right, wrong, found_by in defects
    ]


def _path(pattern: str) -> str:
    """The one file that a pattern means, from the root of the repository."""
    (found,) = ROOT.glob(pattern)
    return found.relative_to(ROOT).as_posix()


def _tests(tests: str, path: str) -> str:
    return tests.replace("OWN", f"gradring-{path.split('/')[1]}")


#: In whichever crate a file is, with the tests of that crate.
CORE = "rust/*/src/"
CORES_OWN = "OWN --lib "
SIMULATED = "gradring-simulation "
FACTS = "survivors_see_what_the_facts_say"
RUNS = "every_run_ends_right_or_with_one_cause"
MEMBERS = "every_history_of_members_has_one_group_at_a_time_and_an_end"
UPDATES = "every_history_of_updates_has_each_gradient_once_and_goes_on"

COLLECTIVES = [
    *_of(
        CORE,
        SIMULATED,
        ("executor/plan.rs", "if reached < common.end {", "if false {", RUNS),
        (
            "executor/piped.rs",
            "&& *header != signature::between(self.header, self.call, self.rank, peer, self.rank)",
            "&& false",
            RUNS,
        ),
        ("executor/piped.rs", "arrival.carried = held - whole;", "arrival.carried = 0;", RUNS),
        (
            "executor/piped.rs",
            "self.wait_for(peer, Direction::Receive);",
            "let _ = peer;",
            RUNS,
        ),
        ("drive/mod.rs", "abort.cause() {", "abort.cause().filter(|_| false) {", FACTS),
        (
            "drive/mod.rs",
            "self.execution.ends_all_the_same(transport)",
            "false",
            RUNS,
        ),
        ("drive/mod.rs", "self.stall.moved(now);", "", FACTS),
        ("drive/stall_detector.rs", "if idle >= INTERRUPT_INTERVAL {", "if false {", RUNS),
        (
            "drive/stall_detector.rs",
            "|elsewhere| elsewhere.min(idle)",
            "|_| idle",
            FACTS,
        ),
    ),
    *_of(
        CORE,
        CORES_OWN,
        ("link/framing/incoming.rs", "if found == frame.checksum {", "if true {", "framing::"),
        (
            "link/shm/pipe.rs",
            "&& asleep.fetch_and(!bit(direction), Relaxed) & bit(direction) != 0",
            "",
            "shm::",
        ),
        (
            "link/shm/slots.rs",
            "if self.differs(self.arrived) {",
            "if false {",
            "shm::",
        ),
        (
            "failure/detector.rs",
            "|diagnosis| diagnosis.sequence <= sequence",
            "|_| true",
            "of_several_questions_the_one_about_the_earliest_position_is_answered",
        ),
    ),
]

FAILURES = _of(
    CORE + "failure/",
    SIMULATED,
    ("detector.rs", "push((peer, broken, now + grace))", "push((peer, broken, now))", FACTS),
    ("detector.rs", "} else if rank < peer {", "} else if rank > peer {", FACTS),
    (
        "detector.rs",
        "received_at + self.timing.silence",
        "received_at + 2 * self.timing.silence",
        FACTS,
    ),
    ("detector.rs", "self.left.insert(self.neighbours[from].rank);", "", FACTS),
    ("detector.rs", "self.flood(Message::Abort(cause), Some(from));", "", FACTS),
    ("detector.rs", "now >= *due || self.left.contains(peer)", "now >= *due", FACTS),
    ("detector.rs", "now + self.timing.diagnosis", "now + 2 * self.timing.diagnosis", FACTS),
    ("detector.rs", "Some(now + self.timing.report_grace)", "Some(now)", FACTS),
    ("diagnosis.rs", ".max_by_key(|&side| (sides", ".min_by_key(|&side| (sides", FACTS),
    ("requests.rs", "requests.push(MonitorRequest::Spread(cause));", "", FACTS),
    (
        "neighbour.rs",
        "self.ended = true;",
        "self.ended = true;\n            self.stream = None;",
        FACTS,
    ),
)

AGREEMENT = _of(
    CORE + "consensus/",
    SIMULATED,
    ("member.rs", "self.reconfigure_without(id, how);", "let _ = how;", MEMBERS),
    ("member/proposal.rs", "survivor.or_else(|| joiners.next())", "survivor", MEMBERS),
    (
        "member/conversation.rs",
        "now + self.timing.quiet + turn;",
        "now + 1000 * self.timing.quiet + turn;",
        MEMBERS,
    ),
    (
        "member/conversation.rs",
        "Reply::Behind(higher) if *higher > promised",
        "Reply::Behind(higher) if false && *higher > promised",
        MEMBERS,
    ),
    (
        "member/joining.rs",
        "joining.noted + self.timing.join",
        "now + self.timing.join",
        MEMBERS,
    ),
    (
        "member/together.rs",
        "let next = roster.after(self.me.id);",
        "let next: Option<&Peer> = None;",
        MEMBERS,
    ),
)

UPDATE_RULES = _of(
    CORE + "parameters/",
    SIMULATED,
    ("queue.rs", "taken.sort_by_key(|it| it.id);", "", UPDATES),
    ("queue.rs", "(slowest) <= staleness", "(slowest) <= staleness + 1", UPDATES),
    ("queue.rs", "on_time.count() >= needed", "on_time.count() + 1 >= needed", UPDATES),
    (
        "sequencer.rs",
        "if id.number <= self.queue.latest(worker) {",
        "if id.number == 0 {",
        UPDATES,
    ),
    (
        "sequencer.rs",
        ">= self.timing.silence",
        ">= 1000 * self.timing.silence",
        UPDATES,
    ),
    ("changes.rs", "self.since = version;", "self.since = self.since.min(version);", UPDATES),
    ("changes.rs", "Change::All => *part = None,", "Change::All => {}", UPDATES),
    ("server.rs", "start: start.round,", "start: 0,", UPDATES),
    ("server.rs", "if point.version < at_least {", "if point.version < at_least.min(1) {", UPDATES),
    ("server.rs", "gradient.or(part.as_ref())", "part.as_ref()", UPDATES),
    ("worker.rs", "|push| terms.contains(push.base)", "|_| true", UPDATES),
    ("worker.rs", ".flatten().all(|is| *is)", ".flatten().any(|is| *is)", UPDATES),
    ("worker.rs", "Some(push.bases).filter(is_past)", "None.filter(is_past)", UPDATES),
)

SERVERS = _of(
    "rust/servers/src/",
    CORES_OWN,
    ("gathering.rs", "self.client == *client && self.attempt", "self.attempt", "gathering::"),
    ("gathering.rs", "!connections.any(Connection::is_readable)", "true", "gathering::"),
)

BINDINGS = [
    *_of(
        "rust/tensorflow/src/",
        "gradring-tensorflow ",
        ("executions.rs", "None if resumed =>", "None if false && resumed =>", "executions::"),
        (
            "shared_by_nodes.rs",
            "> 0);\n        let value",
            ">= 0);\n        let value",
            "shared_by",
        ),
        ("equal_gradients.rs", "*count < STEPS", "*count < 1", "equal_gradients::"),
    ),
    *_of(
        "rust/python/src/",
        TESTS + "collectives/",
        ("dlpack.rs", "is_writable: flags & READ_ONLY == 0", "is_writable: true", "test_dlpack.py"),
        ("dlpack.rs", "if lent.is_copied {", "if false {", "test_dlpack.py"),
        (
            "arrays.rs",
            "check_unclaimed(&bucket.slices, element_bytes, writes)?;",
            "let _ = check_unclaimed;",
            "test_communicator.py::test_arrays_of_a_work_under_way_are_left_alone",
        ),
    ),
    *_of(
        "rust/core/src/communicator/",
        TESTS + "collectives/",
        ("rows.rs", "if bytes > memory_of_host() {", "if false {", "test_splits.py"),
    ),
]

LAUNCHER = _of(
    PACKAGE + "launch/",
    TESTS + "launch/",
    ("hosts.py", "if len(placed) < world_size:", "if not placed:", "test_run_hosts.py"),
    ("hosts.py", "for other in hosts) > 1:", "for other in hosts) > 2:", "test_run_hosts.py"),
    ("hostfile.py", "if name not in KEYWORDS or not value:", "if not value:", "test_hostfile.py"),
    ("output.py", 'rpartition(b"\\r")[2]', 'partition(b"\\r")[0]', "test_run_output.py"),
    ("output.py", 'if os.environ.get("NO_COLOR") or not', "if not", "test_run_output.py"),
    ("report.py", "if named == rank or named not", "if named not", "test_run_exit_codes.py"),
    ("processes.py", "else 128 - exit_code", "else 128 + exit_code", "test_run_exit_codes.py"),
    ("ranks.py", "int(cores() / local_size)", "int(cores())", "test_run_hosts.py"),
    (
        "exec_rank.py",
        "prctl(PR_SET_PDEATHSIG, signal.SIGKILL",
        "prctl(PR_SET_PDEATHSIG, 0",
        "test_run_orphans.py",
    ),
    ("first_process.py", "os.kill(child, arrived.si_signo)", "pass", "test_containers.py"),
)

CLUSTERS = _of(
    PACKAGE + "clusters/",
    TESTS + "clusters/",
    ("own_host.py", "name if _is_reachable(name) else", "name or", "test_own_host.py"),
    (
        "tf_config.py",
        "return f\"{VARIABLE} {','.join(addresses)}\"",
        "return VARIABLE",
        "test_job_ids.py",
    ),
)

TENSORFLOW = _of(
    PACKAGE + "tensorflow/**/",
    TESTS + "tensorflow/",
    ("sparse.py", "tf.size(indices), divisor)", "tf.size(indices), 1)", "test_sparse.py"),
    ("sparse.py", "divided(own.values, _divisor(collective))", "own.values", "test_embeddings.py"),
    ("sparse.py", 'if reduction.embeddings == "sum" else _rows_of_all', "", "test_embeddings.py"),
    (
        "sample_shares.py",
        "if mask is not None:\n        valid",
        "if False:\n        valid",
        "test_empty_batches.py",
    ),
    ("compat.py", "distributed._enable_get_next_as_optional = True", "", "test_empty_batches.py"),
    (
        "empty_batches.py",
        "lambda v: zero(v) if isinstance(v, tf.Tensor) else v, value",
        "lambda v: v, value",
        "test_empty_batches.py",
    ),
    (
        "moving_statistics.py",
        "tf.stack([1, has_samples])",
        "tf.stack([1, 1])",
        "test_collectives_a_step.py",
    ),
    (
        "own_assignments.py",
        "self._gradring_is_assigned_alone = True",
        "pass",
        "test_unlike_variables.py",
    ),
    (
        "unreduced.py",
        "elif not _are_zero(gradients):",
        "elif False:",
        "test_unreduced.py",
    ),
    (
        "replica_step.py",
        "reductions() if by_keras is None else (current().reductions,)",
        "(current().reductions,)",
        "test_unreduced.py",
    ),
    (
        "summed_losses.py",
        "step.keras_losses.append(True)",
        "pass",
        "test_unasked_strategies.py",
    ),
    (
        "whole_files.py",
        "os.replace(written, target)",
        "shutil.copy(written, target)",
        "test_whole_files.py",
    ),
    (
        "data_order.py",
        "if communicator.world_size == 1 or policy == policies.OFF:",
        "if True:",
        "test_data_order.py",
    ),
    (
        "iterators.py",
        "_read_plainly(**given)\n        return",
        "pass",
        "test_distributed_data.py",
    ),
)

PROGRAMS = _of(
    PACKAGE + "tensorflow/**/",
    TESTS + "program_fuzz/test_program_fuzz.py::"
    "test_a_program_trains_on_ranks_as_in_one_process_with",
    (
        "given_gradients.py",
        "all_reduce(_SUM if is_sum else _MEAN",
        "all_reduce(_MEAN",
        "[a sum in a step]",
    ),
    ("extent_rules.py", '"Sum": _reduction(1)', '"Sum": _reduction(0)', "[a loss that is a sum]"),
    ("own_draws.py", "if number == 0:", "if True:", "[own draws]"),
    (
        "sparse.py",
        '_summed if reduction.embeddings == "sum" else _rows_of_all',
        "_summed",
        "[rows of an embedding]",
    ),
    ("given_losses.py", "return extent.is_sum", "return False", "[a sum by add_loss]"),
    ("given_gradients.py", "if not any(are_variables):", "if True:", "[clipping in a step]"),
    (
        "given_gradients.py",
        "(means, False, own_share())",
        "(means, False, None)",
        "[gradients of no tape]",
    ),
    (
        "compat_keras.py",
        "value / count if value.dtype",
        "original(value) if value.dtype",
        "[a third in float64]",
    ),
)

HOROVOD = _of(
    PACKAGE + "tensorflow/**/",
    TESTS + "horovod/",
    (
        "compat_keras.py",
        "_on_all(is_finite, functools.partial(add_up, outer.inner_optimizer))",
        "is_finite",
        "test_horovod_training.py",
    ),
)

DEFECTS = [
    *COLLECTIVES,
    *FAILURES,
    *AGREEMENT,
    *UPDATE_RULES,
    *SERVERS,
    *BINDINGS,
    *LAUNCHER,
    *CLUSTERS,
    *TENSORFLOW,
    *PROGRAMS,
    *HOROVOD,
]
