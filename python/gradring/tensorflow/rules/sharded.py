"""`gradring.updates.Sharded`: each rank updates its part of the variables, and all gather them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.gradients.checks import CheckGradients, Embeddings
from gradring.gradients.names import Names, name_of
from gradring.gradients.reduction import Reduction
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph.backward_order import start_as_soon_as_ready
from gradring.tensorflow.graph.cross_device_ops import alone
from gradring.tensorflow.graph.dtypes import map_values
from gradring.tensorflow.graph.reduction import reduce_leaves
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.graph.start_wait import start_all_gather_v, start_reduce_scatter_v, wait
from gradring.tensorflow.rules.optimizer_parts import Parts
from gradring.tensorflow.rules.updates import Apply, Gradient, Updates, own, when
from gradring.tensorflow.seams import keras_names

#: Optimizers of Keras that update each element by itself.
ELEMENTWISE = (
    *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"),
)


class ShardedUpdates(Updates):
    """Scatters the sums of gradients, updates own parts, and gathers the variables."""

    applies_inside = True
    holds_parts = True

    def __init__(
        self,
        communicator: Communicator,
        bucket_bytes: int,
        check_gradients: CheckGradients | None,
        embeddings: Embeddings = "rows",
        op: str = "sum",
        predivide: float = 1.0,
    ) -> None:
        """Takes the arguments of the strategy.

        Args:
            communicator: The group.
            bucket_bytes: Argument of the strategy.
            check_gradients: Argument of the strategy.
            embeddings: Argument of the strategy.
            op: Reduction of the gradients, "sum" or "mean".
            predivide: Divisor of dense gradients before the reduction, and factor after it.
        """
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._check_gradients: CheckGradients | None = check_gradients
        self._embeddings: Embeddings = embeddings
        self._op = op
        self._predivide = predivide
        self._parts: WeakKeyDictionary[Any, Parts] = WeakKeyDictionary()
        #: Positions of the variables of the call that is being traced, and those of own gradients.
        self._call: tuple[Sequence[int], Sequence[int]] = ((), ())

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Divides the variables of an optimizer.

        Raises:
            gradring.errors.ConfigError: The optimizer does not update each element by itself, or a
                variable is assigned by its gradient.
        """
        self._check(optimizer, variables)
        self._parts[optimizer] = Parts(
            optimizer.name, self._communicator, variables, self._bucket_bytes
        )

    def add_variable(self, make: Callable[[], Any], optimizer: Any, reference: Any) -> Any:
        """Makes a variable of the optimizer's state that holds this rank's part."""
        parts = self._parts.get(optimizer)
        if parts is None or id_of(reference) not in parts.positions:
            return make()
        return parts.add_state(make, reference)

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Applies the sums of gradients to this rank's parts, and gathers the variables."""
        parts = self.parts_of(optimizer)
        positions = self._positions(parts, optimizer, variables)
        given = {
            position: gradient
            for position, gradient in zip(positions, gradients, strict=True)
            if gradient is not None
        }
        if not given:
            apply(gradients)
            return
        weights = parts.weights()
        self._check_decay(optimizer, parts, weights)
        sums, spent = self._sums(parts, given)
        parts.cut()
        touched = sorted(range(len(weights)) if optimizer.use_ema else given)
        for position in touched:
            whole = tf.convert_to_tensor(own(parts.trained[position]))
            # A gather without spent memory needs its shape only.
            spent.setdefault(position, whole)
            weights[position].assign(parts.part_of(position, whole))
        rank = self._communicator.rank
        owned = [position for position in sums if parts.division(position).count(rank)]
        # The optimizer counts its steps, even if this rank has no part.
        applied = owned or list(sums)[:1]
        self._call = (list(sums), applied)
        with alone(), _standing_in(optimizer, weights):
            apply([sums[position] for position in applied], [weights[i] for i in applied])

        def gather() -> None:
            self._gather(parts, touched, spent)
            _constrain([parts.trained[position] for position in given])

        # Averages may overwrite the variables in any call.
        overwrites = optimizer.use_ema and optimizer.ema_overwrite_frequency
        if optimizer.gradient_accumulation_steps and not overwrites:
            # `iterations` counts updates, and this one calls.
            calls = own(keras_names.ITERATIONS.of(optimizer, optimizer.iterations))
            when(tf.equal(calls % optimizer.gradient_accumulation_steps, 0), gather)
        else:
            gather()

    def clip(
        self, clip: Callable[[Sequence[Gradient]], Any], optimizer: Any, gradients: Sequence[Any]
    ) -> Any:
        """Clips by the norms of whole gradients; each rank has parts of them.

        The formulas are those of Keras and of `tf.clip_by_norm`.
        """
        each, all_together = optimizer.clipnorm, optimizer.global_clipnorm
        if not each and not all_together:
            return clip(gradients)
        positions, applied = self._call
        squares = self._squares(gradients)
        if not each:
            norm = tf.sqrt(tf.reduce_sum(squares))
            limit = tf.cast(all_together, norm.dtype)
            scale = limit * tf.minimum(1.0 / norm, 1.0 / limit)
            # The scale is NaN if the norm is infinite or NaN.
            scale += norm - norm
            # As in Keras, the product of `tf.IndexedSlices` is dense.
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            return [_times(gradient, scale) for gradient in dense]
        norms = tf.unstack(tf.sqrt(squares), len(positions))
        order = {position: index for index, position in enumerate(positions)}
        limit = tf.cast(each, squares.dtype)
        return [
            _times(_times(gradient, limit), 1 / tf.maximum(norms[order[position]], limit))
            for gradient, position in zip(gradients, applied, strict=True)
        ]

    def norm(self, own_norm: tf.Tensor) -> tf.Tensor:
        """Returns the norm of whole gradients from that of this rank's parts."""
        return tf.sqrt(self._all_reduce("squares of gradients", own_norm * own_norm))

    def sync(self, variables: Iterable[Any]) -> None:
        """Gives all ranks the whole state of the variables' optimizers, until the next step."""
        for parts in self._about(variables):
            parts.make_whole()

    def before_saving(self, variables: Iterable[Any]) -> None:
        """Gathers whole states, which one rank alone is about to save."""
        self.sync(variables)

    def _about(self, variables: Iterable[Any]) -> list[Parts]:
        ids = {id_of(variable) for variable in variables}
        return [parts for parts in self._parts.values() if parts.has_any(ids)]

    def _check(self, optimizer: Any, variables: Sequence[Any]) -> None:
        kinds = {getattr(sys.modules["keras"].optimizers, name, None) for name in ELEMENTWISE}
        definer = next(kind for kind in type(optimizer).__mro__ if "update_step" in vars(kind))
        if definer not in kinds:
            raise self._refusal(
                f"{type(optimizer).__name__} may use more than one element of a variable to update "
                f"another, and each rank has a part; use one of {', '.join(ELEMENTWISE)}, or "
                "AllReduce()"
            )
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise self._refusal(
                    f"{name_of(variable)} is overwritten by its gradient, which is not divided; "
                    "use AllReduce()"
                )

    def parts_of(self, optimizer: Any) -> Parts:
        """Returns the parts of an optimizer.

        Raises:
            gradring.errors.ConfigError: The optimizer was not built under this rule, or it needs
                its whole state again.
        """
        parts = self._parts.get(optimizer)
        if parts is None:
            raise self._refusal(
                f"{optimizer.name} was not built under this strategy; make it and call its "
                "build(model.trainable_variables) inside of strategy.scope()"
            )
        parts.check_place()
        return parts

    def _positions(self, parts: Parts, optimizer: Any, variables: Sequence[Any]) -> list[int]:
        """Returns the positions of variables.

        Raises:
            gradring.errors.ConfigError: The optimizer was not built for a variable, or a variable
                is given twice.
        """
        positions = [parts.positions.get(id_of(variable)) for variable in variables]
        for place, (position, variable) in enumerate(zip(positions, variables, strict=True)):
            if position is None:
                raise self._refusal(
                    f"{optimizer.name} was not built for the variable {name_of(variable)}; make a "
                    "new optimizer when you change what is trained, or call its build before the "
                    "first step"
                )
            if position in positions[:place]:
                raise self._refusal(
                    f"{optimizer.name} gets two gradients of {name_of(variable)}; add them up"
                )
        return [position for position in positions if position is not None]

    def _check_decay(self, optimizer: Any, parts: Parts, weights: Sequence[Any]) -> None:
        """Refuses parts that the optimizer decays otherwise than their variables.

        Raises:
            gradring.errors.ConfigError: This version of Keras knows variables by other names.
        """
        if optimizer.weight_decay is None:
            return
        decays = keras_names.USE_WEIGHT_DECAY.of(optimizer)
        for part, variable in zip(weights, parts.trained, strict=True):
            if decays(part) != decays(variable):
                version = sys.modules["keras"].__version__
                raise self._refusal(
                    f"Keras {version} would apply weight decay to a part of {name_of(variable)} "
                    "otherwise than to the variable; use AllReduce()"
                )

    def _refusal(self, problem: str) -> ConfigError:
        rank, host = self._communicator.rank, self._communicator.host
        text = f"update=Sharded() on rank {rank} of {host}: {problem}"
        return ConfigError(text, rank=rank, host=host)

    def _sums(
        self, parts: Parts, gradients: dict[int, Any]
    ) -> tuple[dict[int, Any], dict[int, tf.Tensor]]:
        """Sums gradients.

        Returns:
            This rank's parts of the sums, by position, in a fixed order. And tensors of which only
            these parts are sums, for dense gradients.
        """
        rows = {p: g for p, g in gradients.items() if isinstance(g, tf.IndexedSlices)}
        whole = self._scattered(parts, {p: g for p, g in gradients.items() if p not in rows})
        factor = self._predivide
        sums: dict[int, Any] = {
            p: _times(parts.part_of(p, tensor), factor) for p, tensor in whole.items()
        }
        for position, total in zip(rows, self._with_all_rows(parts, rows), strict=True):
            sums[position] = _own_rows(parts, position, total)
        return {position: sums[position] for position in sorted(sums)}, whole

    def _scattered(self, parts: Parts, gradients: dict[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Returns tensors of which this rank's parts are sums of gradients, by position."""
        dtypes = {position: parts.trained[position].dtype for position in gradients}
        factor = 1 / self._predivide
        dense = {p: _times(tf.cast(g, dtypes[p]), factor) for p, g in gradients.items()}
        reduction = self._reduction("sum", parts, list(dense))
        places = {position: index for index, position in enumerate(dense)}
        buckets = parts.buckets_of(dense)
        tensors = [[dense[position] for position in bucket] for bucket in buckets]
        started = [
            start_reduce_scatter_v(
                bucket,
                tf.constant(parts.counts(members), tf.int64),
                reduction.of([places[position] for position in members], number),
            )
            for number, (bucket, members) in enumerate(zip(tensors, buckets, strict=True))
        ]
        start_as_soon_as_ready(tensors, [handle for *_, handle in started])
        found = {}
        for members, results in zip(buckets, wait(started), strict=True):
            for position, result in zip(members, results, strict=True):
                found[position] = result
        return found

    def _with_all_rows(self, parts: Parts, gradients: dict[int, Any]) -> Sequence[Any]:
        if not gradients:
            return ()
        positions = list(gradients)
        return reduce_leaves(list(gradients.values()), self._reduction("rows", parts, positions))

    def _gather(self, parts: Parts, positions: Sequence[int], memory: dict[int, tf.Tensor]) -> None:
        """Assigns the trained variables the values of all ranks' parts.

        Args:
            parts: The parts of the optimizer.
            positions: Positions of the variables.
            memory: Tensors of the variables' shapes, by position. Their memory is used up, unless
                something else needs it.
        """
        weights, buckets = parts.weights(), parts.buckets_of(positions)
        order = [position for bucket in buckets for position in bucket]
        names = Names.of_variables("Sharded: variables", order, [parts.trained[i] for i in order])
        reduction = Reduction(self._communicator, names)
        started, ahead = [], 0
        for number, bucket in enumerate(buckets):
            counts = tf.constant(parts.counts(bucket), tf.int64)
            collective = reduction.of(range(ahead, ahead + len(bucket)), number)
            started.append(
                start_all_gather_v(
                    [memory[i] for i in bucket],
                    [tf.convert_to_tensor(weights[i]) for i in bucket],
                    counts,
                    collective,
                )
            )
            ahead += len(bucket)
        for bucket, gathered in zip(buckets, wait(started), strict=True):
            for position, value in zip(bucket, gathered, strict=True):
                variable = own(parts.trained[position])
                variable.assign(tf.reshape(value, variable.shape))

    def _squares(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Returns the sums of squares of the whole gradients of the current call."""
        positions, applied = self._call
        values = [getattr(gradient, "values", gradient) for gradient in gradients]
        dtype = tf.float64 if any(it.dtype == tf.float64 for it in values) else tf.float32
        parts = [tf.reduce_sum(tf.square(tf.cast(value, dtype))) for value in values]
        known = dict(zip(applied, parts, strict=True))
        zero = tf.zeros([], dtype)
        return self._all_reduce(
            "squares of gradients", tf.stack([known.get(position, zero) for position in positions])
        )

    def _all_reduce(self, label: str, value: tf.Tensor) -> tf.Tensor:
        names = Names.of_variables(f"Sharded: {label}", [value], None)
        (total,) = reduce_leaves([value], Reduction(self._communicator, names))
        return total

    def _reduction(self, label: str, parts: Parts, positions: Sequence[int]) -> Reduction:
        variables = [parts.trained[position] for position in positions]
        names = Names.of_variables(f"Sharded: {label}", positions, variables, parts.trained)
        return Reduction(
            self._communicator,
            names,
            self._op,
            self._bucket_bytes,
            self._check_gradients,
            self._embeddings,
        )


def _own_rows(parts: Parts, position: int, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the rows of a gradient that are in this rank's part of a variable.

    If the variable is divided between elements, each element counts as a row.
    """
    division, rank = parts.division(position), parts.communicator.rank
    if division.has_all(rank):
        return gradient
    values, indices = gradient.values, tf.cast(gradient.indices, tf.int64)
    shape = division.part_shape(rank)
    if not division.is_by_rows:
        size = values.shape[1:].num_elements()
        indices = tf.reshape(indices[:, None] * size + tf.range(size, dtype=tf.int64), [-1])
        values = tf.reshape(values, [-1, *shape[1:]])
    units = division.units(rank)
    is_own = tf.logical_and(indices >= units.start, indices < units.stop)
    return tf.IndexedSlices(
        tf.boolean_mask(values, is_own),
        tf.boolean_mask(indices, is_own) - units.start,
        tf.constant(shape, tf.int64),
    )


def _times(gradient: Any, factor: tf.Tensor | float) -> Any:
    if not tf.is_tensor(factor) and factor == 1:
        return gradient
    return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)


def _constrain(variables: Sequence[Any]) -> None:
    """Applies the constraints of variables, as Keras does after an update."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


class _Here:
    """Stands in for a strategy in an optimizer that updates this rank's parts only."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def extended(self) -> _Here:
        return self

    def update(
        self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """See `tf.distribute.StrategyExtended.update`."""
        return fn(var, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy.extended, name)


@contextlib.contextmanager
def _standing_in(optimizer: Any, weights: Sequence[Any]) -> Iterator[None]:
    """Has an optimizer take parts for its variables, while the block runs."""
    # Keras would track what is set as an attribute, and save it.
    attributes = vars(optimizer)
    strategy = keras_names.DISTRIBUTION_STRATEGY
    before = {seam.name: seam.of(optimizer) for seam in (keras_names.TRAINED, strategy)}
    attributes[keras_names.TRAINED.name] = list(weights)
    attributes[strategy.name] = _Here(before[strategy.name])
    try:
        yield
    finally:
        attributes.update(before)
