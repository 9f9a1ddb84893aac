"""One order of elements on all ranks, for datasets that are dealt out element by element.

Every rank runs the whole pipeline and keeps its part of each batch. If the pipeline shuffles with
different seeds on the ranks, their orders differ: some elements belong to several parts, and others
to none. So all ranks take the chief's seeds. The chief draws seeds where the program set none.

TensorFlow fixes the seeds when a dataset is made, long before it is distributed. So a dataset whose
seeds differ is made once more (`made`), with the functions that were traced for it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.errors import ConfigError
from gradring.group.communicator import Communicator
from gradring.tensorflow.data import made as making
from gradring.tensorflow.data.made import IN_MEMORY, Made, how
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.context import holding

_logger = logging.getLogger("gradring")

_CHIEF = 0

#: Names of parameters of TensorFlow's ops.
_SEEDS = ("seed", "seed2")
_DETERMINISTIC = "deterministic"

#: Most elements of a tensor that are compared; a sample is enough to distinguish two orders.
COMPARED_ELEMENTS = 4096

_numbers = itertools.count()


#: One flag: whether the warning has been logged in the current block of `warning_once`.
_warned: ContextVar[list[bool]] = ContextVar("warned")


def warning_once() -> AbstractContextManager[None]:
    """Allows one warning in the block, such as a `fit` that distributes two datasets."""
    return holding(_warned, _warned.get([False]))


def _may_warn() -> bool:
    warned = _warned.get([False])
    was_warned, warned[0] = warned[0], True
    return not was_warned


def agreed(dataset: tf.data.Dataset, communicator: Communicator) -> tf.data.Dataset:
    """Returns the dataset with the chief's seeds; every rank that distributes it must call it.

    Args:
        dataset: A `tf.data.Dataset` of global batches.
        communicator: A `gradring.Communicator`.

    Returns:
        `dataset` itself if it has no order to agree on, or if its elements are not divided.

    Raises:
        gradring.errors.ConfigError: The dataset shuffles and was made before the first strategy,
            and TensorFlow does not show how it was made.
        gradring.errors.MismatchError: Another rank's pipeline shuffles at other places.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    if communicator.world_size == 1 or policy == policies.OFF:
        return dataset
    # Whole files are dealt out before their elements lose their order.
    pipeline = _Pipeline(keeps_order=policy != policies.FILE)
    if not making.read(dataset):
        raise ConfigError(
            f"{dataset} shuffles and was made before the strategy, and TensorFlow does not tell "
            "how: the workers might get elements twice, and others never; make the strategy first"
        )
    pipeline.collect(compat.variant_of(dataset))
    is_unordered = pipeline.keeps_order and dataset.options().deterministic is False
    if not pipeline.seeds and not pipeline.sources and not pipeline.unordered and not is_unordered:
        return dataset
    seeds = np.array(pipeline.seeds, np.int64).reshape(-1, 2)
    if communicator.rank == _CHIEF:
        unseeded = ~seeds.any(axis=1)
        seeds[unseeded] = np.random.default_rng().integers(1, 2**62, (unseeded.sum(), 2))
    numbers = np.concatenate([seeds.ravel(), np.array(pipeline.sources, np.int64)])
    name = (
        f"order of {type(dataset).__name__}: {len(seeds)} shuffles, {len(pipeline.sources)} sources"
    )
    numbers = communicator.all_gather(numbers, name=name).reshape(communicator.world_size, -1)
    differs = (numbers != numbers[_CHIEF]).any(axis=0)
    if (numbers[communicator.rank] != numbers[_CHIEF])[seeds.size :].any() and _may_warn():
        _logger.warning(
            "%s on rank %d of %s: its tensors differ from the chief's, so the workers' parts of a "
            "batch are parts of different batches. Load the same data in the same order on all "
            "workers (pass seed= where files are shuffled), or use "
            "strategy.distribute_datasets_from_function",
            dataset,
            communicator.rank,
            communicator.host,
        )
    # Shuffles with differing seeds are made anew on all ranks, also on the chief: the new op can be
    # of another kind than the old one.
    agree_on = differs[: seeds.size].reshape(-1, 2).any(axis=1)
    if not agree_on.any() and not pipeline.unordered and not is_unordered:
        return dataset
    chiefs = numbers[_CHIEF, : seeds.size].reshape(-1, 2).tolist()
    pipeline.wanted = iter(
        [own if is_new else None for own, is_new in zip(chiefs, agree_on, strict=True)]
    )
    variant = pipeline.make(compat.variant_of(dataset))
    remade = compat.variant_dataset(variant, dataset.element_spec).with_options(dataset.options())
    if is_unordered:
        ordered = tf.data.Options()
        ordered.deterministic = True
        remade = remade.with_options(ordered)
    # The new dataset keeps objects alive that Python code in the pipeline needs.
    remade._gradring_needs = dataset, pipeline.functions
    return remade


