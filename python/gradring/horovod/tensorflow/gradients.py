"""Gradients reduced over all ranks: what the tape and the optimizers have in common."""

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

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

Gradient = Any


@dataclass(frozen=True)
class Options:
    """How gradients are reduced.

    Attributes:
        compression: How they travel.
        sparse_as_dense: Whether `tf.IndexedSlices` are made dense before.
        op: Average or Sum.
        gradient_predivide_factor: Of an average: divides before the sum, and multiplies after it.
        num_groups: The older form of ``groups``.
        groups: Which gradients belong together; checked only, since all are in few buckets anyway.
        process_set: Who takes part.
        scale_local_gradients: Whether gradients that are not reduced are divided by the number of
            ranks.

    Raises:
        NotImplementedError: Another op.
        TypeError: ``compression`` cannot compress.
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
        """Those of a function's arguments that are options."""
        return cls(**{each.name: arguments[each.name] for each in fields(cls)})


class LocalVariables:
    """Variables whose gradients stay on their rank."""

    def __init__(self, variables: Iterable[Any] = ()) -> None:
        self._variables = {id(variable): variable for variable in variables}

    def add(self, variable: Any) -> None:
        """One more."""
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
    """The gradients over all ranks; those of local variables of this rank alone.

    Args:
        gradients: Tensors, `tf.IndexedSlices` and None.
        variables: One for each.
        options: How.
        local: Whose gradients stay.

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

    Everything else is the tape's. It may be wrapped before or after it has recorded.

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
            compression: How gradients travel.
            sparse_as_dense: Makes `tf.IndexedSlices` dense before they travel.
            op: Average or Sum.
            gradient_predivide_factor: Divides before the sum of an average, and multiplies after.
            num_groups: The older form of `groups`.
            groups: Has no effect: gradients are reduced in buckets of bytes.
            process_set: Who takes part; other processes keep their gradients.
            scale_local_gradients: Divides gradients of local sources by the number of ranks.

        Raises:
            NotImplementedError: Another op.
            ValueError: A factor is given for a sum, or `groups` are no groups.
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
        """Keeps the gradient of a variable on its rank."""
        self._local.add(source)

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
    ) -> Any:
        """As `tf.GradientTape.gradient`, reduced over all ranks.

        Args:
            target: What is derived.
            sources: By which: variables, or a nest of them.
            output_gradients: As for the tape.
            kwargs: As for the tape.
        """
        gradients = self._gradtape.gradient(target, sources, output_gradients, **kwargs)
        reduced = reduce_gradients(
            tf.nest.flatten(gradients), tf.nest.flatten(sources), self._options, self._local
        )
        return tf.nest.pack_sequence_as(gradients, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None
    ) -> tuple[list[tuple[Any, Gradient]], list[tuple[Any, Gradient]]]:
        """Variables and their gradients, of local sources and of the others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        return (
            [pair for pair in pairs if pair[0] in self._local],
            [pair for pair in pairs if pair[0] not in self._local],
        )


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = (), **kwargs: Any
) -> DistributedGradientTape:
    """A `DistributedGradientTape` that keeps the gradients of some layers on their rank.

    Args:
        gradtape: The tape.
        args: As for `DistributedGradientTape`.
        local_layers: A layer, or several.
        kwargs: As for `DistributedGradientTape`.

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
    """The trainable variables of a layer, or of several.

    Raises:
        ValueError: One is no layer.
    """
    layers = [layers] if isinstance(layers, tf.keras.layers.Layer) else list(layers or ())
    for layer in layers:
        if not isinstance(layer, tf.keras.layers.Layer):
            raise ValueError(f"local_layers: a {type(layer).__name__} is no layer of Keras")
    return [variable for layer in layers for variable in layer.trainable_weights]
