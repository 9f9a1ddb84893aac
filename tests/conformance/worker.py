"""One worker: runs the tests of a file in step with the other workers.

Started by `run`. It writes a verdict per test into a directory that all workers share, and goes on
when all have done so. After a failure all end: what a failed test left behind would spoil the next.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_S = 0.005


@dataclass
class World:
    """The workers that run one file together, as one of them sees it.

    Attributes:
        file: The test file.
        strategy: `gradring`, or `mwms` for TensorFlow's own.
        directory: Where the workers write their verdicts.
        rank: This worker.
        addresses: `host:port` of every worker, for the cluster's description.
        rendezvous: `host:port` of a communicator that TF_CONFIG knows nothing of.
        widened: Whether the file's lists of strategies get the multi-worker one.
        tests: The tests to run, in order; empty to list all tests of the file.
        after_test: What the test that has just ended wants to be done when all workers are there.
        before_first_test: Called once.
    """

    file: str
    strategy: str
    directory: str
    rank: int
    addresses: list[str]
    rendezvous: str
    widened: bool
    tests: list[str]
    after_test: list[Callable[[], None]] = field(default_factory=list)
    before_first_test: Callable[[], Any] = lambda: None
    _barriers: int = 0

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.addresses)

    def wait(self) -> None:
        """Waits for all workers; has the shape of TensorFlow's barrier of its test runner."""
        self._barriers += 1
        self._meet(f"barrier-{self._barriers}", "")

    def share(self, test: int, verdict: dict[str, str]) -> list[dict[str, str]]:
        """Writes this worker's verdict, and returns those of all workers."""
        return [json.loads(text) for text in self._meet(str(test), json.dumps(verdict))]

    def _meet(self, name: str, text: str) -> list[str]:
        return meet(Path(self.directory), name, self.rank, self.size, text)


def meet(directory: Path, name: str, rank: int, size: int, text: str) -> list[str]:
    """Writes a worker's text at a meeting, waits for the others, and returns those of all."""
    paths = [verdict_path(directory, name, each) for each in range(size)]
    unfinished = Path(f"{paths[rank]}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(paths[rank])
    while not all(path.exists() for path in paths):
        time.sleep(POLL_S)
    return [path.read_text() for path in paths]


def verdict_path(directory: Path, name: str, rank: int) -> Path:
    """Where a worker writes what it has to say at a meeting."""
    return directory / f"{name}.{rank}"


def main() -> None:
    """Executes the file; its last line calls a main function, for which `run_tests` stands in."""
    world = World(**json.loads(Path(sys.argv[1]).read_text()))
    sys.argv[1:] = []

    from absl import app

    from conformance import stand_ins

    stand_ins.install(world, lambda: app.run(lambda _: run_tests(world), argv=[world.file]))
    runpy.run_path(world.file, run_name="__main__")


def run_tests(world: World) -> None:
    """Runs the world's tests of the file that is `__main__`, or lists them."""
    module = sys.modules["__main__"]
    found = {
        test.id().removeprefix("__main__."): test
        for test in _flat(unittest.defaultTestLoader.loadTestsFromModule(module))
    }
    if not world.tests:
        world.share(0, {"tests": "\n".join(found)})
        return
    world.before_first_test()
    for index, name in enumerate(world.tests):
        verdicts = world.share(index, _verdict(found[name]))
        for action in world.after_test:
            action()
        world.after_test.clear()
        if any(verdict["status"] == "failed" for verdict in verdicts):
            break
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's server would wait for its peers


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _flat(item)
        else:
            yield item


def _verdict(test: unittest.TestCase) -> dict[str, str]:
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    failures = [*result.failures, *result.errors]
    if failures:
        print(test.id(), failures[0][1], flush=True)
        return {"status": "failed", "reason": failures[0][1]}
    if result.skipped:
        return {"status": "skipped", "reason": result.skipped[0][1]}
    return {"status": "passed", "reason": ""}


if __name__ == "__main__":
    from conformance.worker import main as main_of_the_module

    main_of_the_module()
