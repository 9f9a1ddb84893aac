"""Reduction of gradients over all ranks, shared by the tape and the optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import tensorflow as tf

from gradring.gradients.names import Names, name_of, with_gaps, without_counters
from gradring.gradients.reduction import Reduction
from gradring.horovod.process_sets import ProcessSet, communicator_of, global_process_set
from gradring.horovod.tensorflow.calls import require_equal_calls
from gradring.horovod.tensorflow.collectives import reduce_dense
from gradring.horovod.tensorflow.compression import Compression, Compressor, checked
from gradring.horovod.tensorflow.reduce_ops import Average, ReduceOp, chosen, linear
from gradring.tensorflow.graph.dtypes import map_values
from gradring.tensorflow.graph.reduction import reduce_leaves, with_known_shapes
from gradring.tensorflow.graph.replica_step import note_reduced

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

Gradient = Any


@dataclass(frozen=True)
class Options:
    """The options of a reduction of gradients.

    Attributes:
        compression: Compression on the wire.
        sparse_as_dense: True to make `tf.IndexedSlices` dense before the reduction.
        op: Average or Sum.
        gradient_predivide_factor: Divisor before the sum of an average, and factor after it.
        num_groups: The older form of ``groups``.
        groups: Gradients to reduce together; checked, but without effect, since gradring has its
            own buckets.
        process_set: The participating processes.
        scale_local_gradients: True to divide gradients of local variables by the number of ranks.

    Raises:
        NotImplementedError: The op is neither Average nor Sum.
        TypeError: ``compression`` is not a compressor.
        ValueError: A factor is given for a sum; or ``groups`` is a number below 1.
    """

    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Any] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        checked(self.compression)
        linear(chosen(self.op, None), "gradients")
        if self.gradient_predivide_factor != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor has a meaning for op=hvd.Average only")
        groups = self.num_groups or None if self.groups is None else self.groups
        if isinstance(groups, int) and groups < 1:
            raise ValueError(
                f"groups={groups!r} is neither a number above 0 nor lists of variables"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Returns the options among a function's arguments."""
        return cls(**{each.name: arguments[each.name] for each in fields(cls)})


class LocalVariables:
    """Variables whose gradients are not reduced."""

    def __init__(self, variables: Iterable[Any] = ()) -> None:
        self._variables = {id(variable): variable for variable in variables}

    def add(self, variable: Any) -> None:
        """Adds a variable."""
        self._variables[id(variable)] = variable

    def __contains__(self, variable: Any) -> bool:
        return id(variable) in self._variables


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    options: Options,
    local: LocalVariables,
) -> list[Gradient]:
    """Returns gradients reduced over all ranks, except those of local variables.

    Args:
        gradients: Tensors, `tf.IndexedSlices` and None.
        variables: The variable of each gradient.
        options: The options of the reduction.
        local: Variables whose gradients are not reduced.

    Raises:
        gradring.errors.MismatchError: Ranks have different gradients.
    """
    results = list(with_known_shapes(gradients, variables))
    if not options.process_set.included():
        return results
    communicator = communicator_of(options.process_set)
    if options.sparse_as_dense:
        results = [
            tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
            for gradient in results
        ]

    def divided(values: tf.Tensor) -> tf.Tensor:
        return values / tf.cast(communicator.world_size, values.dtype)

    present = [i for i, gradient in enumerate(results) if gradient is not None]
    stay = [i for i in present if variables[i] in local]
    note_reduced((), [variables[i] for i in stay])  # they are to differ between the ranks
    if options.scale_local_gradients:
        for i in stay:
            results[i] = map_values(divided, results[i])
    travel = sorted(set(present) - set(stay))
    sparse = [i for i in travel if isinstance(results[i], tf.IndexedSlices)]
    dense = sorted(set(travel) - set(sparse))
    names = without_counters([name_of(variables[i]) for i in dense])
    factor = options.gradient_predivide_factor
    reduced = reduce_dense(
        [results[i] for i in dense],
        options.op,
        with_gaps("gradients", results),
        communicator,
        options.compression,
        (1 / factor, factor),
        names,
    )
    if sparse:
        rows = [results[i] for i in sparse]
        require_equal_calls(
            communicator,
            "rows of gradients",
            with_gaps("", results).strip(),
            [part for each in rows for part in (each.values, each.indices)],
            how=options.op.value,
            rows_differ=True,
        )
        named = Names.of_variables("gradients/rows", rows, [variables[i] for i in sparse])
        reduced += reduce_leaves(rows, Reduction(communicator, named, options.op.value))
    for i, result in zip([*dense, *sparse], reduced, strict=True):
        results[i] = result
    return results


