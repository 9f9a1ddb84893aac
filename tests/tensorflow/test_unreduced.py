"""Optimizers that update variables by gradients that no collective has reduced are refused."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from keras_models import needs_fit
from served import served
from tf_worker import join, refusal

from gradring import updates
from gradring.testing import run_ranks

pytestmark = needs_fit

LOOPS = {
    "eager loop": "by gradients that were not reduced: call it inside of strategy.run",
    "eager loop, after a step": "call it inside of strategy.run",
    "tf.function": "call it inside of strategy.run",
    "in the scope": "call it inside of strategy.run",
    "own optimizer, outside": "call it inside of strategy.run",
    "own optimizer": "it may assign them by itself",
    "own optimizer, eagerly": "it may assign them by itself",
}
#: Parents that do not call what stands in for them, or what overrides theirs.
PARENTS = {
    "_all_reduce_sum_gradients": "it may assign them by itself",
    "ReplicaContext.all_reduce": "it may assign them by itself",
    "_replica_ctx_all_reduce": "it may assign them by itself",
    "_batch_reduce_to": "GradientDescentOptimizer updates ",
    "_call_for_each_replica": "it may assign them by itself",
    "_clip_gradients": "clips each rank's part of the gradients",
    "_backend_update_step, clipped": "clips each rank's part of the gradients",
    "_all_reduce_sum_gradients, clipped": "are reduced again",
}
#: It ends the group, as steps of `fit` may have collectives of their own.
FIT = {"_all_reduce_sum_gradients, fit": "it may assign them by itself"}
RULES_REFUSED = {
    "apply, LocalSGD": "not reduced by update=LocalSGD",
    "apply, Primary": "not reduced by update=Primary",
    "apply, compression": "not reduced by update=AllReduce:",
    "apply, sync_every": "not reduced by update=AllReduce:",
    "_backend_update_step, ParameterServer": "not reduced by update=ParameterServer",
}

IN_RUN = (
    "frozen and without gradient",
    "two optimizers, clipped weights, a copy",
    "averages and constraints",
    "accumulation",
    "scaled loss",
    "own optimizer that reduces",
)
#: Reduced at another time or place than applied, or in another shape; assigned after the step.
APART = (
    "reduced in run, applied outside",
    "reduced in run, applied in another run",
    "reduced in a function of its own",
    "reduced as a matrix",
    "averages between steps",
    "slots by zeros",
    "decay after the step",
    "decay after the step, LocalSGD",
    "decay after the step, compression",
    "clipped after the step, without gradient",
    "own accumulators",
    "unknown shape",
    "a function called apply",
)
OTHERS = (
    "reducer outside of run",
    "unnamed outside of run",
    "packed outside of run",
    "the chief alone",
    "TensorFlow 1",
    "Keras 2 that reduces before",
    "other variables",
    "evaluation",
)

RULES: dict[str, updates.Rule] = {
    "": updates.AllReduce(),
    "LocalSGD": updates.LocalSGD(2),
    "Primary": updates.Primary(),
    "compression": updates.AllReduce(compression=updates.Int8()),
    "sync_every": updates.AllReduce(sync_every=2),
}


class Programs:
    """Of one rank."""

    def __init__(self, strategy: Any) -> None:
        import tensorflow as tf

        self.tf, self.keras, self.strategy = tf, tf.keras, strategy
        self.x = tf.ones([4, 3]) * (strategy.communicator.rank + 1)

    def model(self, **options: Any) -> tuple[Any, Any]:
        layers = self.keras.layers
        with self.strategy.scope():
            dense = layers.Dense(4, **options)
            model = self.keras.Sequential([layers.Input((3,)), dense, layers.Dense(1)])
        return model, self.keras.optimizers.SGD(0.1)

    def gradients(self, model: Any) -> Any:
        with self.tf.GradientTape() as tape:
            loss = self.tf.reduce_mean((model(self.x, training=True) - 1) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    def step(self, model: Any, optimizer: Any) -> None:
        pairs = zip(self.gradients(model), model.trainable_variables, strict=True)
        optimizer.apply_gradients(list(pairs))

    def run(self, model: Any, optimizer: Any, graph: bool = True, steps: int = 1) -> None:
        with self.strategy.scope():
            optimizer.build(model.trainable_variables)

        def step() -> None:
            self.strategy.run(lambda: self.step(model, optimizer))

        function = self.tf.function(step) if graph else step
        for _ in range(steps):
            function()

    def own(self, reduce: Callable[[Any], Any] = lambda gradients: gradients) -> Any:
        class Own(self.keras.optimizers.SGD):  # type: ignore[misc, name-defined]
            """Assigns as it likes."""

            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                for variable in trainable_variables:
                    variable.assign_sub(0.01 * variable)  # before anything is reduced
                for grad, variable in zip(reduce(grads), trainable_variables, strict=True):
                    variable.assign_sub(0.1 * grad)

        return Own(0.1)

    def version_1(self) -> Any:
        model, _ = self.model()
        with self.strategy.scope():
            optimizer = self.tf.compat.v1.train.GradientDescentOptimizer(0.1)

        def step() -> None:
            variables = [variable.value for variable in model.trainable_variables]
            pairs = zip(self.gradients(model), variables, strict=True)
            optimizer.apply_gradients(list(pairs))

        self.strategy.run(step)

    def fit(self, model: Any, optimizer: Any) -> None:
        model.compile(optimizer, "mse")
        inputs, targets = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
        model.fit(inputs, targets, batch_size=4, verbose=0)
        model.evaluate(inputs, targets, batch_size=4, verbose=0)


class Dead:
    """Inside, a function is another one, as in a version that has changed."""

    def __init__(self, owner: Any, name: str, function: Any) -> None:
        self._owner, self._name, self._function = owner, name, function

    def __enter__(self) -> None:
        self._original = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._function)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._original)


def of_keras(programs: Programs, name: str) -> Dead:
    """Keras' own function in place of what stands in for it."""
    owner = programs.keras.optimizers.Optimizer
    return Dead(owner, name, inspect.unwrap(getattr(owner, name)))


