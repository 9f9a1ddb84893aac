"""The program of each interpreter of ``run_ranks``: calls the function, writes a report.

Its files are private to the harness and its children, so no foreign data is ever unpickled.
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

#: Signal that makes a rank print its threads' stacks; the harness sends it before a kill.
DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Call:
    """A function and its arguments, which are pickled separately, to unpickle after the import."""

    function: FunctionName | FunctionByValue
    arguments: bytes

    @classmethod
    def of(cls, function: FunctionName | FunctionByValue, arguments: tuple[Any, ...]) -> Call:
        """Returns the call of `function` with these arguments."""
        return cls(function, function.dumps(arguments))


@dataclass(frozen=True)
class Report:
    """The result or failure that a rank writes for the harness.

    Attributes:
        value: The pickled result; None if the function raised.
        exception: The pickled exception; None if there is none or it cannot be pickled.
        traceback: Text of the traceback; empty if the function returned.
        ended_at: End of the call, on the system-wide monotonic clock, in seconds.
    """

    value: bytes | None
    exception: bytes | None
    traceback: str
    ended_at: float


def main(call_path: str, report_path: str) -> None:
    """Runs the call and writes the report; exits with code 1 if the function raised."""
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
        sys.last_value = error  # as Python does for an uncaught exception
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
    """Writes the report atomically, so that a killed rank leaves no partial report."""
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_bytes(pickle.dumps(report))
    os.replace(unfinished, path)
