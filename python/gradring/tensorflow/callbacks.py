"""Callbacks for Keras' ``fit``: Keras 3, or ``tf_keras`` where TensorFlow uses it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from numbers import Real
from typing import Any, TextIO

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

_log = logging.getLogger("gradring")

#: What schedulers send some time before they end a process.
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
#: How often ranks ask each other for a notice, unless a step takes longer.
NOTICE_PERIOD_S = 1.0


class LiveLine(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Prints on rank 0 where the time of training steps goes, and who is slowest.

    Evaluations and what other callbacks do at the end of an epoch are no part of a step. Steps are
    numbered from those that the optimizer has done, as after a restart with `BackupAndRestore`.
    See `gradring.Monitor` for what the numbers mean.

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
            samples_per_step: The global batch size; without it, lines tell steps per second.
            every_steps: A line comes after so many steps,
            every_s: or after so many seconds, whatever comes first.
            stream: Where rank 0 writes; default standard output.
            log: A file to which rank 0 appends a line of JSON with every line; default: as for
                `gradring.Monitor`, in the log directory if there is one.
            tensorboard: A directory to which rank 0 writes the numbers of all ranks as scalars,
                such as `gradring/rank_2/wait_ms` and `gradring/rank_2/loss`, and Keras' logs, which
                are of all ranks, such as `gradring/loss`; needs no tensorboard package.
            gradient_norm: `tensorboard` also gets `gradring/gradient_norm`, the global norm of the
                gradients that the last step reduced, before they were clipped. And each rank's own
                one, before the reduction, stands beside its loss (with several local devices: that
                of one of them), and is named if it is unusual. Costs two passes over the memory of
                the gradients; needs Keras 3. Default False.

        A rank's own loss and metrics are means over its own batches of the epoch.
        """
        super().__init__()
        self._options: dict[str, Any] = {
            "samples_per_step": samples_per_step,
            "every_steps": every_steps,
            "every_s": every_s,
            "stream": stream,
            "log": log,
        }
        self._tensorboard = tensorboard
        self._gradient_norm = gradient_norm
        self._norms: norms.Norms | None = None
        self._logs: dict[str, Any] = {}
        self._writer: ScalarWriter | None = None
        self._monitor: Monitor | None = None
        self._batch = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to measure.

        Raises:
            gradring.errors.ConfigError: The model was not made under `CustomCollectiveStrategy`, or
                has no optimizer of Keras 3 for `gradient_norm`.
        """
        _communicator_of(self)
        self._norms = norms.watch(self.model) if self._gradient_norm else None
        if self._tensorboard is not None:
            self._writer = ScalarWriter(self._tensorboard)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Steps follow."""
        self._batch = -1
        if self._monitor is not None:
            self._monitor.resume()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """The first one tells how many steps were done before: all callbacks have restored."""
        if self._monitor is None:
            if input_time.watch():
                # An earlier `fit` may have traced the step without it.
                self.model.make_train_function(force=True)
            self._monitor = Monitor(
                self.model.distribute_strategy,
                **self._options,
                on_line=self._write_scalars,
                first_step=_steps_done(self.model.optimizer),
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One step has ended, or several with ``steps_per_execution``."""
        steps, self._batch = batch - self._batch, batch
        self._logs = logs or {}
        assert self._monitor is not None, "Keras calls on_train_batch_begin first"
        loss = self._logs.get("loss")
        self._monitor.step(max(1, steps), loss=loss, metrics=self._own_metrics)

    def on_test_begin(self, logs: Any = None) -> None:
        """A validation is no step."""
        if self._monitor is not None:
            self._monitor.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """What other callbacks do now is no step."""
        if self._monitor is not None:
            self._monitor.pause()

    def on_train_end(self, logs: Any = None) -> None:
        """Prints the table."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _own_metrics(self) -> dict[str, float]:
        with alone():
            found = self.model.get_metrics_result()
        # A metric may have a result of several numbers.
        scalars = [(name, value) for name, value in found.items() if np.ndim(value) == 0]
        own = {name[:METRIC_NAME_MAX]: float(value) for name, value in scalars[: METRICS_MAX - 1]}
        return own if self._norms is None else {**own, GRADIENT_NORM: float(self._norms.own)}

    def _write_scalars(self, facts: dict[str, Any]) -> None:
        if self._writer is None:
            return
        # Keras' logs are the same on all ranks: means over them.
        logs = self._logs.items()
        scalars = {name: float(value) for name, value in logs if isinstance(value, Real)}
        if self._norms is not None:
            scalars["gradient_norm"] = float(self._norms.reduced)
        self._writer(facts, scalars)


class CheckReplicas(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Ends `fit` on every rank when the replicas' weights or optimizer states differ by a bit.

    Give it to all ranks. See `gradring.tensorflow.check_replicas`.

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
        """The check comes after so many steps of `fit`, and when `fit` ends.

        Args:
            every_steps: At least 1; the same on every rank; default 1000. A check hashes all
                weights, at about 1 GB/s.

        Raises:
            gradring.errors.ConfigError: `every_steps` is no whole number of at least 1.
        """
        super().__init__()
        self._every_steps = parse.integer(every_steps, "CheckReplicas: every_steps", minimum=1)
        self._steps = 0
        self._batch = -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Steps are counted from here.

        Raises:
            gradring.errors.ConfigError: The model was not made under `CustomCollectiveStrategy`.
        """
        _communicator_of(self)
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras counts batches from here."""
        self._batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One step has ended, or several with ``steps_per_execution``.

        Raises:
            gradring.errors.MismatchError: The replicas differ.
        """
        before, self._steps = self._steps, self._steps + batch - self._batch
        self._batch = batch
        if self._steps // self._every_steps > before // self._every_steps:
            self._check()

    def on_train_end(self, logs: Any = None) -> None:
        """The last check.

        Raises:
            gradring.errors.MismatchError: The replicas differ.
        """
        self._check()

    def _check(self) -> None:
        check_replicas(variables_of(self.model), _communicator_of(self))


class PreemptionCheckpoint(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Saves and leaves `fit` when a scheduler says that it will end one of the processes.

    The notice is a signal, which one rank alone may get. All ranks save after the same step, and
    end with the same exit code; the next start resumes by what was saved. Give it to all ranks,
    with the callback that saves.

    To agree, the ranks do a reduction of 16 bytes once a second, or after each step that takes
    longer, also in a validation.

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
        """Listens to the signals from now on.

        A signal that comes between two calls of `fit` is remembered for the next one; but SIGTERM
        ends the process there, as ever.

        Args:
            saver: What saves: an `elastic.CommitState` whose state has a directory, which resumes
                after the step that was saved; or Keras' `BackupAndRestore`, which begins the epoch
                again, if some of its steps are left, with the weights that were saved. `fit` gets
                it, too.
            signals: Their numbers; default SIGTERM, which Kubernetes and Slurm send, and SIGUSR1,
                for which programs ask Slurm by ``--signal=USR1@60``. SIGUSR2 would no longer write
                flight records.
            exit_code: Of all ranks, from 0 to 255; default 143, by which `gradring run` knows a
                process that was asked to end.

        Raises:
            gradring.errors.ConfigError: `saver` is something else, one of `signals` cannot be
                handled, `exit_code` is none, or this is not the main thread.
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
        #: Whether the ranks will ask each other once more in this `fit`.
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
        #: With which a backup begins that is saved now.
        self._next_epoch = 0
        #: How many steps the ranks do before they ask each other, and have done since.
        self._every = 1
        self._steps = 0
        self._asked_at = time.monotonic()

    def on_train_begin(self, logs: Any = None) -> None:
        """From here on, a signal waits for the end of a step.

        Raises:
            gradring.errors.ConfigError: The model was not made under `CustomCollectiveStrategy`;
                or `fit` does not get the saver, or its state has no directory; or it is inside of
                `elastic.run`, where a process leaves by itself at a commit.
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
        """The ranks ask for the last time; what comes later ends a process as ever.

        Raises:
            SystemExit: A rank was given notice, and all have saved.
            gradring.errors.SaveError: A rank was given notice, and one could not save.
        """
        self._epoch, self._batch, self._next_epoch = self._epoch + 1, 0, self._epoch + 1
        self._will_ask = False
        self._ask()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """All callbacks have done what they do at the end of an epoch."""
        self._epoch, self._batch, self._next_epoch = epoch, 0, epoch
        self._ask()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One step has ended, or several with ``steps_per_execution``.

        Raises:
            SystemExit: A rank was given notice, and all have saved.
            gradring.errors.SaveError: A rank was given notice, and one could not save.
        """
        self._batch = batch + 1
        # The end of an epoch is near, and what is saved there has nothing to repeat.
        if not ends_epoch(self, batch):
            self._count()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """The same for a step of the validation."""
        self._next_epoch = self._epoch + 1
        self._count()

    def _count(self) -> None:
        self._steps += 1
        if self._steps >= self._every:
            self._ask()

    def _ask(self) -> None:
        """Leaves if one of the ranks was given notice."""
        communicator = _communicator_of(self)
        own = self._notices.received
        notice = (communicator.rank + 1) << 8 | own if own else 0
        step_us = int((time.monotonic() - self._asked_at) * 1e6 / max(1, self._steps))
        found = communicator.all_reduce(
            np.array([notice, step_us]), "max", name="PreemptionCheckpoint: notice"
        )
        # All ranks know the slowest step, so they count to the same number.
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
    """The group of the model's strategy.

    Raises:
        gradring.errors.ConfigError: It has none.
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
    # The property `iterations` of Keras 3 counts updates, for which gradients may accumulate.
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    iterations = keras_names.ITERATIONS.of(optimizer, None)
    return 0 if iterations is None else int(tf.convert_to_tensor(iterations))
