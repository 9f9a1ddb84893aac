"""Moving statistics of batch normalisation, which the replicas combine once a step.

In a step, each replica's layers update their own copy of the moving mean and variance by their own
part of the batch. The update is linear, so the mean of the copies equals an update by the mean of
the replicas' statistics, for any number of calls. The copies of all layers are reduced beside the
first bucket of gradients, if the graph that called the layers also reduces the gradients. Otherwise
they are reduced at the end of `CustomCollectiveStrategy.run`.

The only call of a layer that a step makes itself is noted while the step is traced. A call in a
function, a branch or a loop is not known then, and a second call depends on the first. So these
calls count in a variable of the layer. If a graph calls the layer, then one of the graph's
operations takes the variable as an input.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import replicas_of
from gradring.tensorflow.graph.cross_device_ops import (
    RingCrossDeviceOps,
    current_variables,
    gradients_of,
)
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.replica_step import Normalised, current
from gradring.tensorflow.keras import empty_batches
from gradring.tensorflow.rules.updates import updates_of

#: Variables of `BatchNormalization` that are updated from batches instead of by gradients.
_NAMES = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")

_SUM = tf.distribute.ReduceOp.SUM


class MovingStatistics:
    """The layers of a strategy whose copies differ from replica to replica during a step."""

    def __init__(self, *, join_gradients: bool) -> None:
        """Begins without layers; `join_gradients` allows copies to be reduced with gradients."""
        self._join_gradients = join_gradients
        #: int64 of shape `[2]`: calls since the copies were combined, and calls with samples.
        self._calls: WeakKeyDictionary[Any, tf.Variable] = WeakKeyDictionary()
        #: Numbers of the layers by their first call. Ranks may call layers in other ways later.
        self._order: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        #: For each graph and layer, names of the operations whose calls were combined.
        self._combined: WeakKeyDictionary[tf.Graph, dict[Any, set[str]]] = WeakKeyDictionary()

    def follow(self, layer: Any, is_empty: bool | tf.Tensor, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, in which the layer updates its copies, and notes the call.

        An empty batch changes the copies too, by its stand-in row, until they are combined.
        """
        self._order.setdefault(layer, next(self._numbers))
        step = current()
        is_direct = step.graph is _graph()
        if is_direct and layer not in self._calls and layer not in step.normalised:
            before = [] if is_empty is False else _values(of_layer(layer))
            step.normalised[layer] = Normalised(is_empty, before)
            return call()
        self._count_noted(layer)
        outputs = empty_batches.unless(is_empty, of_layer(layer), call)
        self._count(layer, is_empty)
        return outputs

    def _count_noted(self, layer: Any) -> None:
        """Counts a noted call of the layer, before another call builds on the copies."""
        step = current()
        noted = step.normalised.pop(layer, None)
        if noted is None or step.graph is None:
            return
        # A branch or a loop that is traced now gets its op in that graph later.
        with step.graph.as_default():
            for variable, old in zip(of_layer(layer), noted.before, strict=False):
                variable.assign(tf.where(noted.is_empty, old, tf.convert_to_tensor(variable)))
            self._count(layer, noted.is_empty)

    def _count(self, layer: Any, is_empty: bool | tf.Tensor) -> None:
        """Counts a call of the layer, and whether the call's batch had samples."""
        if layer not in self._calls:
            self._calls[layer] = compat.plain_variable(0, "calls", tf.int64, (2,))
        with tf.device("/device:CPU:0"):
            has_samples = tf.cast(tf.logical_not(is_empty), tf.int64)
            self._calls[layer].assign_add(tf.stack([1, has_samples]))

    def combine(self, layers: Iterable[Any] | None = None) -> None:
        """Replaces the copies by their mean over the replicas that had samples; a collective.

        Args:
            layers: Layers to combine, if they were called; default: all.
        """
        if layers is not None and current().graph is not _graph():
            for layer in layers:
                self._count_noted(layer)
        if parts := self._parts(layers):
            self._forget(parts)
            parts.reduce()

    def all_reduce(self, ops: RingCrossDeviceOps, reduce_op: Any, value: Any, options: Any) -> Any:
        """Reduces `value`; if it consists of gradients, the copies join its first bucket."""
        leaves = tf.nest.flatten(value)
        known = current_variables(len(leaves))
        can_join = self._join_gradients and known is not None and reduce_op == _SUM
        parts: _Parts | None = None
        with falls_back(
            "the reduction of moving statistics beside gradients", "they travel by themselves"
        ):
            parts = self._parts() if can_join else None
        if not parts or not known:
            return ops._all_reduce(reduce_op, value, 0, options)
        self._forget(parts)
        variables, among = known
        with gradients_of([*variables, *parts.names], among):
            reduced = ops._all_reduce(reduce_op, [*leaves, *parts.tensors], 0, options)
        parts.assign(reduced[len(leaves) :])
        return tf.nest.pack_sequence_as(value, reduced[: len(leaves)])

    def forget(self) -> None:
        """Resets the counts when a step begins; a failed step may have left some."""
        if tf.executing_eagerly():
            for layer in self._called():
                self._calls[layer].assign([0, 0])

    def _parts(self, layers: Iterable[Any] | None = None) -> _Parts | None:
        """Returns the copies of the called layers, or None if no layer was called."""
        noted = _noted(layers)
        called = sorted([*self._called(layers), *noted], key=self._order.__getitem__)
        return _Parts(called, self._have_samples(called, noted), noted) if called else None

    def _called(self, layers: Iterable[Any] | None = None) -> list[Any]:
        """Returns the layers that were called since their copies were combined."""
        known = [layer for layer in layers or list(self._calls) if layer in self._calls]
        if tf.executing_eagerly():
            return [layer for layer in known if self._calls[layer].numpy()[0]]
        with falls_back(
            "the search for the layers of batch normalisation that a step calls",
            "all of them travel in each step",
        ):
            return [layer for layer in known if any(self._users(layer, self._handle(layer)))]
        return known  # copies of layers that were not called have weight 0 and do not change

    def _handle(self, layer: Any) -> tf.Tensor | None:
        """Returns the current graph's handle of the layer's counts; None if it captures none."""
        handle = self._calls[layer].handle
        return next((inner for outer, inner in _graph().captures if outer is handle), None)

    def _users(self, layer: Any, handle: tf.Tensor | None) -> Iterator[str]:
        """Yields the operations of a graph that count calls not yet combined in that graph."""
        if handle is None:
            return
        combined = self._combined.get(handle.graph, {}).get(layer, ())
        for op in handle.consumers():
            inner = compat.inside_called_graphs(op, handle)
            leaves = not inner or any(any(self._users(layer, each)) for each in inner)
            if leaves and op.name not in combined:
                yield op.name

    def _have_samples(self, layers: Sequence[Any], noted: Mapping[Any, Normalised]) -> tf.Tensor:
        """Returns a boolean vector: True for layers with samples since they were combined."""
        with tf.device("/device:CPU:0"):
            return tf.stack(
                [
                    tf.logical_not(noted[layer].is_empty)
                    if layer in noted
                    else self._calls[layer].read_value()[1] > 0
                    for layer in layers
                ]
            )

    def _forget(self, parts: _Parts) -> None:
        """Resets the counts of layers, and notes that their calls so far are combined."""
        for layer in parts.noted:
            del current().normalised[layer]
        layers = [layer for layer in parts.layers if layer not in parts.noted]
        with tf.device("/device:CPU:0"):
            for layer in layers:
                self._calls[layer].assign([0, 0])
        if tf.executing_eagerly():
            return
        with falls_back(
            "the list of calls of batch normalisation that are combined",
            "their statistics travel once more at the end of the step",
        ):
            combined = self._combined.setdefault(_graph(), {})
            for layer in layers:
                users = self._users(layer, self._handle(layer))
                combined.setdefault(layer, set()).update(users)


