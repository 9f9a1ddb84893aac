"""The order of collectives in graphs of TensorFlow 1, and the runs of sessions that execute them.

In such a graph nothing orders what has side effects, the executor takes whatever is ready, and each
run executes another part of it: the initial broadcast once, then one of several training ops. But
all ranks must start the same collectives in the same order.

**The chain.** Every op with collectives, which is a Start or calls a function that has some, waits
for the *link* that the one before it has made, and makes the next: a gate that passes the former
link on once the op has run, which its *mark* tells. So the order is that in which the program made
the ops, by edges of the graph alone. No op of ours waits for a turn, so no thread pool is too
small: whatever a Wait waits for has been started, and all before it.

**A run.** A permanent chain would execute every older collective with each run. So a run *feeds*
what it leaves out: TensorFlow executes nothing behind a fed tensor. The collectives that a run
wants are those that its fetches reach without following the chain. The link before the first of
them is fed, and so is the mark of each one in between that is not wanted. Links go from op to op as
data up to a `PlaceholderWithDefault`, which no optimizer may drop or merge, since its name can be
fed; from there a control edge leads to the op. The chain begins with a placeholder, so that a run
that knows nothing of this fails by its name and sends nothing.

What a session is asked to run is known before it runs, so ranks can compare it (`compare_runs`).
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
_KINDS = {"GradringAllGatherStart": "all_gather", "GradringAllToAllVStart": "all_to_all"}

_STARTS = {"GradringStart", *_KINDS}

#: Where a graph keeps its order.
_ATTRIBUTE = "_gradring_order"

_OUTSIDE = "call it outside, or put the conditional or loop into a tf.function"

#: What is fed for links and marks: nobody reads it.
_PASSED = np.int64(0)

#: Compares with the other ranks what a run is about to execute on a communicator.
Comparison = Callable[[Communicator, Sequence["Running"]], None]

_comparisons: list[Comparison] = []
_installed = False

_busy: set[int] = set()
_busy_lock = threading.Lock()


@dataclass(frozen=True)
class Running:
    """A collective that a run of a session executes.

    Attributes:
        communicator: Its number.
        kind: ``all_reduce``, ``broadcast`` and so on.
        op: The reduce op; empty where nothing is reduced.
        root: The rank whose contents win, or which gets the result.
        label: What it is called.
        dtype: Of the tensors.
        shapes: As far as they are known and must be the same on all ranks; None elsewhere.
        sometimes: Whether a conditional or a loop decides how often it runs.
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
    """An op with collectives in the chain: what it waits for, and what tells that it has run."""

    op: tf.Operation
    before: tf.Tensor
    mark: tf.Tensor
    starts: Sequence[tf.Operation]


@dataclass(frozen=True)
class _Plan:
    """What a run needs besides what it was asked for."""

    running: Sequence[Running] = ()
    fed: Sequence[tf.Tensor] = ()
    targets: Sequence[tf.Operation] = ()


@dataclass
class Order:
    """That of the collectives of one graph, in which sessions run parts.

    Attributes:
        token: What every Start takes as its token; it orders those of a `tf.function`.
    """

    token: tf.Tensor
    _last: tf.Tensor
    _links: list[_Link] = field(default_factory=list)
    _link_ops: set[tf.Operation] = field(default_factory=set)
    #: The Starts of each function's graph, and of the functions that it calls.
    _inside: dict[tf.Graph, list[tf.Operation]] = field(default_factory=dict)
    _plans: dict[tuple[Any, ...], _Plan] = field(default_factory=dict)

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Ops that are made inside wait for the collectives before them."""
        with compat.outside_control(), tf.device("/device:CPU:0"):
            passed = tf.raw_ops.PlaceholderWithDefault(input=self._last, shape=[])
        self._link_ops.add(passed.op)
        with tf.control_dependencies([passed]):
            yield

    def add(self, op: tf.Operation, mark: tf.Tensor, starts: Sequence[tf.Operation]) -> None:
        """What follows in the chain waits for this op."""
        self._links.append(_Link(op, self._last, mark, starts))
        self._last = compat.gate(self._last, mark)
        self._link_ops.add(self._last.op)

    def starts_of(self, functions: Iterable[tf.Graph]) -> list[tf.Operation]:
        """The Starts of these functions, whose graphs are whole, and of those that they call.

        Raises:
            NotImplementedError: One that does not order its ops calls a function with a Start.
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
            # A function that has been traced before is called without making its Starts anew.
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
        """What a run needs that is asked for this, where tensors of these names are fed."""
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
                # What is started is waited for, though nobody may have asked for the result.
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


