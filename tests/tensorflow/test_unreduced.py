"""Optimizers that update variables by gradients that no collective has reduced are refused."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.served import served
from support.tf_worker import join, refusal

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

    def built(self) -> tuple[Any, Any]:
        model, optimizer = self.model()
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def reduced(self, model: Any) -> Any:
        context = self.tf.distribute.get_replica_context()
        return context.all_reduce("MEAN", self.gradients(model))

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


Program = Callable[[Programs], None]
#: By kind and name, programs that reduce in some way.
ALLOWED: dict[str, dict[str, Program]] = {"in run": {}, "apart": {}, "others": {}, "rules": {}}


def allowed(kind: str, *names: str) -> Callable[[Program], Program]:
    def noted(program: Program) -> Program:
        ALLOWED[kind] |= dict.fromkeys(names, program)
        return program

    return noted


@allowed("in run", "frozen and without gradient")
def frozen(programs: Programs) -> None:
    model, optimizer = programs.model()
    model.layers[0].trainable = False
    with programs.strategy.scope():
        unused = programs.tf.Variable(1.0, name="unused")
    optimizer.build([*model.trainable_variables, programs.keras.Variable(1.0)])

    def step() -> None:
        gradients = [*programs.gradients(model), None]
        optimizer.apply(gradients, optimizer._trainable_variables)
        unused.assign_add(1.0)

    programs.tf.function(lambda: programs.strategy.run(step))()


@allowed("in run", "two optimizers, clipped weights, a copy")
def two_optimizers(programs: Programs) -> None:
    for graph in (True, False):
        model, optimizer = programs.model()
        critic, other = programs.model()
        target, _ = programs.model()
        programs.run(model, optimizer, graph)
        programs.run(critic, other, graph)

        def clip(model: Any = model, target: Any = target) -> None:
            for variable, copy in zip(model.weights, target.weights, strict=True):
                variable.assign(programs.tf.clip_by_value(variable, -0.01, 0.01))
                copy.assign(0.5 * variable + 0.5 * copy)

        programs.strategy.run(clip)
        programs.run(model, optimizer, graph)


@allowed("in run", "averages and constraints")
def averages(programs: Programs) -> None:
    keras = programs.keras
    options = {"use_ema": True, "ema_overwrite_frequency": 2, "weight_decay": 0.1}
    for graph in (True, False):
        model, _ = programs.model(kernel_constraint=keras.constraints.MaxNorm(0.5))
        programs.run(model, keras.optimizers.Adam(**options), graph, steps=2)
    programs.fit(model, keras.optimizers.Adam(**options))


@allowed("in run", "accumulation")
def accumulation(programs: Programs) -> None:
    for graph in (True, False):
        summing = programs.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        programs.run(programs.model()[0], summing, graph, steps=2)
        model, _ = programs.model(kernel_constraint=programs.keras.constraints.UnitNorm())
        summing = programs.keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        programs.run(model, summing, graph, steps=4)


@allowed("in run", "scaled loss")
def scaled_loss(programs: Programs) -> None:
    model, optimizer = programs.model()
    programs.run(model, programs.keras.optimizers.LossScaleOptimizer(optimizer))


@allowed("in run", "own optimizer that reduces")
def own_optimizer(programs: Programs) -> None:
    from gradring.tensorflow import all_reduce

    for graph in (True, False):
        programs.run(programs.model()[0], programs.own(all_reduce), graph)


# Reduced at another time or place than applied, or in another shape; assigned after the step.
@allowed("apart", "reduced in run, applied outside")
def applied_outside(programs: Programs) -> None:
    model, optimizer = programs.built()
    for _ in range(2):
        gradients = programs.strategy.run(programs.reduced, args=(model,))
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients(list(pairs))


@allowed("apart", "reduced in run, applied in another run")
def applied_in_another_run(programs: Programs) -> None:
    model, _ = programs.built()
    own = programs.own()
    gradients = programs.strategy.run(programs.reduced, args=(model,))
    apply = lambda each: own.apply(each, model.trainable_variables)  # noqa: E731
    programs.strategy.run(apply, args=(gradients,))


@allowed("apart", "reduced in a function of its own")
def reduced_in_a_function(programs: Programs) -> None:
    from gradring.tensorflow import all_reduce

    model, _ = programs.built()
    reduce = programs.tf.function(lambda each: all_reduce(each, "mean"))
    for rows in (4, 3):
        programs.x = programs.x[:rows]
        programs.run(model, programs.own(reduce))


@allowed("apart", "reduced as a matrix")
def reduced_as_a_matrix(programs: Programs) -> None:
    from gradring.tensorflow import all_reduce

    tf = programs.tf

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


@allowed("apart", "averages between steps")
def averages_between_steps(programs: Programs) -> None:
    variables = programs.built()[0].trainable_variables

    class Lookahead(programs.keras.optimizers.SGD):  # type: ignore[misc, name-defined]
        def between(self) -> None:
            for variable in variables:
                variable.assign(0.5 * programs.tf.convert_to_tensor(variable))

    lookahead = Lookahead(0.1)
    lookahead.build(variables)
    lookahead.between()
    programs.tf.function(lookahead.between)()


@allowed("apart", "slots by zeros")
def slots_by_zeros(programs: Programs) -> None:
    variables = programs.built()[0].trainable_variables
    optimizer = programs.keras.optimizers.Adam()
    zeros = [programs.tf.zeros_like(variable) for variable in variables]
    with programs.strategy.scope():
        optimizer.apply_gradients(list(zip(zeros, variables, strict=True)))


@allowed(
    "apart",
    "decay after the step",
    "decay after the step, LocalSGD",
    "decay after the step, compression",
)
def decay_after_the_step(programs: Programs) -> None:
    decay(programs)


@allowed("apart", "clipped after the step, without gradient")
def clipped_without_gradient(programs: Programs) -> None:
    decay(programs, without_gradient=True)


def decay(programs: Programs, without_gradient: bool = False) -> None:
    class Decay(programs.keras.optimizers.SGD):  # type: ignore[misc, name-defined]
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            if without_gradient:
                grads = [None, *grads[1:]]
            super().apply(grads, trainable_variables)
            for variable in trainable_variables:
                variable.assign(programs.tf.clip_by_value(0.9 * variable, -1.0, 1.0))

    for graph in (True, False):
        programs.run(programs.model()[0], Decay(0.1), graph, steps=2)


@allowed("apart", "own accumulators")
def own_accumulators(programs: Programs) -> None:
    tf = programs.tf

    class Accumulates(programs.keras.optimizers.SGD):  # type: ignore[misc, name-defined]
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


@allowed("apart", "a function called apply")
def function_called_apply(programs: Programs) -> None:
    model, _ = programs.built()

    def apply() -> None:
        model.layers[0].kernel.assign(2.0 * model.layers[0].kernel)

    programs.strategy.run(apply)


@allowed("apart", "unknown shape")
def unknown_shape(programs: Programs) -> None:
    from gradring.tensorflow import all_reduce

    tf = programs.tf

    class Plain(tf.compat.v1.train.GradientDescentOptimizer):  # type: ignore[misc, name-defined]
        def apply_gradients(self, grads_and_vars: Any, *_: Any, **__: Any) -> None:
            for gradient, variable in grads_and_vars:
                variable.assign_sub(0.1 * all_reduce(gradient))

    with programs.strategy.scope():
        variable = tf.Variable(tf.zeros((3, 1)), shape=tf.TensorShape([None, 1]))
    step = lambda: Plain(0.1).apply_gradients([(tf.ones((3, 1)), variable)])  # noqa: E731
    programs.strategy.run(step)


def applied(model: Any, optimizer: Any, gradients: Any) -> None:
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@allowed("others", "reducer outside of run")
def reducer_outside(programs: Programs) -> None:
    from gradring.tensorflow import GradientReducer

    model, optimizer = programs.model()
    gradients = GradientReducer()(programs.gradients(model), model.trainable_variables)
    applied(model, optimizer, gradients)


@allowed("others", "unnamed outside of run")
def unnamed_outside(programs: Programs) -> None:
    from gradring.tensorflow import all_reduce

    model, optimizer = programs.model()
    applied(model, optimizer, all_reduce(programs.gradients(model)))


@allowed("others", "packed outside of run")
def packed_outside(programs: Programs) -> None:
    from gradring.tensorflow import all_reduce

    tf = programs.tf
    model, optimizer = programs.model()
    gradients = programs.gradients(model)
    total = all_reduce(tf.concat([tf.reshape(each, [-1]) for each in gradients], 0))
    parts = tf.split(total, [tf.size(each) for each in gradients])
    pairs = zip(parts, gradients, strict=True)
    applied(model, optimizer, [tf.reshape(part, each.shape) for part, each in pairs])


@allowed("others", "the chief alone")
def chief_alone(programs: Programs) -> None:
    model, optimizer = programs.built()
    programs.strategy.broadcast_update(lambda: programs.step(model, optimizer))


@allowed("others", "TensorFlow 1")
def tensorflow_1(programs: Programs) -> None:
    programs.version_1()


@allowed("others", "other variables")
def other_variables(programs: Programs) -> None:
    keras = programs.keras
    plain = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    programs.step(plain, keras.optimizers.SGD(0.1))


@allowed("others", "evaluation")
def evaluation(programs: Programs) -> None:
    model, optimizer = programs.model()
    model.compile(optimizer, "mse")
    model.evaluate(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)


@allowed("rules", *RULES)
def by_a_rule(programs: Programs) -> None:
    for graph in (True, False):
        programs.run(*programs.model(), graph, steps=2)
    programs.fit(*programs.model())


@allowed("rules", "ParameterServer")
def by_servers(programs: Programs) -> None:
    """They know one optimizer."""
    programs.run(*programs.model(), steps=2)


@allowed("others", "Keras 2 that reduces before")
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


def all_allowed(kind: str) -> dict[str, str]:
    """What is said to each program."""
    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.graph import replica_step

    found = {}
    with join() as comm:
        for case, program in ALLOWED[kind].items():
            if case == "ParameterServer":
                with served(comm, updates.ParameterServer()) as strategy:
                    found[case] = refusal(partial(program, Programs(strategy)))
                continue
            # As in a process of its own.
            vars(replica_step.current().reductions).update(vars(replica_step.Reductions()))
            rule = RULES.get(case.rpartition(", ")[2], RULES[""])
            strategy = CustomCollectiveStrategy(communicator=comm, update=rule)
            found[case] = refusal(partial(program, Programs(strategy)))
    return found


@pytest.mark.parametrize("kind", ALLOWED)
def test_programs_whose_gradients_are_reduced_in_any_way_are_not_refused(kind: str) -> None:
    for found in run_ranks(all_allowed, 2, kind, timeout=240.0):
        assert found == dict.fromkeys(ALLOWED[kind], "not refused")


def alone() -> str:
    """What one rank is told, whose gradients are all there are."""
    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        programs = Programs(CustomCollectiveStrategy(communicator=comm))
        return refusal(lambda: programs.step(*programs.model()))


@pytest.mark.parametrize("ranks", [1])
def test_one_rank_needs_no_reduction(ranks: int) -> None:
    assert run_ranks(alone, ranks) == ["not refused"]
