"""Defects outside of the core, whose own stand in ARCHITECTURE.md and in the simulation's facts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """One change that makes something wrong."""

    file: str
    right: str
    """Stands in the file once."""
    wrong: str
    found_by: str
    """What pytest is to run; at least one of these tests must fail."""


PACKAGE = "python/gradring/"
TESTS = "tests/"


def _of(folder: str, tests: str, *defects: tuple[str, str, str, str]) -> list[Defect]:
    return [
        Defect(f"{folder}{file}", right, wrong, f"{tests}{found_by}")
        for file, right, wrong, found_by in defects
    ]


LAUNCHER = _of(
    PACKAGE + "tools/launch/",
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
    PACKAGE + "tensorflow/",
    TESTS + "tensorflow/",
    ("sparse.py", "tf.size(indices), divisor)", "tf.size(indices), 1)", "test_sparse.py"),
    (
        "sample_shares.py",
        "if mask is not None:\n        valid",
        "if False:\n        valid",
        "test_empty_batches.py",
    ),
    (
        "empty_batches.py",
        "value = tf.nest.map_structure(lambda v: zero(v)",
        "value = tf.nest.map_structure(lambda v: v",
        "test_empty_batches.py",
    ),
    (
        "moving_statistics.py",
        "tf.stack([1, has_samples])",
        "tf.stack([1, 1])",
        "test_collectives_a_step.py",
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
        "_read_plainly(**given)\n            return",
        "pass",
        "test_distributed_data.py",
    ),
)

PAGES = [
    *_of(
        "docs/",
        TESTS + "docs/",
        (
            "checkpoints.md",
            "that_was_killed_resumes",
            "that_is_killed_resumes",
            "test_references.py",
        ),
        (
            "quick-start.md",
            "import GradientReducer, b",
            "import GradReducer, b",
            "test_block_names.py",
        ),
        (
            "command-line.md",
            "| `GRADRING_TLS_CA` | PEM file |",
            "| `GRADRING_TLS_CA` | file |",
            "test_settings_table.py",
        ),
    ),
    Defect(
        ".github/workflows/ci.yml",
        "make test-rust EVERY",
        "make test-rusts EVERY",
        "tests/packaging/test_workflows.py",
    ),
    Defect("THIRD-PARTY-LICENSES.txt", "* cfg-if ", "* cfg ", "tests/packaging/test_licences.py"),
]

DEFECTS = [*LAUNCHER, *CLUSTERS, *TENSORFLOW, *PAGES]
