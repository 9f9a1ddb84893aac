"""Scalars for TensorBoard from a `gradring.Monitor`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_log = logging.getLogger("gradring")

#: `DATA_CLASS_SCALAR` of TensorBoard's summary format.
_SCALAR = 1


class ScalarWriter:
    """Writes scalars of all ranks, such as `gradring/rank_2/wait_ms`, for TensorBoard.

    Needs no tensorboard package. `LiveLine` makes its own writer.

    Examples:
        >>> writer = gradring.tensorflow.ScalarWriter("logs")
        >>> with gradring.Monitor(comm, every_steps=2, on_line=writer) as monitor:
        ...     for step in range(3):
        ...         comm.barrier()
        ...         monitor.step()
        step 3 | ... ms = compute ... + comm ... + wait ... | ... steps/s | ...
        >>> writer.close()
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Creates no file before the first line of the `Monitor`, so only rank 0 writes.

        Args:
            directory: Directory for the event files.
        """
        self._directory = directory
        self._writer: Any = None
        self._has_failed = False

    def __call__(self, facts: Mapping[str, Any], more: Mapping[str, float | None] = {}) -> None:
        """Writes one point of each curve.

        If the disk is full or gone, the curves end with a warning, and the training continues.

        Args:
            facts: Argument of the `Monitor`'s `on_line`.
            more: Further scalars by name; values of None are left out.

        Examples:
            >>> write = gradring.tensorflow.ScalarWriter("logs")
            >>> with gradring.Monitor(
            ...     comm, every_steps=2, on_line=lambda facts: write(facts, {"learning_rate": 0.1})
            ... ) as monitor:
            ...     for step in range(3):
            ...         comm.barrier()
            ...         monitor.step()
            step 3 | ...
            >>> write.close()
        """
        if self._has_failed:
            return
        try:
            self._write(facts, more)
        except tf.errors.OpError as error:
            self._has_failed = True
            why = str(error).rpartition("}} ")[2].partition("\n")[0]
            _log.warning("no more scalars are written to %s: %s", self._directory, why)

    def _write(self, facts: Mapping[str, Any], more: Mapping[str, float | None]) -> None:
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(os.fspath(self._directory))
        names = ("loss", "steps_per_s", "samples_per_s")
        scalars = {name: facts[name] for name in names} | dict(more)
        scalars |= {f"updates/{name}": value for name, value in (facts["updates"] or {}).items()}
        for rank, numbers in facts["ranks"].items():
            scalars |= {f"rank_{rank}/{name}": value for name, value in numbers.items()}
        with self._writer.as_default(step=facts["step"]):
            for name, value in scalars.items():
                if value is not None:
                    _write(f"gradring/{name}", float(value))
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            # On a full disk, the rest of the buffer cannot be written either.
            with contextlib.suppress(tf.errors.OpError):
                self._writer.close()
            self._writer = None


def _write(tag: str, value: float) -> None:
    """Writes as `tf.summary.scalar` does, which raises an error without tensorboard."""
    metadata = tf.compat.v1.SummaryMetadata(
        plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
        data_class=_SCALAR,
    )
    tf.summary.write(tag, tf.constant(value, tf.float32), metadata=metadata)
