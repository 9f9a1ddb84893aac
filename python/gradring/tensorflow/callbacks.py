"""Callbacks for Keras' ``fit``: Keras 3, or ``tf_keras`` if TensorFlow uses it."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TextIO, cast

import numpy as np
import tensorflow as tf

from gradring.config import parse
from gradring.errors import ConfigError
from gradring.group.collectives import named
from gradring.group.communicator import Communicator
from gradring.machine.notices import Notices
from gradring.observe.monitor import Monitor
from gradring.observe.step_report import GRADIENT_NORM, METRIC_NAME_MAX, METRICS_MAX
from gradring.tensorflow.data import input_time
from gradring.tensorflow.elastic import (
    CommitState,
    ends_epoch,
    has_files,
    is_in_elastic_run,
    save_commit,
)
from gradring.tensorflow.graph.adoption import communicator_of
from gradring.tensorflow.graph.cross_device_ops import alone
from gradring.tensorflow.graph.model_variables import variables_of
from gradring.tensorflow.keras import fit_callbacks
from gradring.tensorflow.keras import gradient_norm as norms
from gradring.tensorflow.keras.scalars import ScalarWriter
from gradring.tensorflow.replicas import check_replicas
from gradring.tensorflow.seams import keras_names

__all__ = ["CheckReplicas", "LiveLine", "PreemptionCheckpoint"]
__dir__ = __all__.copy

_log = logging.getLogger("gradring")

#: Signals that schedulers send some time before they end a process.
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
#: Interval of the reductions that find out whether a rank has received a notice; at least a step.
NOTICE_PERIOD_S = 1.0


class LiveLine(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Prints on rank 0 how training steps spend their time, and which rank is slowest.

    A step's time excludes evaluations, and the work of other callbacks at the end of an epoch. The
    numbers of steps continue from the optimizer's iterations, as after a restart with
    `BackupAndRestore`. `gradring.Monitor` explains the printed numbers.

    Examples:
        >>> with gradring.tensorflow.CustomCollectiveStrategy().scope():
        ...     model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> data = tf.data.Dataset.from_tensor_slices((tf.ones([24, 2]), tf.ones([24, 1]))).batch(8)
        >>> line = gradring.tensorflow.callbacks.LiveLine(samples_per_step=8, every_steps=2)
        >>> history = model.fit(data, verbose=0, callbacks=[line])
        step 3 | ... ms = compute ... + comm ... + wait ... | ... samples/s | loss ... | ...
    """

    def __init__(
        self,
        samples_per_step: int | None = None,
        *,
        every_steps: int = 100,
        every_s: float = 10.0,
        stream: TextIO | None = None,
        log: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        gradient_norm: bool = False,
    ) -> None:
        """See `gradring.Monitor`.

        Args:
            samples_per_step: The global batch size; without it, lines show steps per second.
            every_steps: Number of steps between two lines.
            every_s: Most seconds between two lines.
            stream: Output of rank 0; default standard output, where a line ends a progress bar of
                Keras, which goes on below.
            log: A file to which rank 0 appends a line of JSON with every line; default: as for
                `gradring.Monitor`, in the log directory if there is one.
            tensorboard: A directory to which rank 0 writes scalars of all ranks, such as
                `gradring/rank_2/wait_ms` and `gradring/rank_2/loss`. Keras' logs are added, which
                are means over all ranks, such as `gradring/loss`. Needs no tensorboard package.
            gradient_norm: True adds `gradring/gradient_norm` to `tensorboard`: the global norm of
                the gradients that the last step reduced, before clipping. Each rank's own norm
                before the reduction is shown beside its loss, and named if it is unusual; with
                several local devices, it is the norm of one of them. Costs two passes over the
                memory of the gradients; needs Keras 3. Default False.

        A rank's own loss and metrics are means over its own batches of the epoch.
        """
        super().__init__()
        self._options: dict[str, Any] = {
            "samples_per_step": samples_per_step,
            "every_steps": every_steps,
            "every_s": every_s,
            "log": log,
        }
        self._stream = stream
        #: True while Keras' progress bar stands in the last line of standard output.
        self._is_below_bar = False
        self._tensorboard = tensorboard
        self._gradient_norm = gradient_norm
        self._norms: norms.Norms | None = None
        self._logs: dict[str, Any] = {}
        self._writer: ScalarWriter | None = None
        self._monitor: Monitor | None = None
        self._batch = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Prepares the norms of gradients and the writer of scalars, if they were asked for.

        Raises:
            gradring.errors.ConfigError: The model was not made under `CustomCollectiveStrategy`, or
                has no optimizer of Keras 3 for `gradient_norm`.
        """
        _communicator_of(self)
        self._norms = norms.watch(self.model) if self._gradient_norm else None
        if self._tensorboard is not None:
            self._writer = ScalarWriter(self._tensorboard)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resumes the measurement of steps."""
        self._batch = -1
        if self._monitor is not None:
            self._monitor.resume()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the `Monitor` at the first batch, when all callbacks have restored.

        The optimizer's iterations are correct only then.
        """
        if self._monitor is None:
            if input_time.watch():
                # An earlier `fit` may have traced the step without the clock.
                self.model.make_train_function(force=True)
            own_lines = cast(TextIO, _OwnLines(sys.stdout, lambda: self._is_below_bar))
            self._monitor = Monitor(
                self.model.distribute_strategy,
                **self._options,
                stream=self._stream or own_lines,
                on_line=self._write_scalars,
                first_step=_steps_done(self.model.optimizer),
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts one step, or several with ``steps_per_execution``."""
        steps, self._batch = batch - self._batch, batch
        self._logs = logs or {}
        assert self._monitor is not None, "Keras calls on_train_batch_begin first"
        loss = self._logs.get("loss")
        self._monitor.step(max(1, steps), loss=loss, metrics=self._own_metrics)
        # Keras calls its own callback last, which draws the bar.
        self._is_below_bar = (self.params or {}).get("verbose") in (1, "auto")

    def on_test_begin(self, logs: Any = None) -> None:
        """Pauses the measurement during a validation."""
        if self._monitor is not None:
            self._monitor.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Pauses the measurement while other callbacks end the epoch."""
        self._is_below_bar = False
        if self._monitor is not None:
            self._monitor.pause()

    def on_train_end(self, logs: Any = None) -> None:
        """Prints the table of all steps, and closes the file of scalars."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _own_metrics(self) -> dict[str, float]:
        with alone():
            found = self.model.get_metrics_result()
        # Results of several numbers are left out.
        scalars = [(name, value) for name, value in found.items() if np.ndim(value) == 0]
        own = {name[:METRIC_NAME_MAX]: float(value) for name, value in scalars[: METRICS_MAX - 1]}
        return own if self._norms is None else {**own, GRADIENT_NORM: float(self._norms.own)}

    def _write_scalars(self, facts: dict[str, Any]) -> None:
        if self._writer is None:
            return
        # Keras' logs are means over all ranks, and equal on all.
        logs = self._logs.items()
        scalars = {name: float(value) for name, value in logs if isinstance(value, Real)}
        if self._norms is not None:
            scalars["gradient_norm"] = float(self._norms.reduced)
        self._writer(facts, scalars)