def _noted(layers: Iterable[Any] | None) -> dict[Any, Normalised]:
    """Returns the calls of layers that this graph's step has noted; None means all layers."""
    step = current()
    if step.graph is not _graph():
        return {}
    chosen = list(step.normalised if layers is None else layers)
    return {layer: step.normalised[layer] for layer in chosen if layer in step.normalised}


class _Copy(NamedTuple):
    """A variable of a layer."""

    variable: Any
    #: Index of the layer.
    place: int
    #: The value before an update that may be by an empty batch, or None.
    before: tf.Tensor | None


class _Parts:
    """A replica's summands: the copies of its layers in one tensor for each dtype."""

    def __init__(
        self,
        layers: Sequence[Any],
        has_samples: tf.Tensor,
        noted: Mapping[Any, Normalised],
    ) -> None:
        """Reads the copies; `has_samples` is a boolean for each layer."""
        self.layers, self.noted = layers, noted
        copies = [
            _Copy(variable, place, before)
            for place, layer in enumerate(layers)
            for variable, before in itertools.zip_longest(
                of_layer(layer), noted[layer].before if layer in noted else ()
            )
        ]
        copies.sort(key=lambda copy: str(copy.variable.dtype))
        groups = itertools.groupby(copies, key=lambda copy: copy.variable.dtype)
        self._groups = [_Group(list(group), has_samples) for _, group in groups]
        self.tensors = [group.tensor for group in self._groups]
        self.names = [f"{len(layers)} moving statistics" for _ in self._groups]

    def reduce(self) -> None:
        """Replaces the copies by their means over the replicas; a collective."""
        self.assign(tf.distribute.get_replica_context().all_reduce(_SUM, self.tensors))

    def assign(self, sums: Sequence[tf.Tensor]) -> None:
        """Divides the sums, and assigns the means to the copies."""
        for group, total in zip(self._groups, sums, strict=True):
            group.assign(total)


