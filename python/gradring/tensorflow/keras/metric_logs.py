"""Logs of a step that are results of metrics, and the values that they have at an epoch's end.

A step's logs are the means of the replicas' logs. That is wrong for a metric such as AUC, whose
variables are added up over the replicas before its result is taken. Keras takes the results at the
end of an epoch, but only if a step returns those of all metrics and nothing else. If it returns
another number as well, such as the learning rate, `logs_of_epoch` takes the results here. It also
computes the logs that are functions of metrics, such as the exponential of a mean.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from gradring.group.communicator import Communicator
from gradring.tensorflow.graph import once
from gradring.tensorflow.graph.adoption import is_given, replicas_of
from gradring.tensorflow.graph.expressions import (
    added_to,
    changed_otherwise,
    function_of,
    handle_of,
    handles_read,
    is_in_graph,
    is_same,
)
from gradring.tensorflow.graph.extent import extent_in_step, is_of_any
from gradring.tensorflow.graph.extent_rules import Extent
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.replica_step import current
from gradring.tensorflow.rules.updates import updates_of


class _Source(NamedTuple):
    """A metric whose result is a log."""

    #: The metric's position in `model.metrics`.
    position: int
    #: Key of the result if it is a dictionary, or else None.
    key: str | None


#: A log that is computed from nothing but variables of metrics. It takes the variables' values by
#: the positions of metric and variable, as `_values` returns them.
_Function: TypeAlias = Callable[[Mapping[tuple[int, int], Any]], tf.Tensor]

#: The sources of logs by their names, as deep as the logs.
_Sources: TypeAlias = "dict[str, _Source | _Function | _Sources]"


class _Notes:
    """Sources of the logs of a model's steps."""

    def __init__(self) -> None:
        """Begins without any source."""
        #: Name of the model's function that has run last, such as "train_function".
        self.function = ""
        #: For each function, the sources of its logs by their names.
        self.sources: dict[str, _Sources] = {}


_notes: WeakKeyDictionary[Any, _Notes] = WeakKeyDictionary()


def is_adding_up() -> bool:
    """Returns whether a metric of Keras that is no mean is updated now."""
    frame = inspect.currentframe()
    keras: Any = sys.modules["keras"]
    while frame is not None:
        names = frame.f_code.co_varnames
        # AutoGraph puts `tf__` before the names of functions that it converts.
        if names and frame.f_code.co_name.endswith("update_state"):
            owner = frame.f_locals.get(names[0])
            if isinstance(owner, keras.Metric):
                return not isinstance(owner, keras.metrics.Mean)
        frame = frame.f_back
    return False


def begin(model: Any, function: str) -> None:
    """Notes which of a model's functions runs next."""
    _notes.setdefault(model, _Notes()).function = function


@falls_back("the look for metrics in the logs of a step", "their logs are means over the ranks")
def note(model: Any, logs: Any) -> None:
    """Notes which of a step's logs are results of the model's metrics.

    Warns on rank 0, once for each metric, of metrics whose logs may not be those of one process.
    """
    strategy = model.distribute_strategy
    if replicas_of(strategy) == 1 or updates_of(strategy).are_local:
        return
    for metric in model.metrics:
        for each in getattr(metric, "metrics", [metric]):
            _check_changes(strategy.communicator, each)
            with falls_back("the look for pairs in metrics", "nothing is said of them"):
                _check_added(strategy.communicator, each)
    metrics = [_Metric(each, _handles(each)) for each in model.metrics]
    notes = _notes.setdefault(model, _Notes())
    notes.sources[notes.function] = _sources(logs, metrics, strategy.communicator)


class _Metric:
    """A metric in a step."""

    def __init__(self, metric: Any, handles: list[Any]) -> None:
        """Takes the metric, and the handles of its variables in this replica."""
        self.metric = metric
        #: The variables' positions in `metric.variables`, by the `id` of their handles.
        self.handles = {id(handle): position for position, handle in enumerate(handles)}

    @functools.cached_property
    def results(self) -> dict[str | None, Any]:
        """The results in this step, taken when they are first needed."""
        return _results(self.metric)


def _sources(logs: Any, metrics: Sequence[_Metric], communicator: Communicator) -> _Sources:
    """Returns the sources of logs by their names, also of those in a dictionary of their own."""
    found: _Sources = {}
    for name, log in logs.items() if isinstance(logs, dict) else ():
        if isinstance(log, dict):
            found[name] = _sources(log, metrics, communicator)
        elif hasattr(log, "assign") or isinstance(log, tf.Tensor):
            source = _source_of(name, tf.convert_to_tensor(log), metrics, communicator)
            if source is not None:
                found[name] = source
    return found


def _source_of(
    name: str, log: tf.Tensor, metrics: Sequence[_Metric], communicator: Communicator
) -> _Source | _Function | None:
    """Returns the metric whose result is a log, or the function of metrics that is a log.

    Warns on rank 0 of a log that is computed from a metric and from other values as well.
    """
    read = set(map(id, handles_read(log))) if is_in_graph(log) else None
    functions = []
    for position, each in enumerate(metrics):
        if read is not None and read.isdisjoint(each.handles.keys()):
            continue
        for key, result in each.results.items():
            if read is None:
                # An eager tensor does not show its origin.
                is_result = name == (key or each.metric.name) and np.array_equal(log, result)
            else:
                is_result = is_same(log, tf.convert_to_tensor(result))
            if is_result:
                return _Source(position, key)
        functions.append(each.metric)
    if read is None or not functions:
        return None
    variables = {
        handle: (position, place)
        for position, each in enumerate(metrics)
        for handle, place in each.handles.items()
    }
    function = function_of(log, variables)
    if function is not None:
        return function
    if is_of_any(log, current().batch) or not all(map(_is_mean, functions)):
        once.warn(
            communicator,
            f"log {name}",
            "the log %r is computed from a metric and other values; it is the mean over the "
            "replicas, which may not be that of one process. Return the result() of a "
            "keras.metrics.Metric that computes it",
            name,
        )
    return None


