"""Expressions of a graph: the operations from which a tensor comes, and the variables they read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph.adoption import of_tensorflow

#: A tensor's graph and its name there.
Key = tuple[int, str]

#: Operations whose result is the sum of their inputs.
_SUMS = {"Add", "AddN", "AddV2"}
#: Operations that keep the value of their first input, or add to it.
_CHANGING_FIRST = {
    "Cast",
    "CheckNumerics",
    "EnsureShape",
    "Identity",
    "Reshape",
    "StopGradient",
    "Sub",
    "TensorScatterAdd",
}


def is_in_graph(value: Any) -> bool:
    """Returns whether a value is a tensor of a graph, and not an eager one."""
    return isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value)


def key_of(tensor: tf.Tensor) -> Key:
    """Returns what tells a tensor from others, also from those of other graphs."""
    return id(tensor.graph), tensor.name


def captured(graph: tf.Graph) -> dict[str, Any]:
    """Returns the outer tensors that a function captures, by the names of its placeholders."""
    return {inner.name: outer for outer, inner in getattr(graph, "captures", ())}


def ancestors(
    tensors: Sequence[tf.Tensor], known: Container[Key] = frozenset()
) -> list[tf.Operation]:
    """Returns the ancestors of tensors in their graph, each after its own inputs.

    Creation order is different: a gradient adds inputs to a loop that was made before. Operations
    are left out that only tensors in `known` need.
    """
    found: dict[tf.Operation, None] = {}
    ahead = [(each.op, False) for each in tensors if key_of(each) not in known]
    begun: set[tf.Operation] = set()
    while ahead:
        op, is_done = ahead.pop()
        if is_done:
            found[op] = None
        elif op not in begun:
            begun.add(op)
            ahead.append((op, True))
            ahead += [(each.op, False) for each in op.inputs if key_of(each) not in known]
    return list(found)


def handle_of(variable: Any) -> Any:
    """Returns the handle of a variable of TensorFlow, or of the one inside a variable of Keras."""
    return getattr(of_tensorflow(variable), "handle", None)


def handles_read(tensor: tf.Tensor) -> list[Any]:
    """Returns the handles of the variables that the tensor's own graph reads for it."""
    outer = captured(tensor.graph)
    reads = (op for op in ancestors([tensor]) if op.type == "ReadVariableOp")
    return [outer.get(op.inputs[0].name) for op in reads]


def function_of(
    tensor: tf.Tensor, variables: Mapping[int, Hashable]
) -> Callable[[Mapping[Any, Any]], tf.Tensor] | None:
    """Returns a tensor of a graph as a function of the values of variables.

    Args:
        tensor: A tensor of a graph.
        variables: Names of the variables by the `id` of their handles.

    Returns:
        A function that takes the values by the variables' names, and returns an eager tensor. None
        if the tensor depends on more than these variables, constants and tensors outside its graph.
    """
    outer = captured(tensor.graph)
    graph = tf.compat.v1.GraphDef()
    inputs: dict[str, Callable[[Mapping[Any, Any]], Any]] = {}
    for op in ancestors([tensor]):
        captures = outer.get(op.outputs[0].name) if op.type == "Placeholder" else None
        if captures is not None and captures.dtype == tf.resource:
            continue  # a variable, read by another operation
        if op.type == "ReadVariableOp":
            name = variables.get(id(outer.get(op.inputs[0].name)))
            if name is None:
                return None
            inputs[op.outputs[0].name] = operator.itemgetter(name)
        elif captures is not None and not is_in_graph(captures):
            inputs[op.outputs[0].name] = functools.partial(_always, captures)
        elif op.type == "Placeholder" or op.op_def.is_stateful or _calls_function(op):
            return None
        else:
            node = graph.node.add()
            node.CopyFrom(op.node_def)
            # Nothing here changes a variable, so no operation must wait for another one.
            del node.input[:]
            node.input.extend(each for each in op.node_def.input if not each.startswith("^"))

    if tensor.name in inputs:
        return inputs[tensor.name]

    def imported(values: list[tf.Tensor]) -> tf.Tensor:
        given = dict(zip(inputs, values, strict=True))
        (found,) = tf.graph_util.import_graph_def(graph, given, [tensor.name])
        return found

    by_name = tensor.graph.get_tensor_by_name
    specs = [tf.TensorSpec(by_name(name).shape, by_name(name).dtype) for name in inputs]
    concrete = tf.function(imported, autograph=False).get_concrete_function(specs)
    return lambda values: concrete([tf.convert_to_tensor(of(values)) for of in inputs.values()])


