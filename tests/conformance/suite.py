"""TensorFlow's test files that are run, and how many workers each of their tests needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

STRATEGIES = ("gradring", "mwms")


@dataclass(frozen=True)
class TestFile:
    """A file of tests.

    Attributes:
        path: Where the file is in a checkout.
        tests: A pattern of the tests that concern several workers; the others are about other
            strategies and are not counted.
        workers: Number of workers of a test whose name does not tell it.
        widened: Whether the file's lists of strategies lack the multi-worker one and get it.
        not_applicable: Patterns of tests that look into MultiWorkerMirroredStrategy's own
            mechanism, each with the reason why they say nothing about gradring.
    """

    __test__ = False  # not for pytest

    path: str
    tests: str = "MultiWorkerMirrored"
    workers: int = 2
    widened: bool = False
    not_applicable: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file's name."""
        return PurePosixPath(self.path).name

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
        if "mode_graph" in test and self.workers_of(test) > 1 and "GPU" not in test:
            return "a graph and a session of TensorFlow 1, in which the strategy refuses to run"
        reasons = (why for what, why in self.not_applicable.items() if re.search(what, test))
        return next(reasons, None)


_TF = "tensorflow/python/distribute"
_KERAS = "tf_keras/distribute"

FILES = (
    TestFile(f"{_TF}/strategy_common_test.py"),
    TestFile(f"{_TF}/cross_device_ops_test.py", tests="^CollectiveOpsTest"),
    TestFile(
        f"{_TF}/collective_all_reduce_strategy_test.py",
        tests=".",
        workers=1,
        not_applicable={
            "^Distributed": "several workers in one process, as sessions on in-process servers",
            "^ExperimentalCompatibilityTest": "the names of TensorFlow's own classes",
            "test_deep_copy_not_allowed": "a copy would duplicate MWMS' health check thread; "
            "a copy of our strategy is the strategy itself",
        },
    ),
    TestFile(f"{_TF}/custom_training_loop_gradient_test.py", widened=True),
    TestFile(f"{_TF}/custom_training_loop_input_test.py", widened=True),
    TestFile(f"{_TF}/strategy_gather_test.py"),
    TestFile(f"{_TF}/vars_test.py"),
    TestFile(f"{_TF}/values_test.py"),
    TestFile(f"{_TF}/distributed_variable_test.py"),
    TestFile(
        f"{_TF}/input_lib_test.py",
        not_applicable={
            "TfDataServiceTest": "a tf.data service, which the main process of TensorFlow's runner "
            "starts; here there is none"
        },
    ),
    TestFile(f"{_TF}/input_lib_type_spec_test.py"),
    TestFile(f"{_TF}/moving_averages_test.py"),
    TestFile(f"{_TF}/random_generator_test.py"),
    TestFile(f"{_KERAS}/custom_training_loop_metrics_test.py"),
    TestFile(f"{_KERAS}/custom_training_loop_models_test.py"),
    TestFile(f"{_KERAS}/custom_training_loop_optimizer_test.py", widened=True),
)
