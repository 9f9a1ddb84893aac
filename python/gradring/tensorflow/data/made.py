"""Origin of datasets: the ops of TensorFlow that have made them, and the arguments of these ops.

Once the first strategy exists, the tensor of each new dataset keeps its origin. TensorFlow can
write the graph of an older dataset. The operations in this graph are those of the Python objects
that the dataset consists of, in the same order.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

#: Attribute of a dataset's variant with its origin.
_MADE = "_gradring_made"

#: Ops whose tensors are data that the program has loaded.
IN_MEMORY = ("tensor_dataset", "tensor_slice_dataset")

#: Makers of resources that each dataset has for itself, by the op's argument.
_NEW: dict[str, Callable[[], Any]] = {
    "cache": tf.raw_ops.DummyMemoryCache,
    "seed_generator": tf.raw_ops.DummySeedGenerator,
}

#: Names of arguments with the captured tensors of a function.
_CAPTURED = re.compile(r"(?:(\w+)_)?other_arg(?:ument)?s")


@dataclass(frozen=True)
class Made:
    """Origin of a variant: the op that made it, and its arguments."""

    by: Callable[..., Any]
    arguments: dict[str, Any]

    def again(self, variant: Any, arguments: dict[str, Any]) -> Any:
        """Returns ``variant``, which has this origin; or one made anew, if an argument differs."""
        is_same = all(_is_same(arguments[name], self.arguments[name]) for name in arguments)
        return variant if is_same else self.by(**arguments)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other


@functools.cache
def remember() -> None:
    """Makes new datasets keep their origin; later calls do nothing."""
    for module in compat.DATASET_OPS:
        for name, make in list(vars(module).items()):
            is_op = inspect.isfunction(make) and not name.endswith("_eager_fallback")
            if is_op and "_dataset" in name:
                setattr(module, name, _remembering(make))


def _remembering(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        result = make(*args, **kwargs)
        if is_variant(result):
            setattr(result, _MADE, Made(made, dict(signature.bind(*args, **kwargs).arguments)))
        return result

    return made


def is_variant(value: Any) -> bool:
    """Returns whether a value is an eager tensor that represents a dataset."""
    return isinstance(value, compat.EagerTensor) and value.dtype == tf.variant


def how(variant: Any) -> Made | None:
    """Returns the origin of a value, or None if it is no variant with an origin."""
    return getattr(variant, _MADE, None) if is_variant(variant) else None


def ancestors(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and all datasets that it consists of."""
    yield dataset
    for each in compat.inputs_of(dataset):
        yield from ancestors(each)


def read(dataset: Any) -> bool:
    """Adds the origin to the parts of a dataset that was made before `remember`.

    TensorFlow's graph does not describe every part. If it leaves out one, and the dataset shuffles,
    no part gets an origin. If it does not shuffle, the parts behind the one left out get theirs.

    Returns:
        True if the origin of every shuffling part is known now.
    """
    variants = [compat.variant_of(each) for each in ancestors(dataset)]
    if not all(map(is_variant, variants)) or all(how(variant) for variant in variants):
        return True
    graph = None
    found: dict[int, Made] = {}
    try:
        graph = _Graph(compat.graph_of(dataset))
        for made_id, made in graph.made(dataset):
            found[made_id] = made
    except (tf.errors.OpError, AttributeError, LookupError, TypeError, ValueError):
        shuffles = graph.shuffles if graph else any(map(compat.shuffles, ancestors(dataset)))
        if shuffles:
            return False
    for each in ancestors(dataset):
        variant = compat.variant_of(each)
        if how(variant) is None and id(variant) in found:
            setattr(variant, _MADE, found[id(variant)])
    return True


