"""The order of collectives in graphs of TensorFlow 1, and the runs of sessions that execute them.

These graphs do not order ops with side effects: the executor takes any op that is ready. Each run
executes another part of the graph: the initial broadcast once, then one of several training ops.
But all ranks must start the same collectives in the same order.

**The chain.** An op has collectives if it is a Start, or if it calls a function with a Start. The
chain consists of all these ops. Each op waits for the *link* of the op before it, and makes the
next link. A link is a gate that passes the former link on once the op has run; the op's *mark*
shows that it has. So the collectives run in the order in which the program made the ops, by edges
of the graph alone. No op of ours waits for its turn, so no thread pool is too small: when a Wait
runs, its collective and all collectives before it have started.

**A run.** A permanent chain would execute every older collective with each run. So a run *feeds*
links and marks of collectives that it leaves out, because TensorFlow executes nothing behind a fed
tensor. A run wants the collectives that its fetches reach without a step along the chain. It feeds
the link before the first wanted collective, and the marks of all unwanted ones up to the last
wanted one. A link leads as data to a `PlaceholderWithDefault`, and from there a control edge leads
to the op. No optimizer drops or merges this placeholder, because a run could feed it by its name.
The chain begins with a plain placeholder. A run that bypasses this module fails because nothing
feeds the placeholder, its name is in the error, and nothing is sent.

The collectives of a run are known before the run, so ranks can compare them (`compare_runs`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.errors import CollectiveTimeoutError, GradringError
from gradring.gradients.names import Label
from gradring.group.communicator import Communicator, core_of, open_groups
from gradring.tensorflow.graph import compat, failures, sessions

_WAIT = "GradringWait"
_KINDS = {
    "GradringAllGatherStart": "all_gather",
    "GradringAllToAllVStart": "all_to_all",
    "GradringAllGatherVStart": "all_gather",
    "GradringReduceScatterVStart": "reduce_scatter",
}

_STARTS = {"GradringStart", *_KINDS}

#: Attribute of a graph with its `Order`.
_ATTRIBUTE = "_gradring_order"

_OUTSIDE = "call it outside, or put the conditional or loop into a tf.function"

#: Value that is fed for links and marks; no op uses it.
_PASSED = np.int64(0)

#: Compares the collectives of a coming run on one communicator with those of the other ranks.
Comparison = Callable[[Communicator, Sequence["Running"]], None]

_comparisons: list[Comparison] = []
_installed = False

_busy: set[int] = set()
_busy_lock = threading.Lock()


@dataclass(frozen=True)
class Running:
    """A collective that a run of a session executes.

    Attributes:
        communicator: Number of its communicator.
        kind: ``all_reduce``, ``broadcast`` and so on.
        op: The reduce op; empty for a collective without a reduction.
        root: The rank that sends, for a broadcast, or that gets the result, for a reduce.
        label: Its label.
        dtype: Dtype of its tensors.
        shapes: Shapes of its tensors. None stands for sizes that are unknown or can differ between
            ranks.
        sometimes: Whether a called function, such as a branch or a loop body, contains it, so that
            the number of its executions is open.
    """

    communicator: int
    kind: str
    op: str
    root: int
    label: Label
    dtype: str
    shapes: Sequence[Sequence[int | None] | None]
    sometimes: bool


@dataclass
class _Link:
    """An op of the chain.

    Attributes:
        op: The op with collectives.
        before: The link for which it waits.
        mark: A tensor that exists once the op has run.
        starts: The Starts that it executes.
    """

    op: tf.Operation
    before: tf.Tensor
    mark: tf.Tensor
    starts: Sequence[tf.Operation]


@dataclass(frozen=True)
class _Plan:
    """Additions to a run of a session.

    Attributes:
        running: The collectives that it executes.
        fed: Links and marks to feed.
        targets: Waits to execute in addition.
    """

    running: Sequence[Running] = ()
    fed: Sequence[tf.Tensor] = ()
    targets: Sequence[tf.Operation] = ()


@dataclass
class Order:
    """The order of the collectives of one graph.

    Attributes:
        token: Token input of every Start; it orders the Starts inside a `tf.function`.
    """

    token: tf.Tensor
    _last: tf.Tensor
    _links: list[_Link] = field(default_factory=list)
    _link_ops: set[tf.Operation] = field(default_factory=set)
    #: The Starts of each function's graph, with those of the functions that it calls.
    _inside: dict[tf.Graph, list[tf.Operation]] = field(default_factory=dict)
    _plans: dict[tuple[Any, ...], _Plan] = field(default_factory=dict)

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Makes ops that are created in the block wait for all earlier collectives."""
        with compat.outside_control(), tf.device("/device:CPU:0"):
            passed = tf.raw_ops.PlaceholderWithDefault(input=self._last, shape=[])
        self._link_ops.add(passed.op)
        with tf.control_dependencies([passed]):
            yield

    def add(self, op: tf.Operation, mark: tf.Tensor, starts: Sequence[tf.Operation]) -> None:
        """Appends an op to the chain: later ops of the chain wait for it."""
        self._links.append(_Link(op, self._last, mark, starts))
        self._last = compat.gate(self._last, mark)
        self._link_ops.add(self._last.op)

    def starts_of(self, functions: Iterable[tf.Graph]) -> list[tf.Operation]:
        """Returns the Starts of completely traced functions and of the functions that they call.

        Raises:
            NotImplementedError: A function that does not order its ops calls one with a Start.
        """
        found = []
        for function in functions:
            if function not in self._inside:
                self._inside[function] = self._starts_in(function)
            found += self._inside[function]
        return found

    def _starts_in(self, function: tf.Graph) -> list[tf.Operation]:
        found = []
        for op in function.get_operations():
            # A call of a function with an earlier trace creates no new Starts.
            called = self.starts_of(compat.called_graphs(op))
            is_branch = compat.is_control_flow(function)
            if called and is_branch and not compat.orders_side_effects(function):
                raise _unordered(called[0].get_attr("label").decode(), _OUTSIDE)
            found += [op] if op.type in _STARTS else called
        return found

    def plan(
        self,
        targets: Sequence[tf.Operation],
        fetches: Sequence[tf.Tensor],
        fed: Sequence[str],
    ) -> _Plan:
        """Returns the additions to a run with these operations, tensors and fed names."""
        key = (
            tuple(op.name for op in targets),
            tuple(tensor.name for tensor in fetches),
            frozenset(fed),
        )
        if key not in self._plans:
            self._plans[key] = self._planned(targets, fetches, set(fed))
        return self._plans[key]

    def _planned(
        self, targets: Sequence[tf.Operation], fetches: Sequence[tf.Tensor], fed: set[str]
    ) -> _Plan:
        marks = {link.op: link.mark for link in self._links}
        waits: list[tf.Operation] = []
        reached: set[tf.Operation] = set()
        to_visit = [*targets, *(tensor.op for tensor in fetches if tensor.name not in fed)]
        while to_visit:
            op = to_visit.pop()
            if op in reached or op in self._link_ops:
                continue
            reached.add(op)
            to_visit += [tensor.op for tensor in op.inputs if tensor.name not in fed]
            to_visit += op.control_inputs
            if op in marks:
                # Every started collective is waited for, even if the run does not fetch its result.
                ends = [each for each in marks[op].consumers() if each.type == _WAIT]
                waits += ends
                to_visit += ends
        wanted = [link for link in self._links if link.op in reached]
        if not wanted:
            return _Plan()
        first, last = (self._links.index(wanted[end]) for end in (0, -1))
        left_out = [link.mark for link in self._links[first:last] if link.op not in reached]
        running = [each for link in wanted for each in _described(link)]
        return _Plan(running, [wanted[0].before, *left_out], waits)