@dataclass
class _Pipeline:
    """Ops and tensors that decide about the order of elements, in the order of a walk."""

    keeps_order: bool
    seeds: list[tuple[int, int]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    #: Number of ops that may return their elements in any order.
    unordered: int = 0
    #: The chief's seeds; None for seeds that are equal on all ranks.
    wanted: Iterator[list[int] | None] = field(default_factory=lambda: iter(()))
    #: Owners of the new dataset's functions: TensorFlow forgets a function without an owner.
    functions: list[Any] = field(default_factory=list)
    #: True while the walk visits functions that run once in each iterator.
    _once: bool = False
    _met: dict[Any, Any] = field(default_factory=dict)

    def collect(self, value: Any) -> None:
        """Fills the lists from a variant, or from the arguments of an op."""
        self._met = {}
        self._visit(value, self._collect_op, lambda seeds: self.seeds.append(seeds))

    def make(self, variant: Any) -> Any:
        """Returns the same dataset with the seeds of `wanted`."""
        self._met = {}
        return self._visit(variant, self._make_op, lambda _: next(self.wanted))

    def _visit(self, value: Any, op: Callable[..., Any], seeds: Callable[..., Any]) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._visit(each, op, seeds) for each in value)
        if compat.is_function(value):
            name = value.name.decode() if isinstance(value.name, bytes) else value.name
            renamed = self._visit_function(name, seeds)
            return value if renamed == name else renamed
        made = how(value)
        if made is None:
            return value
        if id(value) not in self._met:
            arguments = {}
            for name, argument in made.arguments.items():
                self._once = compat.has_one_element(made.arguments.get("input_dataset"))
                arguments[name] = self._visit(argument, op, seeds)
            self._met[id(value)] = op(value, made, arguments, seeds)
        return self._met[id(value)]

    def _collect_op(self, value: Any, made: Made, arguments: Any, seeds: Any) -> Any:
        if set(_SEEDS) <= arguments.keys():
            seeds(tuple(int(arguments[name]) for name in _SEEDS))
        if made.by.__name__ in IN_MEMORY:
            self.sources.append(_fingerprint(arguments["components"]))
        if self.keeps_order and arguments.get(_DETERMINISTIC) == "false":
            self.unordered += 1
        return value

    def _make_op(self, value: Any, made: Made, arguments: Any, seeds: Any) -> Any:
        if set(_SEEDS) <= arguments.keys():
            wanted = seeds(None)
            if wanted is not None:
                arguments |= {
                    name: tf.constant(seed, tf.int64)
                    for name, seed in zip(_SEEDS, wanted, strict=True)
                }
        if self.keeps_order and arguments.get(_DETERMINISTIC) == "false":
            arguments[_DETERMINISTIC] = "true"
        # An unchanged part stays, with the elements that it has cached.
        return made.again(value, arguments)

    def _visit_function(self, name: str, seeds: Callable[..., Any]) -> str:
        """Returns the name of a copy of this function with other seeds, or its own name."""
        if name in self._met:
            return str(self._met[name])
        definition = _function_definition(name)
        changed = False
        for node in list(definition.node_def):
            found = _seeds_in(node, definition)
            wanted = None if found is None else seeds(found)
            if wanted is not None:
                self.functions.append(_set_seeds(node, wanted, definition, self._once))
                changed = True
            for attr in node.attr.values():
                for called in [attr.func] if attr.HasField("func") else attr.list.func:
                    renamed = self._visit_function(called.name, seeds)
                    changed |= renamed != called.name
                    called.name = renamed
        self._met[name] = name
        if changed:
            self._met[name] = f"{name}_order_{next(_numbers)}"
            definition.signature.name = self._met[name]
            self.functions.append(_NamedFunction(definition))
        return str(self._met[name])


