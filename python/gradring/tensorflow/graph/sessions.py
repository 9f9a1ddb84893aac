"""Sessions of TensorFlow 1: their runs, and the operations that their graphs get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat


def watch_calls(
    graph: tf.Graph,
    calling: Callable[[Sequence[tf.Graph], Callable[[], tf.Operation]], tf.Operation],
) -> None:
    """From now on, ops of this graph that call functions are made by `calling`.

    Args:
        graph: A graph that is no function's.
        calling: Takes the functions' graphs, and what makes the op.
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
    """From now on, sessions run by `run`.

    Args:
        run: Takes the session's graph, the operations and the tensors that are asked for, the names
            of what is fed, and a function that runs this with more operations and more that is fed.
        concerns: Whether a graph is one for `run`.
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
    """From now on, a `MonitoredSession` raises `tf.errors.AbortedError`.

    It would take it for a server's that comes back, and make sessions again and again.
    """
    errors = compat.row("monitored_session._PREEMPTION_ERRORS")
    if errors in compat.FOUND.owners:
        errors.set(compat.FOUND.owners[errors], (tf.errors.UnavailableError,))
