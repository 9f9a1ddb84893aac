"""Variables that belong to no model, in steps of a program that knows of no replicas."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph.expressions import handle_of
from gradring.tensorflow.graph.extent import comes_from, is_of_any
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.model_variables import raw_variables_of, variables_of
from gradring.tensorflow.graph.replica_step import current
from gradring.tensorflow.keras import given


@falls_back("the look for variables of no model that a step assigns", "nothing is said of them")
def check(model: Any) -> None:
    """Warns on rank 0, once for each, of variables of no model that a step assigns from its part.

    `fit` compares the variables of a model between the ranks, and does not know these.
    """
    graph, step = tf.compat.v1.get_default_graph(), current()
    known = [*variables_of(model), *raw_variables_of(model), *model.metrics_variables]
    handles = {id(handle_of(each)) for each in known}
    for outer, inner in getattr(graph, "captures", ()):
        if inner.dtype != tf.resource or id(outer) in handles:
            continue
        name = _name_in(repr(outer))
        if name.startswith("gradring/"):
            continue
        values = [op.inputs[1] for op in inner.consumers() if op.type in _ASSIGNMENTS]
        if any(is_of_any(each, step.batch) and not comes_from(each, "Gradring") for each in values):
            given.warn_once(
                f"variable {name}",
                "a step assigns the variable %r, which belongs to no model, from its part of the "
                "batch, so each rank has its own value (GRADRING_WITH_STRATEGY). Assign the mean "
                'over the ranks: gradring.tensorflow.all_reduce(value, op="mean")',
                name,
            )


def _name_in(handle: str) -> str:
    """Returns the name of a variable, which its handle shows with a counter, such as `total/0`."""
    found = re.search(r'name="(.+?)(?:/\d+)?"', handle)
    return found[1] if found else "without a name"


_ASSIGNMENTS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