class _Graph:
    """The graph of a dataset."""

    def __init__(self, definition: Any) -> None:
        self._nodes = {node.name: node for node in definition.node}
        (end,) = (node for node in definition.node if node.op == "_Retval")
        self._last = end.input[0]
        #: True if the graph has shuffling operations.
        self.shuffles = any("Shuffle" in op for op in compat.ops_in(definition))

    def made(self, dataset: Any) -> Iterator[tuple[int, Made]]:
        """Finds the origins of the dataset's parts.

        Returns:
            Pairs: the id of a part's variant, and its origin.

        Raises:
            LookupError: The graph has other operations than the dataset has parts.
        """
        return self._parts(dataset, self._last)

    def _parts(self, dataset: Any, name: str) -> Iterator[tuple[int, Made]]:
        variant, parents = compat.variant_of(dataset), compat.inputs_of(dataset)
        if len(parents) == 1 and compat.variant_of(parents[0]) is variant:
            yield from self._parts(parents[0], name)
            return
        node = self._nodes[name.partition(":")[0]]
        by = getattr(tf.raw_ops, node.op)
        inputs = dict(_inputs_of(node))
        of_datasets = [
            each
            for argument, names in inputs.items()
            for each in names
            if self._is_dataset(each) and not self._is_captured(argument, each)
        ]
        if len(of_datasets) != len(parents):
            raise LookupError(f"{dataset} has {len(parents)} inputs, not {len(of_datasets)}")
        of_parents = dict(zip(of_datasets, parents, strict=True))
        yield id(variant), Made(_remembering(by), self._arguments(dataset, node, by, of_parents))
        for each, parent in of_parents.items():
            yield from self._parts(parent, each)

    def _is_captured(self, argument: str, name: str) -> bool:
        """Returns whether a dataset is captured by a function.

        Raises:
            LookupError: The captured dataset shuffles, and Python has no objects for its parts.
        """
        if not _CAPTURED.fullmatch(argument):
            return False
        ahead = [name]
        while ahead:
            node = self._nodes[ahead.pop().strip("^").partition(":")[0]]
            if "Shuffle" in node.op:
                raise LookupError(f"{argument} has a dataset that shuffles")
            ahead += node.input
        return True

    def _is_dataset(self, name: str) -> bool:
        return "Dataset" in self._nodes[name.partition(":")[0]].op

    def _arguments(self, dataset: Any, node: Any, by: Any, parents: dict[str, Any]) -> Any:
        if node.op in ("TensorDataset", "TensorSliceDataset"):
            return {"components": compat.tensors_of(dataset)}
        if not parents and node.op != "RandomDataset":
            return {}  # a source without an order of its own is never made anew
        functions = {each.function.name: each.function for each in compat.functions_of(dataset)}
        lists = {each.name for each in compat.get_op_def(node.op).input_arg if _is_list(each)}
        arguments: dict[str, Any] = {}
        for name, inputs in _inputs_of(node):
            if of := _CAPTURED.fullmatch(name):
                attributes = [each for each, value in node.attr.items() if value.HasField("func")]
                (attribute,) = [of[1]] if of[1] else attributes
                arguments[name] = list(_attribute(node.attr[attribute], functions).captured_inputs)
            elif name in _NEW:
                arguments[name] = _NEW[name]()
            else:
                values = [
                    compat.variant_of(parents[each]) if each in parents else self._constant(each)
                    for each in inputs
                ]
                arguments[name] = values if name in lists else values[0]
        for name in set(inspect.signature(by).parameters) & set(node.attr):
            arguments[name] = _attribute(node.attr[name], functions)
        return arguments

    def _constant(self, name: str) -> Any:
        node = self._nodes[name]
        if node.op != "Const":
            raise LookupError(f"{name} is no constant")
        return tf.constant(tf.make_ndarray(node.attr["value"].tensor))


def _inputs_of(node: Any) -> Iterator[tuple[str, list[str]]]:
    """Yields the names of a node's inputs for each argument of its op."""
    names = [name for name in node.input if not name.startswith("^")]
    for argument in compat.get_op_def(node.op).input_arg:
        count = 1
        if argument.number_attr:
            count = node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        yield argument.name, names[:count]
        names = names[count:]


def _is_list(argument: Any) -> bool:
    return bool(argument.number_attr or argument.type_list_attr)


def _attribute(value: Any, functions: dict[Any, Any]) -> Any:
    """Converts an attribute of a node to the value that Python functions of ops take."""
    match value.WhichOneof("value"):
        case "func":
            return functions.get(value.func.name) or functions[value.func.name.encode()]
        case "list":
            shapes = [tf.TensorShape(shape) for shape in value.list.shape]
            return shapes or [tf.as_dtype(each) for each in value.list.type]
        case "s":
            # A program passes text; metadata can be any bytes.
            return value.s.decode() if value.s.isascii() else value.s
        case "type":
            return tf.as_dtype(value.type)
        case "i" | "b" | "f" as kind:
            return getattr(value, kind)
    raise LookupError(str(value))