def _fingerprint(components: Any) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for component in components:
        digest.update(f"{component.shape}{component.dtype}".encode())
        if component.dtype in (tf.variant, tf.resource):
            continue
        flat = tf.reshape(component, [-1])
        flat = flat[:: max(1, int(tf.size(flat)) // COMPARED_ELEMENTS)]
        digest.update(tf.io.serialize_tensor(flat).numpy())
    return int.from_bytes(digest.digest(), "little", signed=True)


# Shuffles in functions


def _seeds_in(node: Any, definition: Any) -> tuple[int, int] | None:
    """Returns the seeds of a node that decides about an order, or None."""
    if node.op == "RandomShuffle":
        return node.attr["seed"].i, node.attr["seed2"].i
    positions = _positions_of_inputs(node.op, _SEEDS) if "Dataset" in node.op else None
    if positions is None:
        return None
    found = [_constant(node.input[position], definition) for position in positions]
    return None if None in found else (found[0], found[1])  # type: ignore[return-value]


def _set_seeds(node: Any, seeds: Any, definition: Any, once: bool) -> Any:
    """Changes a node of the definition; returns the function that it now calls, or None."""
    if node.op == "RandomShuffle" and once:
        return _reshuffled(node, seeds)
    if node.op == "RandomShuffle":
        for name, seed in zip(_SEEDS, seeds, strict=True):
            node.attr[name].i = seed
        return None
    positions = _positions_of_inputs(node.op, _SEEDS) or []
    for name, seed, position in zip(_SEEDS, seeds, positions, strict=True):
        constant = definition.node_def.add(name=f"{node.name}_{name}", op="Const")
        constant.attr["dtype"].type = tf.int64.as_datatype_enum
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(seed, tf.int64))
        node.input[position] = f"{constant.name}:output:0"
    return None


def _reshuffled(node: Any, seeds: Any) -> Any:
    """Makes a `RandomShuffle` depend on the number of its runs; its own seeds repeat each epoch.

    Keras shuffles arrays with such an op. Only an op that runs once in each iterator can count its
    runs: other ops run ahead, and ranks leave an iterator after different numbers of runs.
    """
    dtype = tf.as_dtype(node.attr["T"].type)
    name = f"gradring_order_{next(_numbers)}"
    first, second = seeds

    def runs() -> Any:
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=name)

    with tf.init_scope(), tf.device("/device:CPU:0"):
        tf.raw_ops.AssignVariableOp(resource=runs(), value=tf.constant(first, tf.int64))

    def shuffled(value: Any) -> Any:
        handle = runs()
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.constant(1, tf.int64))
        run = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
        drawn = tf.random.stateless_uniform(
            tf.shape(value)[:1], tf.stack([run, second]), None, None, tf.int64
        )
        return tf.gather(value, tf.argsort(drawn))

    called = tf.function(shuffled, autograph=False).get_concrete_function(
        tf.TensorSpec(None, dtype)
    )
    for attr in list(node.attr):
        del node.attr[attr]
    node.op = "StatefulPartitionedCall"
    node.attr["f"].func.name = called.name
    for attr in ("Tin", "Tout"):
        node.attr[attr].list.type.append(dtype.as_datatype_enum)
    for attr in ("config", "config_proto", "executor_type"):
        node.attr[attr].s = b""
    return called


def _constant(tensor: str, definition: Any) -> int | None:
    """Returns the value of a seed in a function, in the form that TensorFlow writes, or None."""
    node = next((n for n in definition.node_def if n.name == tensor.split(":")[0]), None)
    if node is not None and node.op == "Const":
        return int(tf.make_ndarray(node.attr["value"].tensor))
    # Two zeros would mean no seed, so TensorFlow selects another number or the seed, input 2.
    if node is not None and node.op == "SelectV2":
        return _constant(node.input[2], definition)
    return None


def _function_definition(name: str) -> Any:
    """Returns a copy of the `FunctionDef` of this name."""
    definition = type(compat.get_function_def(name))()
    definition.CopyFrom(compat.get_function_def(name))
    return definition


class _NamedFunction:
    """Registration of a function, which ops can call by its name as long as this object lives."""

    def __init__(self, definition: Any) -> None:
        """Registers a `FunctionDef`."""
        compat.context().add_function_def(definition)
        weakref.finalize(self, compat.context().remove_function, definition.signature.name)


def _positions_of_inputs(op: str, names: Sequence[str]) -> list[int] | None:
    """Returns the positions of an op's inputs with these names, or None if the op lacks one.

    Every input before them must be a single tensor, not a list.
    """
    definition = compat.get_op_def(op)
    found = [argument.name for argument in definition.input_arg] if definition else []
    return [found.index(name) for name in names] if set(names) <= set(found) else None
