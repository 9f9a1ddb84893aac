"""Tracebacks of the program's errors without gradring's own frames, as Keras leaves out its own."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import TracebackType

import tensorflow as tf

from gradring.errors import GradringError

_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"


def without_own_frames(error: BaseException) -> TracebackType | None:
    """Returns an error's traceback without gradring's frames.

    `tf.debugging.disable_traceback_filtering()` keeps them, and so does an error from inside
    gradring that is none of its own.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_foreign = not frames or not _is_own(frames[-1].f_code.co_filename)
    if not tf.debugging.is_traceback_filtering_enabled():
        return error.__traceback__
    if not (is_foreign or isinstance(error, GradringError)):
        return error.__traceback__
    return _kept(error.__traceback__)


def _kept(entry: TracebackType | None) -> TracebackType | None:
    kept = None
    entries = []
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    for each in reversed(entries):
        if not _is_own(each.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _is_own(path: str) -> bool:
    return path.startswith(_PACKAGE)