def of_this_graph(what: str) -> Order | None:
    """The order of the graph that is being built, if it is for sessions; None elsewhere.

    Args:
        what: Is to be made, for messages.

    Raises:
        NotImplementedError: It cannot be where it is to be.
    """
    if tf.executing_eagerly() or tf.compat.v1.executing_eagerly_outside_functions():
        return None
    *functions, graph = _enclosing_graphs()
    _check_place(what, functions, graph)
    order: Order | None = getattr(graph, _ATTRIBUTE, None)
    if order is None:
        order = _order_of(graph)
    return order


def make(order: Order, run: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Makes a Start, whose last output is its handle, in the order of its graph."""
    *functions, _ = _enclosing_graphs()
    if not functions:
        with order.entering():
            made = run()
        order.add(made[0].op, made[-1], [made[0].op])
        return made
    if compat.orders_side_effects(functions[0]):
        made = run()
    else:
        # A branch, whose ops with side effects are all executed.
        before = [op for op in functions[0].get_operations() if op.type in _STARTS]
        with tf.control_dependencies(before[-1:]):
            made = run()
        compat.end_after(functions[0], made[0].op)
    return made


def refuse(what: str) -> None:
    """Refuses what is to be in a graph for sessions.

    Args:
        what: Its name, for the message.

    Raises:
        NotImplementedError: The graph that is being built is one.
    """
    if not (tf.executing_eagerly() or tf.compat.v1.executing_eagerly_outside_functions()):
        raise NotImplementedError(
            f"{what} works eagerly and inside tf.function, not in the graphs and sessions of "
            "TensorFlow 1; leave `tf.Graph().as_default()`, and do not disable eager execution"
        )


def compare_runs(comparison: Comparison) -> None:
    """From now on, this is called before each run with collectives, for each communicator.

    Where it raises, nothing of the run is executed.
    """
    _comparisons.append(comparison)


def _check_place(what: str, functions: Sequence[tf.Graph], graph: tf.Graph) -> None:
    # A function of TensorFlow 2 orders all that is in it.
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
        raise _unordered(what, remedy)


def _unordered(what: str, remedy: str) -> NotImplementedError:
    return NotImplementedError(
        f"'{what}': nothing would order a collective that a graph for sessions of TensorFlow 1 "
        f"has in this conditional, loop or function; {remedy}"
    )


def _order_of(graph: tf.Graph) -> Order:
    outside = graph.as_default(), compat.outside_control(), tf.device("/device:CPU:0")
    with outside[0], outside[1], outside[2], tf.name_scope("gradring/"):
        # Every Start takes it; no variable is ever there.
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
    """In place of the run of a session."""
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
                raise  # ranks were to run different things, and the group goes on
            sessions.recover_no_session()
            if isinstance(error, tf.errors.OpError):
                raise
            kind: Any = tf.errors.AbortedError
            if isinstance(error, CollectiveTimeoutError):
                kind = tf.errors.DeadlineExceededError
            raise failures.like(error, kind) from error


@contextlib.contextmanager
def _alone(running: Sequence[Running]) -> Iterator[None]:
    """Inside, no other thread runs collectives of these communicators.

    Raises:
        RuntimeError: One does.
    """
    numbers = {each.communicator for each in running}
    with _busy_lock:
        if numbers & _busy:
            raise RuntimeError(
                f"a session was about to run '{running[0].label.shown}' while another run with "
                "collectives is under way in this process: their order would differ from rank to "
                "rank; run them in one thread, or give each thread a communicator of its own"
            )
        _busy.update(numbers)
    try:
        yield
    finally:
        with _busy_lock:
            _busy.difference_update(numbers)


def _compare(running: Sequence[Running]) -> None:
    # In the order in which ranks have made their communicators, which is one order for all.
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
        # The tensors are its last inputs; its outputs are they, and the handle.
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
    """The graph that is being built and those around it, up to the first that is no function's."""
    graphs = [tf.compat.v1.get_default_graph()]
    while isinstance(graphs[-1], compat.FuncGraph):
        graphs.append(graphs[-1].outer_graph)
    return graphs
