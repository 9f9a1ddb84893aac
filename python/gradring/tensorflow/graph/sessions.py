"""Replacements in sessions of TensorFlow 1: their runs, and new operations in their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat


def watch_calls(
    graph: tf.Graph,
    calling: Callable[[Sequence[tf.Graph], Callable[[], tf.Operation]], tf.Operation],
) -> None:
    """Makes `calling` create the ops of this graph that call functions.

    Args:
        graph: A graph for sessions, not the graph of a function.
        calling: Takes the functions' graphs, and a function that creates the op.
    """
    creator = compat.row("Graph._create_op_internal")
    create = creator.of(graph)

    def creating(op_type: str, *args: Any, **kwargs: Any) -> tf.Operation:
        attrs = kwargs.get("attrs", args[4] if len(args) > 4 else None) or {}
        functions = compat.graphs_in(graph, attrs)
        if not functions:
            return create(op_type, *args, **kwargs)
        return calling(functions, lambda: create(op_type, *args, **kwargs))

    creator.set(graph, creating)


def wrap_runs(run: Callable[..., Any], concerns: Callable[[tf.Graph], bool]) -> None:
    """Makes `run` execute the runs of sessions.

    Args:
        run: Takes the session's graph, the requested operations and tensors, the names of fed
            tensors, and a function. That function performs the run with additional operations and
            additional fed tensors.
        concerns: Takes a graph; returns whether `run` executes its sessions.
    """

    def running(
        do_run: Callable[..., Any],
        self: Any,
        handle: Any,
        target_list: Any,
        fetch_list: Any,
        feed_dict: Any,
        options: Any,
        run_metadata: Any,
    ) -> Any:
        def go(more: Sequence[tf.Operation], fed: dict[tf.Tensor, Any]) -> Any:
            if handle is not None and (more or fed):
                raise NotImplementedError(
                    "partial_run of what has collectives: use Session.run, on every rank"
                )
            all_fed = {**feed_dict, **{tensor.ref(): value for tensor, value in fed.items()}}
            targets = [*target_list, *more]
            return do_run(self, handle, targets, fetch_list, all_fed, options, run_metadata)

        names = [tensor.deref().name for tensor in feed_dict]
        return run(self.graph, target_list, fetch_list, names, go)

    def making(
        make_callable: Callable[..., Any],
        self: Any,
        fetches: Any,
        feed_list: Any = None,
        accept_options: bool = False,
    ) -> Any:
        if feed_list is None:
            return lambda **options: self.run(fetches, **options)
        return make_callable(self, fetches, feed_list, accept_options)

    def making_from_options(make: Callable[..., Any], self: Any, callable_options: Any) -> Any:
        graph, callables = self.graph, {}
        targets = [
            graph.as_graph_element(name, allow_tensor=False) for name in callable_options.target
        ]
        fetches = [
            graph.as_graph_element(name, allow_operation=False) for name in callable_options.fetch
        ]

        def call(*args: Any, **kwargs: Any) -> Any:
            def go(more: Sequence[tf.Operation], fed: dict[tf.Tensor, Any]) -> Any:
                if "made" not in callables:
                    with_more = type(callable_options)()
                    with_more.CopyFrom(callable_options)
                    with_more.target.extend(op.name for op in more)
                    with_more.feed.extend(tensor.name for tensor in fed)
                    callables["made"] = make(self, with_more)
                return callables["made"](*args, *fed.values(), **kwargs)

            return run(graph, targets, fetches, list(callable_options.feed), go)

        return call

    compat.replace(
        {
            "BaseSession._do_run": running,
            "BaseSession.make_callable": making,
            "BaseSession._make_callable_from_options": making_from_options,
        },
        applies=lambda self: concerns(self.graph),
    )


def recover_no_session() -> None:
    """Makes a `MonitoredSession` raise `tf.errors.AbortedError` instead of recovering from it.

    The session would treat the error as the restart of a server, and make a new session again and
    again.
    """
    errors = compat.row("monitored_session._PREEMPTION_ERRORS")
    if errors in compat.FOUND.owners:
        errors.set(compat.FOUND.owners[errors], (tf.errors.UnavailableError,))
