"""Problems of interactive sessions of Python, run on a rank."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import os
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from gradring import updates
from support.served import serving

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Runner(doctest.DocTestRunner):
    """Keeps what differs from a session: results on rank 0, exceptions on all."""

    def __init__(self, rank: int) -> None:
        super().__init__(optionflags=OPTIONS)
        self.rank = rank
        self.problems: list[str] = []

    def report_start(self, out: Any, test: Any, example: Any) -> None:
        """Nothing is printed."""

    def report_success(self, out: Any, test: Any, example: Any, got: str) -> None:
        """Nothing is printed."""

    def report_failure(self, out: Any, test: Any, example: Any, got: str) -> None:
        if self.rank == 0:
            self.problems.append(f"{test.name}: {example.source}want: {example.want}got: {got}")

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        if isinstance(exc_info[1], pytest.skip.Exception):
            raise exc_info[1]
        raised = "".join(traceback.format_exception(*exc_info))
        self.problems.append(f"{test.name}: {example.source}on rank {self.rank}: {raised}")


def problems_of(title: str, text: str, rank: int, /, **names: Any) -> list[str]:
    """Runs a session, which sees these names.

    It has a directory of its own, in the current one, that its ranks have in common.
    """
    # AutoGraph does not find the functions of a session without a name.
    given = {**names, "__name__": "__main__"}
    session = doctest.DocTestParser().get_doctest(text, given, title, None, 0)
    runner = Runner(rank)
    above = os.getcwd()
    os.makedirs(title, exist_ok=True)
    os.chdir(title)
    runner.run(session)
    os.chdir(above)
    return runner.problems


def on_a_rank(sessions: dict[str, str], modules: dict[str, str]) -> list[str]:
    """Each session has a new group ``comm``, and modules by the names that they have in it."""
    import gradring

    imported = {name: importlib.import_module(module) for name, module in modules.items()}
    problems: list[str] = []
    for title, text in sessions.items():
        with gradring.init() as comm, servers_for(text, comm, problems):
            given = {"gradring": gradring, "comm": comm, "rank": comm.rank}
            problems += problems_of(title, text, comm.rank, **given, **imported)
    return problems


@contextlib.contextmanager
def servers_for(text: str, comm: Any, problems: list[str]) -> Iterator[None]:
    """A server beside the ranks, as ``gradring run --ps 1`` starts it, if a strategy needs it."""
    if "update=gradring.updates.ParameterServer()" not in text:
        yield
        return
    with serving(comm, updates.ParameterServer()):
        yield
        # They wait for a worker that has not come to the end of its session.
        assert not problems, problems
    from gradring.tensorflow.cluster import tasks

    tasks.alone().close()


def under_horovods_names(sessions: dict[str, dict[str, str]]) -> list[str]:
    """By the module that sessions call ``hvd``: each runs between its ``init`` and ``shutdown``."""
    import keras
    import numpy as np
    import tensorflow as tf

    problems = []
    for module, of_module in sessions.items():
        hvd = importlib.import_module(module)
        for title, text in of_module.items():
            hvd.init()
            given = {"hvd": hvd, "tf": tf, "keras": keras, "np": np}
            with input_workers(hvd) if "compute_service" in text else contextlib.nullcontext():
                problems += problems_of(title, text, hvd.rank(), **given)
            hvd.shutdown()
    return problems


@contextlib.contextmanager
def input_workers(hvd: Any) -> Iterator[None]:
    """A service of tf.data on rank 0, in place of that of ``gradring run --input-workers 1``."""
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = worker = None
    if hvd.rank() == 0:
        dispatcher = service.DispatchServer()
        address = dispatcher.target.removeprefix("grpc://")
        worker = service.WorkerServer(service.WorkerConfig(address))
    target = hvd.broadcast_object(dispatcher and dispatcher.target)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRADRING_INPUT_SERVICE", target)
        yield
    hvd.barrier()
    del worker, dispatcher
