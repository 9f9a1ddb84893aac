"""An optimizer of the program at the parameter servers: its variables and its connections.

The servers have a model for each optimizer: a log, versions and snapshots of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from gradring import _native, updates
from gradring.errors import ConfigError
from gradring.gradients.buckets import Entry, pack
from gradring.gradients.names import without_counters
from gradring.tensorflow.cluster.placement import server_of
from gradring.tensorflow.cluster.serving import config_of
from gradring.tensorflow.cluster.tasks import Served
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.graph.sparse import summed
from gradring.tensorflow.graph.start_wait import captured
from gradring.tensorflow.rules.updates import Gradient, own, trained_by
from gradring.tensorflow.seams import keras_names

_log = logging.getLogger("gradring")

#: First values of each variable that the op for a push compares with those of the last pull.
SHOWN_VALUES = 256

#: Limit of a piece of a push, in bytes; a larger gradient is a piece of its own. A piece leaves
#: once the backward pass has computed all of it.
PIECE_BYTES = 4 * 1024 * 1024
#: Bound on the number of pieces, half of what servers take.
PIECES_MAX = 2048

_Known = tuple[str, dict[str, type]]
#: Dtypes of variables that servers keep.
KEPT = ("float32", "float64", "bfloat16", "float16")

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


class ServedOptimizer:
    """Pushes gradients of one optimizer to the servers, and pulls its variables."""

    def __init__(
        self,
        optimizer: Any,
        earlier: Sequence[ServedOptimizer],
        rule: updates.ParameterServer,
        served: Served,
    ) -> None:
        """Connects, sends initial values if the servers have none, and pulls the variables.

        Args:
            optimizer: An optimizer of Keras 3 that has been built; no `LossScaleOptimizer`.
            earlier: Optimizers that the program began to use before.
            rule: The update rule.
            served: This worker and its servers.

        Raises:
            gradring.errors.ConfigError: The servers do not support the optimizer, or the placement
                does not fit its variables.
            gradring.errors.GradringError: The servers are unreachable or refuse this worker.
        """
        self.optimizer = optimizer
        self.trained = trained_by(optimizer)
        addresses = list(served.servers.addresses)
        self.client = _native.ParameterClient(
            worker=served.place.rank,
            addresses=addresses,
            config=config_of(addresses),
            optimizer=len(earlier),
        )
        decays = optimizer.weight_decay is not None
        names = names_of(self.trained, [it for each in earlier for it in each.trained])
        dtypes = [dtype_of(variable).name for variable in self.trained]
        described = [
            (
                name,
                list(variable.shape),
                dtype,
                decays and bool(keras_names.USE_WEIGHT_DECAY.of(optimizer)(variable)),
            )
            for name, dtype, variable in zip(names, dtypes, self.trained, strict=True)
        ]
        described_as = describe(optimizer, *dtypes[:1])
        self.client.begin(described, described_as, self._placement(rule))
        #: Indices of the variables whose gradients travel together, in a graph, by piece.
        self._pieces = _pieces_of(self.trained)
        #: Handle of the push of this step.
        self._push: tf.Tensor | None = None
        # Runs while a graph is being traced, before the graph computes anything.
        try:
            with tf.init_scope():
                values = self._values()
                pulled = self._pull()
        except BaseException:
            # Other workers would wait for this one, and nobody could close it.
            self.client.close()
            raise
        pairs = zip(values, pulled, strict=True)
        #: True if the first pulled values differ from those of this worker.
        self.began_elsewhere = not all(np.array_equal(one, other) for one, other in pairs)

    def open_push(self, token: Any) -> None:
        """Begins the push of a step, unless the program has set a variable since the last one.

        Raises:
            gradring.errors.ConfigError: The program has set a variable. A graph raises it when it
                runs.
        """
        found = [tf.reshape(own(each), [-1])[:SHOWN_VALUES] for each in self.trained]
        opened = {"token": captured(token), "found": found}
        (self._push,) = self._run("GradringPushOpen", opened, {"pieces": len(self._pieces_now())})

    def found(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Returns the gradient of each variable that the optimizer trains."""
        by_id = {id_of(v): grad for v, grad in zip(variables, gradients, strict=True)}
        found = ((by_id.get(id_of(variable)), variable) for variable in self.trained)
        return [it if it is None else tf.cast(it, dtype_of(variable)) for it, variable in found]

    def exchange(self, gradients: Sequence[Gradient], learning_rate: Any, token: Any) -> None:
        """Pushes a gradient of each variable, pulls the variables, and assigns them.

        Args:
            gradients: A gradient for each variable of `trained`.
            learning_rate: Learning rate of this step.
            token: Orders the pushes of a graph.
        """
        pieces = enumerate(self._pieces_now())
        pushed = {
            "token": captured(token),
            "learning_rate": tf.cast(tf.convert_to_tensor(learning_rate), tf.float64),
            "weight_decay": tf.constant(self._weight_decay, tf.float64),
            "pieces": [self._push_piece(index, it, gradients, token) for index, it in pieces],
        }
        (handle,) = self._run("GradringPush", pushed)
        present = [own(variable).read_value() for variable in self.trained]
        waiting = {"handle": handle, "present": present}
        pulled = self._run("GradringPull", waiting, outputs=len(present))
        for variable, value in zip(self.trained, pulled, strict=True):
            own(variable).assign(value)

    def exchange_nothing(self) -> None:
        """Takes part in an update without a gradient, and pulls the variables; only eagerly."""
        rate = float(tf.convert_to_tensor(self.optimizer.learning_rate))
        self.client.push([None] * len(self.trained), rate, self._weight_decay)
        self._pull()
        self.optimizer.iterations.assign_add(1)

    def _pieces_now(self) -> list[list[int]]:
        """Returns the pieces of a push; only in a graph does one leave before the others."""
        return [[*range(len(self.trained))]] if tf.executing_eagerly() else self._pieces

    def _push_piece(
        self, index: int, piece: Sequence[int], gradients: Sequence[Gradient], token: Any
    ) -> tf.Tensor:
        """Hands the gradients of a piece to the client; returns the handle of the push."""
        of_piece = [gradients[variable] for variable in piece]
        forms = ["-"] * len(gradients)
        for variable, gradient in zip(piece, of_piece, strict=True):
            forms[variable] = _form(gradient)
        by_rows = [summed(it) for it in of_piece if isinstance(it, tf.IndexedSlices)]
        inputs = {
            "token": captured(token),
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
        with tf.device("/device:CPU:0"):
            return compat.run_op(
                op,
                inputs,
                {**attributes, "client": self.client.id},
                outputs,
                lengths={"indices": "R"},
                types={"found": "T", "present": "T", "dense": "D", "values": "V"},
                unseen=True,
            )

    @property
    def _weight_decay(self) -> float:
        return float(self.optimizer.weight_decay or 0.0)

    def _values(self) -> list[np.ndarray[Any, Any]]:
        return [np.array(own(variable).numpy()) for variable in self.trained]

    def _pull(self) -> list[np.ndarray[Any, Any]]:
        """Pulls the variables, assigns them, and returns their values."""
        pulled = [np.empty(it.shape, dtype_of(it).as_numpy_dtype) for it in self.trained]
        # Servers that have lost their values request initial ones again.
        while self.client.pull(pulled) is None:
            self.client.push_initial(self._values())
        for variable, value in zip(self.trained, pulled, strict=True):
            own(variable).assign(value)
        return pulled

    def _placement(self, rule: updates.ParameterServer) -> dict[int, int]:
        """Returns the server of each variable that the program has placed, by variable index."""
        paths = [path_of(variable) for variable in self.trained]
        found = {}
        for part, server in rule.placement.items():
            wanted = f"/{_without_output(part)}/"
            those = [index for index, path in enumerate(paths) if wanted in f"/{path}/"]
            if not those:
                # The variables of another optimizer may be meant.
                _log.warning(
                    "placement has %r, which is a part of no variable's path of %s; there are %s",
                    *(part, self.optimizer.name, ", ".join(paths)),
                )
            found.update(dict.fromkeys(those, server))
        for index, variable in enumerate(self.trained):
            placed = server_of(variable)
            if placed is not None and found.setdefault(index, placed) != placed:
                raise ConfigError(
                    f"ParameterServer: tf.device has {paths[index]} on server {placed}, and "
                    f"placement on server {found[index]}; leave one of them out"
                )
        return found


def describe(optimizer: Any, first_dtype: str = "float32") -> str:
    """Returns the optimizer's description for the servers, in JSON.

    Args:
        optimizer: An optimizer of Keras 3.
        first_dtype: Dtype of its first variable, in which Nadam has a product of decays.

    Raises:
        gradring.errors.ConfigError: The servers do not support the optimizer.
    """
    known: Any = sys.modules["keras"].optimizers
    kind = type(optimizer)
    for keras_name, (name, values) in _OPTIMIZERS.items():
        if kind is getattr(known, keras_name):
            described = {it: of(getattr(optimizer, it)) for it, of in values.items()}
            if name == "nadam":
                described["product_dtype"] = first_dtype
            return json.dumps({name: described})
    *names, last = _OPTIMIZERS
    raise ConfigError(
        f"parameter servers do not know {kind.__name__}; they know {', '.join(names)} and {last} "
        "of Keras 3: use one of them, or another update rule"
    )


def _pieces_of(variables: Sequence[Any]) -> list[list[int]]:
    """Returns the indices of the variables of each piece, ascending."""
    # The backward pass computes the gradients of the last layers first.
    order = [*range(len(variables))][::-1]
    # Gradients of several dtypes may be in one piece.
    sizes = [Entry("any", size_bytes_of(variables[index])) for index in order]
    # Two neighbouring pieces together are larger than the limit.
    total = sum(entry.size_bytes or 0 for entry in sizes)
    packed = pack(sizes, max(PIECE_BYTES, 2 * total // PIECES_MAX))
    return [sorted(order[index] for index in bucket.indices) for bucket in packed]


def _form(gradient: Gradient) -> str:
    """Returns the letter of a gradient's form, as the op for a push has it."""
    if gradient is None:
        return "-"
    return "r" if isinstance(gradient, tf.IndexedSlices) else "d"


def names_of(variables: Sequence[Any], earlier: Sequence[Any]) -> list[str]:
    """Returns names of variables that workers compare.

    Equal models that a worker begins to train in another order have other names, because counters
    of `earlier` variables count, too.
    """
    return without_counters([path_of(it) for it in [*earlier, *variables]])[len(earlier) :]


def dtype_of(variable: Any) -> tf.DType:
    """Returns the dtype of a variable of Keras or TensorFlow."""
    return tf.as_dtype(variable.dtype)


def size_bytes_of(variable: Any) -> int:
    """Returns the size of a variable of Keras or TensorFlow in bytes."""
    return int(dtype_of(variable).size * np.prod(variable.shape))


def path_of(variable: Any) -> str:
    """Returns the path of a variable of Keras or TensorFlow."""
    return _without_output(str(getattr(variable, "path", variable.name)))


def _without_output(name: str) -> str:
    """Removes the output number that TensorFlow appends to a name: `w:0` becomes `w`."""
    return name.removesuffix(":0")