class DistributedGradientTape:
    """A `tf.GradientTape` whose gradients are reduced over all ranks.

    All other attributes are the tape's. The tape can be wrapped before or after it has recorded.

    Examples:
        >>> shared, own = tf.Variable(3.0), tf.Variable(5.0)
        >>> with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        ...     loss = shared * (hvd.rank() + 1.0)
        >>> float(tape.gradient(loss, shared))
        1.5
        >>> tape = hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=False)
        >>> tape.register_local_source(own)
        >>> with tape:
        ...     loss = (shared + own) * (hvd.rank() + 1.0)
        >>> local, reduced = tape.get_local_and_global_gradients(loss, [shared, own])
        >>> [float(gradient) for _, gradient in [*local, *reduced]]
        [1.0, 1.5]
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Any] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        """Wraps a tape.

        Args:
            gradtape: The tape.
            device_dense: Has no effect: tensors are on CPUs.
            device_sparse: Has no effect.
            compression: Compression on the wire.
            sparse_as_dense: Makes `tf.IndexedSlices` dense before the reduction.
            op: Average or Sum.
            gradient_predivide_factor: Divisor before the sum of an average, and factor after it.
            num_groups: The older form of `groups`.
            groups: Has no effect: gradients are reduced in buckets of bytes.
            process_set: The participating processes; others keep their gradients.
            scale_local_gradients: Divides gradients of local sources by the number of ranks.

        Raises:
            NotImplementedError: The op is neither Average nor Sum.
            ValueError: A factor is given for a sum, or `groups` is invalid.
        """
        self._gradtape = gradtape
        self._options = Options.of(locals())
        self._local = LocalVariables()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gradtape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._gradtape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._gradtape.__exit__(*error)

    def register_local_source(self, source: Any) -> None:
        """Excludes the gradient of a variable from the reduction.

        Args:
            source: The variable.
        """
        self._local.add(source)

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
    ) -> Any:
        """Returns the result of `tf.GradientTape.gradient`, reduced over all ranks.

        Args:
            target: The tensor to differentiate.
            sources: Variables, or a nest of them.
            output_gradients: As in `tf.GradientTape.gradient`.
            kwargs: As in `tf.GradientTape.gradient`.
        """
        gradients = self._gradtape.gradient(target, sources, output_gradients, **kwargs)
        reduced = reduce_gradients(
            tf.nest.flatten(gradients), tf.nest.flatten(sources), self._options, self._local
        )
        return tf.nest.pack_sequence_as(gradients, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None
    ) -> tuple[list[tuple[Any, Gradient]], list[tuple[Any, Gradient]]]:
        """Returns pairs of variable and gradient: of local sources, and of all others.

        Args:
            target: As in `gradient`.
            sources: Variables, without nesting.
            output_gradients: As in `gradient`.
        """
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        return (
            [pair for pair in pairs if pair[0] in self._local],
            [pair for pair in pairs if pair[0] not in self._local],
        )


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = (), **kwargs: Any
) -> DistributedGradientTape:
    """Returns a `DistributedGradientTape` that does not reduce the gradients of some layers.

    Args:
        gradtape: The tape.
        args: As in `DistributedGradientTape`.
        local_layers: One or several layers.
        kwargs: As in `DistributedGradientTape`.

    Examples:
        >>> shared, own = (
        ...     keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)
        ... )
        >>> model = keras.Sequential([keras.layers.Input((1,)), shared, own])
        >>> tape = tf.GradientTape()
        >>> with hvd.PartialDistributedGradientTape(tape, local_layers=own) as tape:
        ...     loss = tf.reduce_sum(model(tf.fill([1, 1], hvd.rank() + 1.0)))
        >>> [gradient.numpy().item() for gradient in tape.gradient(loss, model.trainable_variables)]
        [1.5, 0.5]
    """
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in trainable_in(local_layers):
        tape.register_local_source(variable)
    return tape


def trainable_in(layers: Any) -> list[Any]:
    """Returns the trainable variables of one or several layers.

    Raises:
        ValueError: An element is not a layer.
    """
    layers = [layers] if isinstance(layers, tf.keras.layers.Layer) else list(layers or ())
    for layer in layers:
        if not isinstance(layer, tf.keras.layers.Layer):
            raise ValueError(f"local_layers: a {type(layer).__name__} is no layer of Keras")
    return [variable for layer in layers for variable in layer.trainable_weights]