def _always(value: Any, _: Any) -> Any:
    return value


def _calls_function(op: tf.Operation) -> bool:
    attributes = op.node_def.attr.values()
    return any(each.HasField("func") or each.list.func for each in attributes)


def is_same(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Returns whether two tensors of a graph are the same function of the same tensors."""
    ahead, seen = [(one, other)], set[tuple[Key, Key]]()
    while ahead:
        first, second = ahead.pop()
        keys = key_of(first), key_of(second)
        if keys[0] == keys[1] or keys in seen:
            continue
        seen.add(keys)
        ops = first.op, second.op
        is_pure = ops[0].type == "ReadVariableOp" or not ops[0].op_def.is_stateful
        has_same_type = ops[0].type == ops[1].type and first.value_index == second.value_index
        if not is_pure or not has_same_type or ops[0].type == "Placeholder":
            return False
        if ops[0].node_def.attr != ops[1].node_def.attr or len(ops[0].inputs) != len(ops[1].inputs):
            return False
        ahead += zip(ops[0].inputs, ops[1].inputs, strict=True)
    return True


def changed_otherwise(handles: Sequence[Any], graph: tf.Graph) -> list[Any]:
    """Returns the handles of variables that a graph changes in another way than by adding to them.

    Args:
        handles: Handles of variables. None of them may have a part in a value that is added.
        graph: The graph; changes in functions that it calls are not seen.
    """
    own = _placeholders(handles, graph)
    later = _descendants(list(own.values()))
    return [
        each
        for each in handles
        if id(each) in own
        and not all(_only_adds(op, own[id(each)], later) for op in own[id(each)].consumers())
    ]


def added_to(handles: Sequence[Any], graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the tensors that a graph adds to variables; arguments as of `changed_otherwise`."""
    own = list(_placeholders(handles, graph).values())
    later = _descendants(own)
    ahead = [
        op.inputs[1]
        for each in own
        for op in each.consumers()
        if op.type in {"AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"}
    ]
    found, seen = [], set[Key]()
    while ahead:
        tensor = ahead.pop()
        if key_of(tensor) in seen:
            continue
        seen.add(key_of(tensor))
        if tensor.op not in later:
            found.append(tensor)
        elif tensor.op.type in _SUMS | _CHANGING_FIRST | {"SelectV2"}:
            ahead += list(tensor.op.inputs)
    return found


def _placeholders(handles: Sequence[Any], graph: tf.Graph) -> dict[int, tf.Tensor]:
    """Returns a graph's placeholders of the handles that it captures, by the handles' ids."""
    inner = {id(outer): placeholder for outer, placeholder in getattr(graph, "captures", ())}
    return {id(each): inner[id(each)] for each in handles if id(each) in inner}


def _only_adds(op: tf.Operation, variable: tf.Tensor, later: set[tf.Operation]) -> bool:
    """Returns whether an operation adds to the variable what is not in `later`, or reads it."""
    if op.type in {"AssignAddVariableOp", "AssignSubVariableOp"}:
        return op.inputs[1].op not in later
    return op.type != "AssignVariableOp" or _adds_to(op.inputs[1], variable, later)


def _descendants(tensors: Sequence[tf.Tensor]) -> set[tf.Operation]:
    """Returns the operations that use the tensors, or results of them."""
    found: set[tf.Operation] = set()
    ahead = [op for each in tensors for op in each.consumers()]
    while ahead:
        op = ahead.pop()
        if op not in found:
            found.add(op)
            ahead += [user for output in op.outputs for user in output.consumers()]
    return found


def _adds_to(tensor: tf.Tensor, variable: tf.Tensor, later: set[tf.Operation]) -> bool:
    """Returns whether a tensor is the variable's value, plus tensors not in `later`."""
    op = tensor.op
    if op.type == "ReadVariableOp":
        return key_of(op.inputs[0]) == key_of(variable)
    inputs = [each for each in op.inputs if each.op in later]
    is_choice = op.type == "SelectV2" and op.inputs[0].op not in later and len(inputs) == 2
    begins = len(inputs) == 1 and op.inputs[0].op in later
    is_sum = op.type in _SUMS and len(inputs) == 1
    if not (is_choice or is_sum or (op.type in _CHANGING_FIRST and begins)):
        return False
    return all(_adds_to(each, variable, later) for each in inputs)