class _OwnLines(io.TextIOBase):
    """Standard output, whose last line a progress bar can hold: the next text begins a new line."""

    def __init__(self, stream: TextIO, is_below_bar: Callable[[], bool]) -> None:
        self._stream = stream
        self._is_below_bar = is_below_bar

    def write(self, text: str) -> int:
        return self._stream.write(f"\n{text}" if self._is_below_bar() else text)

    def flush(self) -> None:
        self._stream.flush()


class CheckReplicas(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Ends `fit` on every rank if the replicas' weights or optimizer states differ by a bit.

    Give the callback to all ranks. See `gradring.tensorflow.check_replicas`.

    Examples:
        >>> with gradring.tensorflow.CustomCollectiveStrategy().scope():
        ...     model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> if rank == 1:
        ...     model.set_weights([np.ones((2, 1)), np.ones(1)])
        >>> data = tf.data.Dataset.from_tensor_slices((tf.ones([16, 2]), tf.ones([16, 1]))).batch(8)
        >>> check = gradring.tensorflow.callbacks.CheckReplicas(every_steps=2)
        >>> model.fit(data, verbose=0, callbacks=[check])
        Traceback (most recent call last):
            ...
        gradring.errors.MismatchError: variables: the replicas differ. '0/...
    """

    def __init__(self, every_steps: int = 1000) -> None:
        """Checks after every `every_steps` steps, and when `fit` ends.

        Args:
            every_steps: Steps between two checks, at least 1, the same on every rank; default 1000.
                A check hashes all weights, at about 1 GB/s.

        Raises:
            gradring.errors.ConfigError: `every_steps` is no whole number of at least 1.
        """
        super().__init__()
        self._every_steps = parse.integer(every_steps, "CheckReplicas: every_steps", minimum=1)
        self._steps = 0
        self._batch = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count steps.

        Raises:
            gradring.errors.ConfigError: The model was not made under `CustomCollectiveStrategy`.
        """
        _communicator_of(self)
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resets the number of the last batch, which Keras counts for each epoch."""
        self._batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts one step, or several with ``steps_per_execution``, and checks when it is time.

        Raises:
            gradring.errors.MismatchError: The replicas differ.
        """
        before, self._steps = self._steps, self._steps + batch - self._batch
        self._batch = batch
        if self._steps // self._every_steps > before // self._every_steps:
            self._check()

    def on_train_end(self, logs: Any = None) -> None:
        """Checks the replicas a last time.

        Raises:
            gradring.errors.MismatchError: The replicas differ.
        """
        self._check()

    def _check(self) -> None:
        check_replicas(variables_of(self.model), _communicator_of(self))


class PreemptionCheckpoint(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves and ends `fit` when a scheduler announces that it will end one of the processes.

    The notice is a signal, which a single rank may receive. All ranks save after the same step, and
    exit with the same code. The next start resumes from the saved state. Give the callback to all
    ranks, together with the callback that saves.

    The ranks exchange notices by a reduction of 16 bytes once a second, also in a validation. If a
    step takes longer than a second, the reduction follows each step.

    Examples:
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> data = tf.data.Dataset.from_tensor_slices((tf.ones([24, 2]), tf.ones([24, 1]))).batch(8)
        >>> backup = keras.callbacks.BackupAndRestore("backup")
        >>> leave = gradring.tensorflow.callbacks.PreemptionCheckpoint(backup)
        >>> history = model.fit(data, epochs=2, verbose=0, callbacks=[backup, leave])
    """

    def __init__(
        self,
        saver: Any,
        *,
        signals: Iterable[int] = NOTICES,
        exit_code: int = 143,
    ) -> None:
        """Handles the signals from now on.

        A signal between two calls of `fit` takes effect in the next `fit`. SIGTERM is an exception:
        outside of `fit`, it ends the process as usual.

        Args:
            saver: The callback that saves, which `fit` must get as well. An `elastic.CommitState`,
                whose state needs a directory, resumes after the saved step. Keras'
                `BackupAndRestore` begins an unfinished epoch again, with the saved weights.
            signals: Signal numbers; default SIGTERM, which Kubernetes and Slurm send, and SIGUSR1,
                which a Slurm job requests by ``--signal=USR1@60``. SIGUSR2 would no longer write
                flight records.
            exit_code: Exit code of all ranks, from 0 to 255; default 143, by which `gradring run`
                recognises a process that was asked to end.

        Raises:
            gradring.errors.ConfigError: `saver` is of another class, one of `signals` cannot be
                handled, `exit_code` is out of range, or this is not the main thread.
        """
        super().__init__()
        keras: Any = sys.modules.get("keras")
        is_commit = isinstance(saver, CommitState)
        if not (is_commit or isinstance(saver, keras.callbacks.BackupAndRestore)):
            raise ConfigError(
                f"PreemptionCheckpoint: saver={parse.shown(saver)} saves nothing to resume from; "
                "give the BackupAndRestore of Keras 3, or the elastic.CommitState, that fit gets"
            )
        self._saver = saver
        self._exit_code = parse.integer(exit_code, "PreemptionCheckpoint: exit_code", maximum=255)
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "PreemptionCheckpoint handles signals, which Python allows in the main thread "
                "only; make it there"
            )
        self._signals = tuple(signals)
        #: True if this `fit` still has a reduction ahead that exchanges notices.
        self._will_ask = False
        self._notices = Notices(lambda: self._will_ask and fit_callbacks.is_in_fit(self))
        try:
            self._notices.watch(*self._signals)
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"PreemptionCheckpoint: signals={parse.shown(self._signals)} cannot be handled "
                f"({error}); give numbers such as signal.SIGUSR1"
            ) from error
        self._epoch = self._batch = 0
        #: The epoch at which a backup that is saved now resumes.
        self._next_epoch = 0
        #: Steps from one reduction to the next, and steps done since the last one.
        self._every = 1
        self._steps = 0
        self._asked_at = time.monotonic()

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the saver, and defers signals to the end of a step.

        Raises:
            gradring.errors.ConfigError: The model was not made under `CustomCollectiveStrategy`; or
                `fit` does not get the saver, or the saver's state has no directory. Or `fit` runs
                inside of `elastic.run`, where a process leaves by itself at a commit.
        """
        why = ""
        if is_in_elastic_run(_communicator_of(self)):
            why = "inside of elastic.run, SIGTERM makes a process leave at a commit; leave it out"
        elif getattr(self._saver, "model", None) is not self.model:
            why = "fit does not get the callback that saves; add it to callbacks="
        elif isinstance(self._saver, CommitState) and not has_files(self._saver):
            why = "the state is kept in memory alone; call its checkpoint_to(directory) and sync()"
        if why:
            raise ConfigError(f"PreemptionCheckpoint: {why}")
        self._will_ask = True
        self._notices.watch(*self._signals)

    def on_train_end(self, logs: Any = None) -> None:
        """Exchanges notices a last time; a later SIGTERM ends the process as usual.

        Raises:
            SystemExit: A rank has received a notice, and all have saved.
            gradring.errors.SaveError: A rank has received a notice, and one could not save.
        """
        self._epoch, self._batch, self._next_epoch = self._epoch + 1, 0, self._epoch + 1
        self._will_ask = False
        self._ask()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Exchanges notices, after all callbacks have ended the previous epoch."""
        self._epoch, self._batch, self._next_epoch = epoch, 0, epoch
        self._ask()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts a step of the training, and exchanges notices when it is time.

        Raises:
            SystemExit: A rank has received a notice, and all have saved.
            gradring.errors.SaveError: A rank has received a notice, and one could not save.
        """
        self._batch = batch + 1
        # After an epoch's last step, wait for the end of the epoch: a save there repeats no step.
        if not ends_epoch(self, batch):
            self._count()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts a step of the validation, and exchanges notices when it is time."""
        self._next_epoch = self._epoch + 1
        self._count()

    def _count(self) -> None:
        self._steps += 1
        if self._steps >= self._every:
            self._ask()

    def _ask(self) -> None:
        """Exchanges notices by a collective; saves and exits if a rank has received one."""
        communicator = _communicator_of(self)
        own = self._notices.received
        notice = (communicator.rank + 1) << 8 | own if own else 0
        step_us = int((time.monotonic() - self._asked_at) * 1e6 / max(1, self._steps))
        found = communicator.all_reduce(
            np.array([notice, step_us]), "max", name="PreemptionCheckpoint: notice"
        )
        # All ranks get the slowest rank's step time, so they count to the same number.
        due = int(NOTICE_PERIOD_S * 1e6) // max(1, int(found[1]))
        self._every = max(1, min(2 * self._every, due))
        self._steps, self._asked_at = 0, time.monotonic()
        if found[0]:
            rank, signum = (int(found[0]) >> 8) - 1, int(found[0]) & 0xFF
            self._leave(communicator, f"{named(communicator, rank)} got {_name_of(signum)}")

    def _leave(self, communicator: Communicator, why: str) -> None:
        if isinstance(self._saver, CommitState):
            save_commit(self._saver, self._epoch, self._batch)
        else:
            fit_callbacks.save_backup(self._saver, self._next_epoch)
        if communicator.rank == 0:
            _log.warning(
                "fit has saved and leaves in epoch %d after %d steps, with exit code %d: %s",
                *(self._epoch, self._batch, self._exit_code, why),
            )
        self._notices.received = 0
        raise SystemExit(self._exit_code)


def _name_of(signum: int) -> str:
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


def _communicator_of(callback: Any) -> Communicator:
    """Returns the group of the model's strategy.

    Raises:
        gradring.errors.ConfigError: The model was not made under `CustomCollectiveStrategy`.
    """
    strategy = callback.model.distribute_strategy
    communicator = communicator_of(strategy)
    if communicator is None:
        raise ConfigError(
            f"{type(callback).__name__} needs a model made in the scope of a "
            f"CustomCollectiveStrategy; this one was made under {type(strategy).__name__}"
        )
    return communicator


def _steps_done(optimizer: Any) -> int:
    # Keras 3's property `iterations` counts updates, not the steps that accumulate gradients.
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    iterations = keras_names.ITERATIONS.of(optimizer, None)
    return 0 if iterations is None else int(tf.convert_to_tensor(iterations))
