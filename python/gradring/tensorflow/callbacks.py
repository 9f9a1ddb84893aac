"""Callbacks for Keras' ``fit``: Keras 3, or ``tf_keras`` where TensorFlow uses it."""

from __future__ import annotations

import os
from numbers import Real
from typing import Any, TextIO

import numpy as np
import tensorflow as tf

from gradring.config import parse
from gradring.errors import ConfigError
from gradring.group.communicator import Communicator
from gradring.observe.monitor import Monitor
from gradring.observe.step_report import GRADIENT_NORM, METRIC_NAME_MAX, METRICS_MAX
from gradring.tensorflow import gradient_norm as norms
from gradring.tensorflow import input_time
from gradring.tensorflow.adoption import communicator_of
from gradring.tensorflow.cross_device_ops import alone
from gradring.tensorflow.model_variables import variables_of
from gradring.tensorflow.replicas import check_replicas
from gradring.tensorflow.scalars import ScalarWriter


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
    iterations = getattr(optimizer, "_iterations", None)
    return 0 if iterations is None else int(tf.convert_to_tensor(iterations))
