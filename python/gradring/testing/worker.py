"""The program of each interpreter of ``run_ranks``: find the function, call it, write what came.

The files it reads and writes are private to the harness and its children; nothing here ever
unpickles data from elsewhere.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradring.testing.function import FunctionByValue, FunctionName

#: Makes a rank print where all its threads are; the harness sends it before it kills.
DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Call:
    """What the harness asks for; the arguments are pickled apart, to be read after the import."""

    function: FunctionName | FunctionByValue
    arguments: bytes

    @classmethod
    def of(cls, function: FunctionName | FunctionByValue, arguments: tuple[Any, ...]) -> Call:
        """The call of a function with these arguments."""
        return cls(function, function.dumps(arguments))


@dataclass(frozen=True)
class Report:
    """What a rank answers.

    Attributes:
        value: The pickled result, or None when the function raised.
        exception: The pickled exception, or None when there is none or it cannot be pickled.
        traceback: Text of the exception; empty when the function returned.
        ended_at: When that was, on the system-wide monotonic clock, in seconds.
    """

    value: bytes | None
    exception: bytes | None
    traceback: str
    ended_at: float


def main(call_path: str, report_path: str) -> None:
    """Runs the call and writes the report; exits with 1 when the function raised."""
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=False)
    dumps: Callable[[object], bytes] = pickle.dumps
    try:
        call: Call = pickle.loads(Path(call_path).read_bytes())
        dumps = call.function.dumps
        function = call.function.load()
        arguments: tuple[Any, ...] = pickle.loads(call.arguments)
        value = dumps(function(*arguments))
    except SystemExit as error:
        _write(report_path, _failure(error, dumps))
        raise
    except BaseException as error:
        _write(report_path, _failure(error, dumps))
        traceback.print_exc()
        sys.last_value = error  # as of a program that ends by it
        sys.exit(1)
    _write(report_path, Report(value, None, "", time.monotonic()))


def _failure(error: BaseException, dumps: Callable[[object], bytes]) -> Report:
    ended_at = time.monotonic()
    try:
        pickled: bytes | None = dumps(error)
        pickle.loads(pickled or b"")  # many exceptions can be written but not read again
    except Exception:
        pickled = None
    return Report(None, pickled, traceback.format_exc(), ended_at)


def _write(path: str, report: Report) -> None:
    """Writes in one step: a rank that is killed meanwhile leaves no half report."""
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_bytes(pickle.dumps(report))
    os.replace(unfinished, path)
