"""Which of TensorFlow's test files are run, and how many workers each of their tests needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

STRATEGIES = ("gradring", "mwms")


@dataclass(frozen=True)
class TestFile:
    """A file of tests.

    Attributes:
        name: The file's name.
        tests: A pattern of the tests that concern several workers; the others are about other
            strategies and are not counted.
        workers: Number of workers of a test whose name does not tell it.
        not_applicable: Patterns of tests that look into MultiWorkerMirroredStrategy's own
            mechanism, each with the reason why they say nothing about gradring.
    """

    __test__ = False  # not for pytest

    name: str
    tests: str = "MultiWorkerMirrored"
    workers: int = 2
    not_applicable: dict[str, str] = field(default_factory=dict)

    def selects(self, test: str) -> bool:
        """Whether the test concerns several workers."""
        return re.search(self.tests, test) is not None

    def workers_of(self, test: str) -> int:
        """The number of processes that the test's name asks for, or else this file's."""
        processes = re.search(r"num_?processes_(\d)", test, re.IGNORECASE)
        if processes is None:
            processes = re.search(r"MultiWorkerMirrored(\d)x", test)
        return int(processes[1]) if processes else self.workers

    def why_not(self, test: str) -> str | None:
        """The reason why the test does not apply to gradring, if it does not."""
        reasons = (why for what, why in self.not_applicable.items() if re.search(what, test))
        return next(reasons, None)


FILES = (
    TestFile("strategy_common_test.py"),
    TestFile("cross_device_ops_test.py", tests="^CollectiveOpsTest"),
    TestFile("collective_all_reduce_strategy_test.py", tests=".", workers=1),
    TestFile("custom_training_loop_gradient_test.py"),
    TestFile("custom_training_loop_input_test.py"),
    TestFile("strategy_gather_test.py"),
    TestFile("vars_test.py"),
    TestFile("values_test.py"),
    TestFile("distributed_variable_test.py"),
    TestFile("input_lib_test.py"),
    TestFile("input_lib_type_spec_test.py"),
    TestFile("moving_averages_test.py"),
    TestFile("random_generator_test.py"),
    TestFile("tf_function_test.py"),
)
