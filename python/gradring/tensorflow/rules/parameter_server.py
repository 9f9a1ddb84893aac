"""`gradring.updates.ParameterServer`: this process pushes gradients and pulls variables.

The optimizer prepares gradients as usual, such as by clipping. Its step is replaced by a push of
the gradients to the servers and a pull of the resulting variables. Each optimizer of a program has
connections and variables of its own there (`served_optimizer`).

Under a strategy, a loss is divided by the number of replicas, because their gradients are summed.
If the servers take means instead of sums, each worker multiplies its gradient by the number of
workers, which gives the gradient of the mean over its own batch.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import tensorflow as tf

from gradring import _native, updates
from gradring.errors import AbortedError, ConfigError, GradringError
from gradring.group.communicator import program_error
from gradring.observe import update_report
from gradring.tensorflow.cluster.tasks import Served
from gradring.tensorflow.graph import failures
from gradring.tensorflow.graph.dtypes import map_values
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.graph.start_wait import ordering_token
from gradring.tensorflow.rules.served_optimizer import (
    KEPT,
    ServedOptimizer,
    describe,
    dtype_of,
    path_of,
)
from gradring.tensorflow.rules.updates import Apply, Gradient, Updates, times, trained_by
from gradring.updates.rules import check_server, check_servers

_log = logging.getLogger("gradring")

#: Rules of this process that are connected to parameter servers.
connected: WeakSet[PushedUpdates] = WeakSet()


class PushedUpdates(Updates):
    """Replaces the optimizer's step by a push to the parameter servers and a pull from them."""

    are_local = True
    replaces_step = True
    logs_own_samples = True
    #: Each rank has the variables of its own last pull, which differ between ranks.
    ends_equal = False

    def __init__(self, rule: updates.ParameterServer, served: Served) -> None:
        """Takes the rule, this worker and its servers; connects at the first use of an optimizer.

        Raises:
            gradring.errors.ConfigError: There are no servers, or too few for the rule's placement
                or replicas.
        """
        failures.install()
        self._rule = rule
        self._workers = served.place.world_size
        servers = served.servers.addresses
        if served.place.world_size > 1 and not servers:
            raise ConfigError(
                f"{type(rule).__name__} needs parameter servers, and {served.name} knows none: "
                "start them by `gradring run -np 3 --ps 1`, or name tasks of type ps in TF_CONFIG"
            )
        if servers:
            check_servers(rule, len(servers))
        for part, server in rule.placement.items():
            check_server(f"placement has {part!r} on", server, len(servers))
        self._served = served
        #: Optimizers that have been used, in the order of their first use.
        self._optimizers: list[ServedOptimizer] = []
        #: Orders the pushes of a graph, of all optimizers.
        self._token: Any = None
        self._has_left = False

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Refuses optimizers and variables that the servers do not support.

        Raises:
            gradring.errors.ConfigError: The servers support neither the optimizer, nor its
                averages of weights, nor a variable's constraint or dtype.
        """
        describe(optimizer)
        where = f"under update={self._rule}"
        if optimizer.use_ema:
            raise ConfigError(f"use_ema=True of {optimizer.name} averages nothing {where}")
        for variable in variables:
            path = path_of(variable)
            if getattr(variable, "constraint", None) is not None:
                raise ConfigError(f"{path} has a constraint, which no server keeps to {where}")
            dtype = dtype_of(variable).name
            if dtype not in KEPT:
                raise ConfigError(f"{path} is {dtype}, and servers keep {', '.join(KEPT)} {where}")

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Connects at an optimizer's first call; then calls its `apply`, which calls `step`."""
        served = self._of(optimizer)
        if served is None:
            served = self._begin(optimizer)
            if served.began_elsewhere and tf.executing_eagerly():
                _log.info("the first batch of %s is not used: others began", self._name)
                if self._rule.staleness is not None:
                    # Without a push, other workers would wait for this one, which may wait for
                    # them with its next optimizer.
                    served.exchange_nothing()
                return
        # Opened now, because the optimizer may apply weight decay before it calls `step`.
        served.open_push(self._token)
        factor = self._workers if self._multiplies(optimizer) else 1
        apply([times(gradient, factor) for gradient in gradients])

    def step(
        self,
        step: Callable[..., None],
        optimizer: Any,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        learning_rate: Any,
    ) -> None:
        """Pushes the gradients, pulls the variables, and assigns them.

        Raises:
            gradring.errors.ConfigError: The program has set a variable since the last step. A graph
                raises it when it runs.
        """
        served = self._of(optimizer)
        assert served is not None, "a step begins with apply"
        found = served.found(gradients, variables)
        if self._rule.is_sum and self._multiplies(optimizer):
            found = [map_values(lambda mean: mean / self._workers, each) for each in found]
        served.exchange(found, learning_rate, self._token)

    def stats(self) -> dict[str, Any]:
        """Returns the counters of all optimizers' clients; empty before the first step."""
        each = [dict[str, Any](served.client.stats()) for served in self._optimizers]
        return update_report.of_all(each) if each else {}

    def leave(self) -> None:
        """Waits for the last pushes, and tells the servers that this worker has finished.

        Raises:
            gradring.errors.GradringError: One of the optimizers could not take leave; the others
                have left.
        """
        self._has_left = True
        atexit.unregister(self._leave_at_exit)
        failed = None
        # The first optimizer last: the servers end when it has left everywhere.
        for served in reversed(self._optimizers):
            try:
                served.client.leave()
            except GradringError as error:
                failed = error
        if failed is not None:
            raise failed

    @property
    def _name(self) -> str:
        return self._served.name

    def _multiplies(self, optimizer: Any) -> bool:
        """Returns whether `apply` multiplies gradients by the number of workers.

        Servers that take means need it, and so does clipping. If servers take sums, `step` divides
        again after clipping.
        """
        clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
        return bool(clips) or not self._rule.is_sum

    def _of(self, optimizer: Any) -> ServedOptimizer | None:
        inner = _inner(optimizer)
        found = (served for served in self._optimizers if served.optimizer is inner)
        return next(found, None)

    def _begin(self, optimizer: Any) -> ServedOptimizer:
        """Connects an optimizer to the servers, and pulls its variables.

        Raises:
            gradring.errors.AbortedError: The worker has left the servers.
            gradring.errors.ConfigError: The worker knows no servers, or another optimizer trains
                one of the variables.
        """
        if not self._served.servers.addresses:
            raise ConfigError(
                f"{self._name} cannot train under update={self._rule}: it knows no servers"
            )
        if self._has_left:
            raise AbortedError(f"{self._name} has left the servers, and cannot train any more")
        taken = {id_of(it): served for served in self._optimizers for it in served.trained}
        for variable in trained_by(optimizer):
            other = taken.get(id_of(variable))
            if other is not None:
                raise ConfigError(
                    f"{self._name}: {optimizer.name} trains {path_of(variable)} under "
                    f"update={self._rule}, and so does {other.optimizer.name}: the servers keep a "
                    "variable for one optimizer of a job"
                )
        _native.tensorflow_register()
        if self._token is None:
            self._token = ordering_token()
        served = ServedOptimizer(_inner(optimizer), self._optimizers, self._rule, self._served)
        if not self._optimizers:
            connected.add(self)
            atexit.register(self._leave_at_exit)
        self._optimizers.append(served)
        return served

    def _leave_at_exit(self) -> None:
        if program_error() is not None:
            # The program failed, so this is a lost worker: it may come back, and must not leave.
            for served in self._optimizers:
                served.client.close()
            return
        try:
            self.leave()
        except GradringError as error:
            _log.warning("%s could not leave the servers: %s", self._name, error)


def _inner(optimizer: Any) -> Any:
    """Returns the optimizer inside of a `LossScaleOptimizer`."""
    return getattr(optimizer, "inner_optimizer", optimizer)