def refused(programs: Programs, case: str) -> None:
    tf, keras = programs.tf, programs.keras
    owner, extended = keras.optimizers.Optimizer, type(programs.strategy.extended)
    clipping = keras.optimizers.SGD(0.1, global_clipnorm=0.1)
    kind = case.partition(", ")[0]
    model, optimizer = programs.model()
    if kind == "eager loop":
        if case != kind:
            programs.run(model, optimizer, graph=False)
        programs.step(model, optimizer)
    elif kind == "tf.function":
        optimizer.build(model.trainable_variables)
        tf.function(lambda: programs.step(model, optimizer))()
    elif kind == "in the scope":
        gradients = programs.gradients(model)
        with programs.strategy.scope():
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    elif case == "own optimizer, outside":
        programs.step(model, programs.own())
    elif kind == "own optimizer":
        programs.run(model, programs.own(), graph=case == kind)
    elif kind == "_all_reduce_sum_gradients" and case.endswith("clipped"):
        with of_keras(programs, kind):
            programs.run(model, clipping)
    elif kind == "_all_reduce_sum_gradients":
        with Dead(owner, kind, lambda self, pairs: list(pairs)):
            (programs.fit if case.endswith("fit") else programs.run)(model, optimizer)
    elif kind == "ReplicaContext.all_reduce":
        same = lambda self, reduce_op, value, options=None: value  # noqa: E731
        with Dead(tf.distribute.ReplicaContext, "all_reduce", same):
            programs.run(model, optimizer)
    elif kind == "_replica_ctx_all_reduce":
        with Dead(extended, kind, lambda self, reduce_op, value, options=None: value):
            programs.run(model, optimizer)
    elif kind == "_batch_reduce_to":
        with Dead(extended, kind, lambda self, op, pairs, options=None: [v for v, _ in pairs]):
            programs.version_1()
    elif kind == "_call_for_each_replica":

        def call(self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
            with tf.distribute.ReplicaContext(programs.strategy, replica_id_in_sync_group=0):
                return fn(*args, **kwargs)

        with Dead(extended, kind, call):
            programs.run(model, optimizer)
    elif kind == "_clip_gradients" or case.endswith("clipped"):
        with of_keras(programs, kind):
            programs.run(model, clipping)
    else:
        with of_keras(programs, kind):
            programs.run(model, optimizer, steps=2)


def refusals(cases: list[str]) -> dict[str, str]:
    """What is said to each program."""
    from gradring.tensorflow import CustomCollectiveStrategy

    found = {}
    with join() as comm:
        for case in cases:
            comm.barrier()
            rule = case.partition(", ")[2]
            if rule == "ParameterServer":
                with served(comm, updates.ParameterServer()) as strategy:
                    found[case] = refusal(partial(refused, Programs(strategy), case))
                continue
            strategy = CustomCollectiveStrategy(
                communicator=comm, update=RULES.get(rule, RULES[""])
            )
            found[case] = refusal(partial(refused, Programs(strategy), case))
    return found


@pytest.mark.parametrize(
    "cases", [LOOPS, PARENTS, FIT, RULES_REFUSED], ids=["loops", "parents", "fit", "rule"]
)
def test_updates_by_gradients_that_were_not_reduced_are_refused(cases: dict[str, str]) -> None:
    for rank, found in enumerate(run_ranks(refusals, 2, list(cases), timeout=240.0)):
        for case, said in cases.items():
            text = found[case]
            assert text.startswith("ConfigError: "), (case, text)
            assert said in text, (case, text)
            assert len(text) < 400, (case, text)
            if "variables (" in text:
                assert text.startswith(f"ConfigError: rank {rank} of "), (case, text)
                assert "/kernel" in text, (case, text)


def allowed(programs: Programs, case: str) -> None:
    from gradring.tensorflow import GradientReducer, all_reduce

    tf, keras, strategy = programs.tf, programs.keras, programs.strategy
    if case in APART:
        apart(programs, case)
        return
    model, optimizer = programs.model()
    if case == "frozen and without gradient":
        model.layers[0].trainable = False
        with strategy.scope():
            unused = tf.Variable(1.0, name="unused")
        optimizer.build([*model.trainable_variables, keras.Variable(1.0)])

        def step() -> None:
            gradients = [*programs.gradients(model), None]
            optimizer.apply(gradients, optimizer._trainable_variables)
            unused.assign_add(1.0)

        tf.function(lambda: strategy.run(step))()
    elif case == "two optimizers, clipped weights, a copy":
        for graph in (True, False):
            model, _ = programs.model()
            critic, other = programs.model()
            target, _ = programs.model()
            programs.run(model, optimizer := keras.optimizers.SGD(0.1), graph)
            programs.run(critic, other, graph)

            def clip(model: Any = model, target: Any = target) -> None:
                for variable, copy in zip(model.weights, target.weights, strict=True):
                    variable.assign(tf.clip_by_value(variable, -0.01, 0.01))
                    copy.assign(0.5 * variable + 0.5 * copy)

            strategy.run(clip)
            programs.run(model, optimizer, graph)
    elif case == "averages and constraints":
        for graph in (True, False):
            model, _ = programs.model(kernel_constraint=keras.constraints.MaxNorm(0.5))
            options = {"use_ema": True, "ema_overwrite_frequency": 2, "weight_decay": 0.1}
            programs.run(model, keras.optimizers.Adam(**options), graph, steps=2)
        programs.fit(model, keras.optimizers.Adam(**options))
    elif case == "accumulation":
        for graph in (True, False):
            model, _ = programs.model()
            summing = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            programs.run(model, summing, graph, steps=2)
    elif case == "scaled loss":
        programs.run(model, keras.optimizers.LossScaleOptimizer(optimizer))
    elif case == "own optimizer that reduces":
        for graph in (True, False):
            model, _ = programs.model()
            programs.run(model, programs.own(all_reduce), graph)
    elif case in ("reducer outside of run", "unnamed outside of run", "packed outside of run"):
        gradients = programs.gradients(model)
        if case.startswith("reducer"):
            gradients = GradientReducer()(gradients, model.trainable_variables)
        elif case.startswith("unnamed"):
            gradients = all_reduce(gradients)
        else:
            total = all_reduce(tf.concat([tf.reshape(each, [-1]) for each in gradients], 0))
            parts = tf.split(total, [tf.size(each) for each in gradients])
            pairs = zip(parts, gradients, strict=True)
            gradients = [tf.reshape(part, each.shape) for part, each in pairs]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    elif case == "the chief alone":
        optimizer.build(model.trainable_variables)
        strategy.broadcast_update(lambda: programs.step(model, optimizer))
    elif case == "TensorFlow 1":
        programs.version_1()
    elif case == "Keras 2 that reduces before":
        keras_2(programs)
    elif case == "other variables":
        plain = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        programs.step(plain, optimizer)
    elif case == "evaluation":
        model.compile(optimizer, "mse")
        model.evaluate(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
    else:
        for graph in (True, False):
            model, optimizer = programs.model()[0], keras.optimizers.SGD(0.1)
            programs.run(model, optimizer, graph, steps=2)
            if case == "ParameterServer":  # which know one optimizer
                return
        programs.fit(programs.model()[0], keras.optimizers.SGD(0.1))


def apart(programs: Programs, case: str) -> None:
    from gradring.tensorflow import all_reduce

    tf, keras, strategy = programs.tf, programs.keras, programs.strategy
    model, optimizer = programs.model()
    variables = model.trainable_variables
    optimizer.build(variables)
    kind = case.partition(", ")[0]

    def reduced() -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("MEAN", programs.gradients(model))

    if case.endswith("applied outside"):
        for _ in range(2):
            gradients = strategy.run(reduced)
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    elif case.endswith("in another run"):
        own = programs.own()
        gradients = strategy.run(reduced)
        strategy.run(lambda each: own.apply(each, variables), args=(gradients,))
    elif kind == "reduced in a function of its own":
        reduce = tf.function(lambda each: all_reduce(each, "mean"))
        for rows in (4, 3):
            programs.x = programs.x[:rows]
            programs.run(model, programs.own(reduce))
    elif kind == "reduced as a matrix":

        def by_row(gradients: Any) -> Any:
            row = tf.concat([tf.reshape(each, [1, -1]) for each in gradients], 1)
            parts = tf.split(all_reduce(row), [tf.size(each) for each in gradients], 1)
            pairs = zip(parts, gradients, strict=True)
            return [tf.reshape(part, each.shape) for part, each in pairs]

        def by_columns(gradients: Any) -> Any:
            shapes = [each.shape for each in gradients]
            columns = all_reduce([tf.reshape(each, [-1, each.shape[0]]) for each in gradients])
            return [tf.reshape(*each) for each in zip(columns, shapes, strict=True)]

        for reduce in (by_row, by_columns):
            programs.run(programs.model()[0], programs.own(reduce), graph=False)
    elif kind == "averages between steps":

        class Lookahead(keras.optimizers.SGD):  # type: ignore[misc, name-defined]
            def between(self) -> None:
                for variable in variables:
                    variable.assign(0.5 * tf.convert_to_tensor(variable))

        lookahead = Lookahead(0.1)
        lookahead.build(variables)
        lookahead.between()
        tf.function(lookahead.between)()
    elif kind == "slots by zeros":
        optimizer = keras.optimizers.Adam()
        zeros = [tf.zeros_like(variable) for variable in variables]
        with strategy.scope():
            optimizer.apply_gradients(list(zip(zeros, variables, strict=True)))
    elif kind.endswith("after the step"):

        class Decay(keras.optimizers.SGD):  # type: ignore[misc, name-defined]
            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                if case.endswith("without gradient"):
                    grads = [None, *grads[1:]]
                super().apply(grads, trainable_variables)
                for variable in trainable_variables:
                    variable.assign(tf.clip_by_value(0.9 * variable, -1.0, 1.0))

        for graph in (True, False):
            programs.run(programs.model()[0], Decay(0.1), graph, steps=2)
    elif kind == "own accumulators":

        class Accumulates(keras.optimizers.SGD):  # type: ignore[misc, name-defined]
            def build(self, variables: Any) -> None:
                super().build(variables)
                self.sums = [tf.Variable(tf.zeros(each.shape)) for each in variables]

            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                sums = self.sums
                for total, gradient in zip(sums, grads, strict=True):
                    total.assign_add(gradient)
                super().apply([tf.convert_to_tensor(total) for total in sums], trainable_variables)

        for graph in (True, False):
            programs.run(programs.model()[0], Accumulates(0.1), graph)
    elif kind == "a function called apply":

        def apply() -> None:
            model.layers[0].kernel.assign(2.0 * model.layers[0].kernel)

        strategy.run(apply)
    else:

        class Plain(tf.compat.v1.train.GradientDescentOptimizer):  # type: ignore[misc, name-defined]
            def apply_gradients(self, grads_and_vars: Any, *_: Any, **__: Any) -> None:
                for gradient, variable in grads_and_vars:
                    variable.assign_sub(0.1 * all_reduce(gradient))

        with strategy.scope():
            variable = tf.Variable(tf.zeros((3, 1)), shape=tf.TensorShape([None, 1]))
        strategy.run(lambda: Plain(0.1).apply_gradients([(tf.ones((3, 1)), variable)]))


def keras_2(programs: Programs) -> None:
    if importlib.util.find_spec("tf_keras") is None:
        return
    import tf_keras

    tf, strategy = programs.tf, programs.strategy
    with strategy.scope():
        dense = tf_keras.layers.Dense(2)
        model = tf_keras.Sequential([tf_keras.layers.Input((3,)), dense])
        optimizers = (tf_keras.optimizers.SGD(0.1), tf_keras.optimizers.legacy.SGD(0.1))
    for optimizer in optimizers:
        is_legacy = "legacy" in type(optimizer).__module__
        name = "experimental_aggregate_gradients" if is_legacy else "skip_gradients_aggregation"
        given = {name: not is_legacy}

        def step(optimizer: Any = optimizer, options: Any = given) -> None:
            gradients = programs.gradients(model)
            gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
            pairs = zip(gradients, model.trainable_variables, strict=True)
            optimizer.apply_gradients(list(pairs), **options)

        if not is_legacy:
            with strategy.scope():
                optimizer.build(model.trainable_variables)
        strategy.run(step)


def all_allowed(cases: list[str]) -> dict[str, str]:
    """What is said to each program."""
    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.graph import replica_step

    found = {}
    with join() as comm:
        for case in cases:
            if case == "ParameterServer":
                with served(comm, updates.ParameterServer()) as strategy:
                    found[case] = refusal(partial(allowed, Programs(strategy), case))
                continue
            # As in a process of its own.
            vars(replica_step.current().reductions).update(vars(replica_step.Reductions()))
            rule = RULES.get(case.rpartition(", ")[2], RULES[""])
            strategy = CustomCollectiveStrategy(communicator=comm, update=rule)
            found[case] = refusal(partial(allowed, Programs(strategy), case))
    return found


@pytest.mark.parametrize(
    "cases",
    [IN_RUN, APART, OTHERS, [*RULES, "ParameterServer"]],
    ids=["in run", "apart", "others", "rules"],
)
def test_programs_whose_gradients_are_reduced_in_any_way_are_not_refused(cases: list[str]) -> None:
    for found in run_ranks(all_allowed, 2, list(cases), timeout=240.0):
        assert found == dict.fromkeys(cases, "not refused")


def alone() -> str:
    """What one rank is told, whose gradients are all there are."""
    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        programs = Programs(CustomCollectiveStrategy(communicator=comm))
        return refusal(lambda: programs.step(*programs.model()))


@pytest.mark.parametrize("ranks", [1])
def test_one_rank_needs_no_reduction(ranks: int) -> None:
    assert run_ranks(alone, ranks) == ["not refused"]