class _Group:
    """Variables of one dtype, concatenated in one vector."""

    def __init__(self, copies: Sequence[_Copy], has_samples: tf.Tensor) -> None:
        """Reads variables; the place of each is the index of its layer in `has_samples`."""
        self._variables = [copy.variable for copy in copies]
        values = _values(self._variables)
        self._sizes = [value.shape.num_elements() for value in values]
        self._places = [copy.place for copy in copies]
        own = _joined(values)
        are_updated = any(copy.before is not None for copy in copies)
        pairs = zip(copies, values, strict=True)
        #: The copies without updates by empty batches.
        self._kept = (
            _joined([value if copy.before is None else copy.before for copy, value in pairs])
            if are_updated
            else own
        )
        weights = tf.cast(has_samples, own.dtype)
        #: The copies times their layers' weights, followed by the weights: 1 with samples, else 0.
        self.tensor = tf.concat([tf.math.multiply_no_nan(own, self._each(weights)), weights], 0)

    def _each(self, weights: tf.Tensor) -> tf.Tensor:
        """Repeats the value of each layer for each element of its variables."""
        return tf.repeat(tf.gather(weights, self._places), self._sizes)

    def assign(self, total: tf.Tensor) -> None:
        sums, counts = tf.split(total, [sum(self._sizes), -1])
        counts = self._each(counts)
        # The copies of layers without samples on any replica stay as they are.
        means = tf.where(counts > 0, tf.math.divide_no_nan(sums, counts), self._kept)
        for variable, mean in zip(self._variables, tf.split(means, self._sizes), strict=True):
            variable.assign(tf.reshape(mean, variable.shape))


def _values(variables: Sequence[Any]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(variable) for variable in variables]


def _joined(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def of_layer(layer: Any) -> list[Any]:
    """Returns the variables of a `BatchNormalization` that are updated from batches."""
    found = (getattr(layer, name, None) for name in _NAMES)
    return [variable for variable in found if variable is not None]


def normalise(
    original: Callable[..., Any], layer: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for the `call` of `BatchNormalization` in a replica.

    The batch is normalised by its replica's own mean and variance. Empty batches, which a replica
    gets after the end of its data, do not count in the moving statistics.
    """
    strategy = tf.distribute.get_strategy()
    statistics: MovingStatistics = strategy.extended.moving_statistics
    follows = _follows(layer, *args, **kwargs)
    if not follows or getattr(layer, "renorm", False):
        statistics.combine([layer])  # because this call reads the statistics
    if not follows or replicas_of(strategy) == 1:
        return original(layer, inputs, *args, **kwargs)
    is_empty = empty_batches.is_empty(inputs)
    call = functools.partial(original, layer, inputs, *args, **kwargs)
    is_local = updates_of(strategy).are_local
    if not (is_local or strategy.extended._use_merge_call()):
        outputs = statistics.follow(layer, is_empty, call)
        if _has_mask(*args, **kwargs):
            # A loss is not said to be divided by the mask's sum, as the moments are.
            current().filled.append((outputs, inputs))
        return outputs
    outputs = empty_batches.unless(is_empty, of_layer(layer), call)
    if is_local:
        updates_of(strategy).add_statistics(of_layer(layer))
    else:
        # Replicas of one process share the count of calls.
        _Parts([layer], tf.stack([tf.logical_not(is_empty)]), {}).reduce()
    return outputs


def _follows(layer: Any, training: Any = None, mask: Any = None) -> bool:
    """Returns whether a call updates statistics from this replica's batch alone.

    Calls with a mask always do, even those of synchronised layers.
    """
    return bool(training and layer.trainable) and not (layer.synchronized and mask is None)


def _has_mask(training: Any = None, mask: Any = None) -> bool:
    return mask is not None


def _graph() -> tf.Graph:
    return tf.compat.v1.get_default_graph()