def of_this_graph(label: str) -> Order | None:
    """Returns the order of the graph that is being built, if it is for sessions; else None.

    Args:
        label: Label of the collective that is about to be created, for messages.

    Raises:
        NotImplementedError: The place, such as a loop of TensorFlow 1, cannot have a collective.
    """
    if tf.executing_eagerly() or tf.compat.v1.executing_eagerly_outside_functions():
        return None
    *functions, graph = _enclosing_graphs()
    _check_place(label, functions, graph)
    order: Order | None = getattr(graph, _ATTRIBUTE, None)
    if order is None:
        order = _order_of(graph)
    return order


def make(order: Order, run: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Creates a Start in the order of its graph; the last tensor of the result is its handle."""
    *functions, _ = _enclosing_graphs()
    if not functions:
        with order.entering():
            made = run()
        order.add(made[0].op, made[-1], [made[0].op])
        return made
    if compat.orders_side_effects(functions[0]):
        made = run()
    else:
        # A branch executes all its ops with side effects, but does not order them.
        before = [op for op in functions[0].get_operations() if op.type in _STARTS]
        with tf.control_dependencies(before[-1:]):
            made = run()
        compat.end_after(functions[0], made[0].op)
    return made


def refuse(operation: str) -> None:
    """Refuses operations that graphs for sessions cannot have.

    Args:
        operation: Name of the operation, for the message.

    Raises:
        NotImplementedError: The graph that is being built is for sessions.
    """
    if not (tf.executing_eagerly() or tf.compat.v1.executing_eagerly_outside_functions()):
        raise NotImplementedError(
            f"{operation} works eagerly and inside tf.function, not in the graphs and sessions of "
            "TensorFlow 1; leave `tf.Graph().as_default()`, and do not disable eager execution"
        )


def compare_runs(comparison: Comparison) -> None:
    """Registers a comparison, called before each run with collectives, for each communicator.

    The run executes nothing if the comparison raises.
    """
    _comparisons.append(comparison)


def _check_place(label: str, functions: Sequence[tf.Graph], graph: tf.Graph) -> None:
    # A function of TensorFlow 2 orders all ops in it.
    ordered = functions and compat.orders_side_effects(functions[0])
    unordered = [
        each
        for each in functions
        if compat.is_control_flow(each) and not compat.orders_side_effects(each)
    ]
    if compat.in_control_flow_of_version_1(graph):
        problem = True
        remedy = "call it outside, or call tf.compat.v1.enable_control_flow_v2() before"
    else:
        is_in_one_branch = len(functions) == 1 and compat.is_branch(functions[0])
        problem = bool(unordered or (functions and not ordered)) and not is_in_one_branch
        remedy = _OUTSIDE
    if problem:
        raise _unordered(label, remedy)


def _unordered(label: str, remedy: str) -> NotImplementedError:
    return NotImplementedError(
        f"'{label}': nothing would order a collective that a graph for sessions of TensorFlow 1 "
        f"has in this conditional, loop or function; {remedy}"
    )


def _order_of(graph: tf.Graph) -> Order:
    outside = graph.as_default(), compat.outside_control(), tf.device("/device:CPU:0")
    with outside[0], outside[1], outside[2], tf.name_scope("gradring/"):
        # Every Start takes this handle; no variable is ever created for it.
        token = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[], name="a_graph_with_a_collective_needs_gradring"
        )
        first = tf.compat.v1.placeholder(
            tf.int64, [], "collectives_are_executed_by_Session_run_only"
        )
    order = Order(token, first)
    setattr(graph, _ATTRIBUTE, order)

    def calling(functions: Sequence[tf.Graph], create: Callable[[], tf.Operation]) -> tf.Operation:
        starts = order.starts_of(functions)
        if not starts:
            return create()
        with order.entering():
            op = create()
        with compat.outside_control(), tf.control_dependencies([op]), tf.device("/device:CPU:0"):
            mark = tf.raw_ops.PlaceholderWithDefault(input=tf.constant(_PASSED), shape=[])
        order.add(op, mark, starts)
        return op

    sessions.watch_calls(graph, calling)
    _install()
    return order


def _install() -> None:
    global _installed
    if not _installed:
        sessions.wrap_runs(_run, lambda graph: hasattr(graph, _ATTRIBUTE))
        failures.install()
        _installed = True


def _run(
    graph: tf.Graph,
    targets: Sequence[tf.Operation],
    fetches: Sequence[tf.Tensor],
    fed: Sequence[str],
    run: Callable[[Sequence[tf.Operation], dict[tf.Tensor, Any]], Any],
) -> Any:
    """Replaces the run of a session: adds links and waits, and converts errors."""
    order: Order | None = getattr(graph, _ATTRIBUTE, None)
    plan = _Plan() if order is None else order.plan(targets, fetches, fed)
    if not plan.running:
        return run((), {})
    with _alone(plan.running):
        try:
            _compare(plan.running)
            return run(plan.targets, dict.fromkeys(plan.fed, _PASSED))
        except GradringError as error:
            if isinstance(error, tf.errors.FailedPreconditionError):
                raise  # the comparison has found a difference; the group stays usable
            sessions.recover_no_session()
            if isinstance(error, tf.errors.OpError):
                raise
            kind: Any = tf.errors.AbortedError
            if isinstance(error, CollectiveTimeoutError):
                kind = tf.errors.DeadlineExceededError
            raise failures.like(error, kind) from error


@contextlib.contextmanager
def _alone(running: Sequence[Running]) -> Iterator[None]:
    """Keeps other threads from running collectives of these communicators during the block.

    Raises:
        RuntimeError: Another thread is running some.
    """
    numbers = {each.communicator for each in running}
    with _busy_lock:
        if numbers & _busy:
            raise RuntimeError(
                f"a session was about to run '{running[0].label.shown}' while another run with "
                "collectives is under way in this process. Their order would differ between "
                "ranks; run them in one thread, or give each thread its own communicator"
            )
        _busy.update(numbers)
    try:
        yield
    finally:
        with _busy_lock:
            _busy.difference_update(numbers)


def _compare(running: Sequence[Running]) -> None:
    # All ranks have made their communicators in the same order.
    for communicator in sorted(open_groups, key=lambda each: core_of(each).id):
        number = core_of(communicator).id
        own = [each for each in running if each.communicator == number]
        for comparison in _comparisons if own else ():
            comparison(communicator, own)


def _described(link: _Link) -> Iterator[Running]:
    for start in link.starts:
        kind, op, root = _KINDS.get(start.type, start.type), "", 0
        if start.type == "GradringStart":
            kind, op = (start.get_attr(name).decode() for name in ("collective", "reduce_op"))
            root = start.get_attr("root")
        # The last inputs are the tensors; the outputs are as many tensors and the handle.
        shapes = [tensor.shape for tensor in start.inputs[1 - len(start.outputs) :]]
        rows_differ = kind in ("all_gather", "all_to_all")
        yield Running(
            start.get_attr("communicator"),
            kind,
            op,
            root,
            Label(start.get_attr("label").decode(), start.get_attr("identity").decode()),
            start.outputs[0].dtype.name,
            [_comparable(shape, rows_differ) for shape in shapes],
            link.op is not start,
        )


def _comparable(shape: tf.TensorShape, rows_differ: bool) -> list[int | None] | None:
    if shape.rank is None:
        return None
    sizes: list[int | None] = shape.as_list()
    return [None, *sizes[1:]] if rows_differ else sizes


def _enclosing_graphs() -> list[tf.Graph]:
    """Returns the graph being built and those around it, up to the first that is no function's."""
    graphs = [tf.compat.v1.get_default_graph()]
    while isinstance(graphs[-1], compat.FuncGraph):
        graphs.append(graphs[-1].outer_graph)
    return graphs