def _check_changes(communicator: Communicator, metric: Any) -> None:
    """Warns on rank 0 of a metric that does not only add to its variables, as a maximum does."""
    summed = {
        id(handle_of(each)): each for each in metric.variables if aggregation_of(each) == "sum"
    }
    for handle in changed_otherwise(_handles(metric), tf.compat.v1.get_default_graph()):
        if id(handle) not in summed:
            continue
        once.warn(
            communicator,
            f"variables of metric {metric.name}",
            "metric %r changes its variable %r in another way than by adding to it. The ranks' "
            "variables are added up, so the log may not be that of one process: add up sums over "
            "samples, and divide them in result()",
            metric.name,
            summed[id(handle)].name,
        )


def _check_added(communicator: Communicator, metric: Any) -> None:
    """Warns on rank 0 of a metric that adds values of pairs of samples to its variables."""
    if current().has_whole_batch:
        return
    added = [
        (value, extent_in_step(value))
        for value in added_to(_handles(metric), tf.compat.v1.get_default_graph())
    ]
    if is_given(tf.distribute.get_strategy()):
        _check_numbers(communicator, metric, added)
    for _, extent in added:
        if extent.is_paired:
            once.warn(
                communicator,
                f"variables of metric {metric.name}",
                "metric %r compares each sample of a batch with each other one, as far as its "
                "graph tells. Each rank does this with its own samples, so the log may not be that "
                "of one process. Labels of shape (n,) beside predictions of shape (n, 1) do this "
                "unintentionally",
                metric.name,
            )


def _check_numbers(
    communicator: Communicator, metric: Any, added: Sequence[tuple[tf.Tensor, Extent]]
) -> None:
    """Warns on rank 0 of a metric of a given program that counts batches, or adds up their means.

    Each rank adds such a number, so the sum over N ranks is N times too large. The quotient of two
    such sums is right, if all parts of the batches have as many samples.
    """
    is_number = [
        extent.degree == 0
        and not extent.has_rows
        and (extent.is_mean or tf.get_static_value(value) == 1)
        for value, extent in added
    ]
    is_quotient = all(is_number) and len(is_number) > 1
    if any(is_number) and not is_quotient:
        once.warn(
            communicator,
            f"numbers of metric {metric.name}",
            "metric %r adds a number for each batch, such as 1 or a mean, and each of %d ranks "
            "adds its own; so its log is not that of one process. Add up sums over samples, and "
            "their number",
            metric.name,
            communicator.world_size,
        )


def _handles(metric: Any) -> list[Any]:
    """Returns the handles of a metric's variables, or None for a variable without one."""
    return [handle_of(each) for each in metric.variables]


def _results(metric: Any) -> dict[str | None, Any]:
    """Returns a metric's results by their keys; the key of a single result is None."""
    found = metric.result()
    return found if isinstance(found, dict) else {None: found}


def _is_mean(metric: Any) -> bool:
    """Returns whether the result of a metric, or of all metrics in it, is a mean over samples."""
    keras: Any = sys.modules["keras"]
    mean = keras.metrics.Mean.result
    inner = getattr(metric, "metrics", [metric])
    return all(getattr(type(each), "result", None) is mean for each in inner)


def aggregation_of(variable: Any) -> str:
    """Returns how the ranks' values of a metric's variable become one: "sum", "mean" or "first"."""
    found = getattr(variable, "aggregation", None)
    name = str(getattr(found, "name", found)).lower()
    return {"mean": "mean", "only_first_replica": "first"}.get(name, "sum")


def logs_of_epoch(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Reads metrics, also if the step returned other numbers as well."""
    found = original(model, logs)
    notes = _notes.get(model)
    sources = notes.sources.get(notes.function) if notes is not None else None
    # Keras returns other logs than it got, if it has read the metrics.
    if found is not logs or not sources:
        return found
    # All ranks read all metrics, as each read may be a collective.
    results = list(map(_results, model.metrics))
    values = functools.cache(functools.partial(_values, model.metrics))
    return _replaced(found, sources, results, values)


def _values(metrics: Sequence[Any]) -> dict[tuple[int, int], tf.Tensor]:
    """Returns the values of metrics' variables, by the positions of metric and variable."""
    return {
        (position, place): tf.convert_to_tensor(variable)
        for position, metric in enumerate(metrics)
        for place, variable in enumerate(metric.variables)
    }


def _replaced(
    logs: Any,
    sources: _Sources,
    results: list[dict[str | None, Any]],
    values: Callable[[], Mapping[tuple[int, int], Any]],
) -> Any:
    """Returns the logs with other values in place of those that have a source."""
    found = dict(logs)
    for name, source in sources.items():
        if name not in found:
            continue
        if isinstance(source, dict):
            found[name] = _replaced(found[name], source, results, values)
        elif callable(source):
            found[name] = source(values())
        else:
            found[name] = results[source.position][source.key]
    return found
