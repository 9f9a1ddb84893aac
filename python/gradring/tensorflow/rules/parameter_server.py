"""`gradring.updates.ParameterServer`: this process pushes gradients and pulls variables.

The optimizer prepares gradients as usual, such as by clipping. Its step is replaced by a push of
the gradients to the servers and a pull of the resulting variables.

Under a strategy, a loss is divided by the number of replicas, because their gradients are summed.
If the servers take means instead of sums, each worker multiplies its gradient by the number of
workers, which gives the gradient of the mean over its own batch.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import numpy as np
import tensorflow as tf

from gradring import _native, updates
from gradring.errors import ConfigError, GradringError
from gradring.gradients.buckets import Entry, pack
from gradring.gradients.names import without_counters
from gradring.group.communicator import program_error
from gradring.tensorflow.cluster.placement import server_of
from gradring.tensorflow.cluster.serving import config_of
from gradring.tensorflow.cluster.tasks import Served
from gradring.tensorflow.graph import compat, failures
from gradring.tensorflow.graph.dtypes import map_values
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.graph.sparse import summed
from gradring.tensorflow.graph.start_wait import captured, ordering_token
from gradring.tensorflow.rules.updates import (
    Apply,
    Gradient,
    Updates,
    own,
    times,
    trained_by,
)
from gradring.tensorflow.seams import keras_names
from gradring.updates.rules import check_server, check_servers

_log = logging.getLogger("gradring")

#: Rules of this process that are connected to parameter servers.
connected: WeakSet[PushedUpdates] = WeakSet()

#: First values of each variable that the op for a push compares with those of the last pull.
SHOWN_VALUES = 256

#: Limit of a piece of a push, in bytes; a larger gradient is a piece of its own. A piece leaves
#: once the backward pass has computed all of it.
PIECE_BYTES = 4 * 1024 * 1024
#: Bound on the number of pieces, half of what servers take.
PIECES_MAX = 2048

_Known = tuple[str, dict[str, type]]
_BETAS: dict[str, type] = {"beta_1": float, "beta_2": float, "epsilon": float}
_ADAM: _Known = ("adam", {**_BETAS, "amsgrad": bool})
_FTRL = (
    "learning_rate_power",
    "initial_accumulator_value",
    "l1_regularization_strength",
    "l2_regularization_strength",
    "l2_shrinkage_regularization_strength",
    "beta",
)
#: For each optimizer class of Keras, the servers' name and the attributes that servers need.
_OPTIMIZERS: dict[str, _Known] = {
    "SGD": ("sgd", {"momentum": float, "nesterov": bool}),
    "RMSprop": (
        "rmsprop",
        {"rho": float, "momentum": float, "epsilon": float, "centered": bool},
    ),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adadelta": ("adadelta", {"rho": float, "epsilon": float}),
    "Adagrad": ("adagrad", {"initial_accumulator_value": float, "epsilon": float}),
    "Adamax": ("adamax", _BETAS),
    "Nadam": ("nadam", _BETAS),
    "Ftrl": ("ftrl", {name: float for name in _FTRL}),
    "Lion": ("lion", {"beta_1": float, "beta_2": float}),
}


class PushedUpdates(Updates):
    """Replaces the optimizer's step by a push to the parameter servers and a pull from them."""

    are_local = True
    replaces_step = True
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
        self._optimizer: Any = None
        self._trained: list[Any] = []
        self._client: _native.ParameterClient | None = None
        #: Orders the pushes of a graph.
        self._token: Any = None
        #: Indices of the variables whose gradients travel together, in a graph, by piece.
        self._pieces: list[list[int]] = []
        #: Handle of the push of this step.
        self._push: tf.Tensor | None = None

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Refuses optimizers and variables that the servers do not support.

        Raises:
            gradring.errors.ConfigError: The servers support neither the optimizer, nor its
                averages of weights, nor a variable's constraint or dtype.
        """
        _describe(optimizer)
        where = f"under update={self._rule}"
        if optimizer.use_ema:
            raise ConfigError(f"use_ema=True of {optimizer.name} averages nothing {where}")
        for variable in variables:
            path = _path(variable)
            if getattr(variable, "constraint", None) is not None:
                raise ConfigError(f"{path} has a constraint, which no server keeps to {where}")
            if variable.dtype not in ("float32", tf.float32):
                raise ConfigError(f"{path} is {variable.dtype}, and servers keep float32 {where}")

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Connects at the first call; then calls the optimizer's `apply`, which calls `step`."""
        if self._optimizer is None:
            is_other = self._begin(optimizer)
            if is_other and tf.executing_eagerly():
                _log.info("the first batch of %s is not used: others began", self._name)
                return
        elif self._optimizer is not optimizer:
            raise ConfigError(
                f"{self._name}: {optimizer.name} is a second optimizer under update={self._rule}, "
                "and the servers have one for each job; train one model with one optimizer"
            )
        # Read now, because the optimizer may apply weight decay before it calls `step`.
        # A reference to a whole value would make the decay copy the variable.
        found = [tf.reshape(own(each), [-1])[:SHOWN_VALUES] for each in self._trained]
        pieces = len(self._pieces_now())
        opened = {"token": captured(self._token), "found": found}
        (self._push,) = self._run("GradringPushOpen", opened, {"pieces": pieces})
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
        by_id = {id_of(v): grad for v, grad in zip(variables, gradients, strict=True)}
        found = [by_id.get(id_of(variable)) for variable in self._trained]
        if self._rule.is_sum and self._multiplies(optimizer):
            found = [map_values(lambda mean: mean / self._workers, each) for each in found]
        pieces = enumerate(self._pieces_now())
        pushed = {
            "token": captured(self._token),
            "learning_rate": tf.cast(tf.convert_to_tensor(learning_rate), tf.float32),
            "weight_decay": tf.constant(float(optimizer.weight_decay or 0.0)),
            "pieces": [self._push_piece(index, piece, found) for index, piece in pieces],
        }
        (handle,) = self._run("GradringPush", pushed)
        present = [own(variable).read_value() for variable in self._trained]
        waiting = {"handle": handle, "present": present}
        pulled = self._run("GradringPull", waiting, outputs=len(present))
        for variable, value in zip(self._trained, pulled, strict=True):
            own(variable).assign(value)

    def _pieces_now(self) -> list[list[int]]:
        """Returns the pieces of a push; only in a graph does one leave before the others."""
        return [[*range(len(self._trained))]] if tf.executing_eagerly() else self._pieces

    def _push_piece(
        self, index: int, piece: Sequence[int], gradients: Sequence[Gradient]
    ) -> tf.Tensor:
        """Hands the gradients of a piece to the client; returns the handle of the push."""
        of_piece = [gradients[variable] for variable in piece]
        forms = ["-"] * len(gradients)
        for variable, gradient in zip(piece, of_piece, strict=True):
            forms[variable] = _form(gradient)
        by_rows = [summed(it) for it in of_piece if isinstance(it, tf.IndexedSlices)]
        inputs = {
            "token": captured(self._token),
            "handle": self._push,
            "dense": [it for it in of_piece if _form(it) == "d"],
            "indices": [tf.cast(it.indices, tf.int64) for it in by_rows],
            "values": [it.values for it in by_rows],
        }
        attributes: dict[str, str | int] = {"piece": index, "forms": "".join(forms)}
        (handle,) = self._run("GradringPushPiece", inputs, attributes)
        return handle

    def _run(
        self,
        op: str,
        inputs: dict[str, Any],
        attributes: Mapping[str, str | int] = MappingProxyType({}),
        outputs: int = 1,
    ) -> list[tf.Tensor]:
        assert self._client is not None, "a step begins with apply"
        with tf.device("/device:CPU:0"):
            return compat.run_op(
                op,
                inputs,
                {**attributes, "client": self._client.id},
                outputs,
                lengths={"dense": "D", "indices": "R", "values": "R"},
                unseen=True,
            )

    def stats(self) -> dict[str, Any]:
        """Returns the client's counters; empty before the first step."""
        return {} if self._client is None else dict(self._client.stats())

    def leave(self) -> None:
        """Waits for the last push, and tells the servers that this worker has finished."""
        if self._client is not None:
            atexit.unregister(self._leave_at_exit)
            self._client.leave()

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

    def _begin(self, optimizer: Any) -> bool:
        """Connects, sends initial values if the servers have none, and pulls the variables.

        Returns whether the pulled values differ from this worker's.

        Raises:
            gradring.errors.ConfigError: The worker knows no servers.
        """
        if not self._served.servers.addresses:
            raise ConfigError(
                f"{self._name} cannot train under update={self._rule}: it knows no servers"
            )
        self._trained = trained_by(optimizer)
        placement = self._placement()
        addresses = list(self._served.servers.addresses)
        client = _native.ParameterClient(
            worker=self._served.place.rank, addresses=addresses, config=config_of(addresses)
        )
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        decays = inner.weight_decay is not None
        paths = without_counters([_path(variable) for variable in self._trained])
        described = [
            (
                path,
                list(variable.shape),
                "float32",
                decays and bool(keras_names.USE_WEIGHT_DECAY.of(inner)(variable)),
            )
            for path, variable in zip(paths, self._trained, strict=True)
        ]
        client.begin(described, _describe(inner), placement)
        _native.tensorflow_register()
        self._token = ordering_token()
        # The backward pass computes the gradients of the last layers first.
        order = [*range(len(self._trained))][::-1]
        sizes = [Entry("float32", 4 * int(np.prod(self._trained[it].shape))) for it in order]
        # Two neighbouring pieces together are larger than the limit.
        total = sum(entry.size_bytes or 0 for entry in sizes)
        packed = pack(sizes, max(PIECE_BYTES, 2 * total // PIECES_MAX))
        self._pieces = [[order[index] for index in bucket.indices][::-1] for bucket in packed]
        self._client, self._optimizer = client, optimizer
        connected.add(self)
        atexit.register(self._leave_at_exit)
        # Runs while a graph is being traced, before the graph computes anything.
        with tf.init_scope():
            before = self._values()
            pulled = self._pull(client)
            for variable, value in zip(self._trained, pulled, strict=True):
                own(variable).assign(value)
        pairs = zip(before, pulled, strict=True)
        return not all(np.array_equal(one, other) for one, other in pairs)

    def _placement(self) -> dict[int, int]:
        """Returns the server of each variable that the program has placed, by variable index."""
        paths = [_path(variable) for variable in self._trained]
        found = {}
        for part, server in self._rule.placement.items():
            wanted = f"/{_without_output(part)}/"
            those = [index for index, path in enumerate(paths) if wanted in f"/{path}/"]
            if not those:
                raise ConfigError(
                    f"ParameterServer: placement has {part!r}, which is a part of no variable's "
                    f"path; there are {', '.join(paths)}"
                )
            found.update(dict.fromkeys(those, server))
        for index, variable in enumerate(self._trained):
            placed = server_of(variable)
            if placed is not None and found.setdefault(index, placed) != placed:
                raise ConfigError(
                    f"ParameterServer: tf.device has {paths[index]} on server {placed}, and "
                    f"placement on server {found[index]}; leave one of them out"
                )
        return found

    def _values(self) -> list[np.ndarray[Any, Any]]:
        return [np.array(own(variable).numpy(), np.float32) for variable in self._trained]

    def _pull(self, client: _native.ParameterClient) -> list[np.ndarray[Any, Any]]:
        into = [np.empty(variable.shape, np.float32) for variable in self._trained]
        # Servers that have lost their values request initial ones again.
        while client.pull(into) is None:
            client.push_initial(self._values())
        return into

    def _leave_at_exit(self) -> None:
        if program_error() is not None:
            # The program failed, so this is a lost worker: it may come back, and must not leave.
            assert self._client is not None, "it is registered once there is one"
            self._client.close()
            return
        try:
            self.leave()
        except GradringError as error:
            _log.warning("%s could not leave the servers: %s", self._name, error)


def _describe(optimizer: Any) -> str:
    """Returns the optimizer's description for the servers, in JSON.

    Raises:
        gradring.errors.ConfigError: The servers do not support the optimizer.
    """
    known: Any = sys.modules["keras"].optimizers
    kind = type(optimizer)
    if kind is known.LossScaleOptimizer:
        return _describe(optimizer.inner_optimizer)
    for keras_name, (name, values) in _OPTIMIZERS.items():
        if kind is getattr(known, keras_name):
            return json.dumps({name: {it: of(getattr(optimizer, it)) for it, of in values.items()}})
    *names, last = _OPTIMIZERS
    raise ConfigError(
        f"parameter servers do not know {kind.__name__}; they know {', '.join(names)} and {last} "
        "of Keras 3: use one of them, or another update rule"
    )


def _form(gradient: Gradient) -> str:
    """Returns the letter of a gradient's form, as the op for a push has it."""
    if gradient is None:
        return "-"
    return "r" if isinstance(gradient, tf.IndexedSlices) else "d"


def _path(variable: Any) -> str:
    return _without_output(str(getattr(variable, "path", variable.name)))


def _without_output(name: str) -> str:
    """Removes the output number that TensorFlow appends to a name: `w:0` becomes `w`."""
    return name.removesuffix(":0")
