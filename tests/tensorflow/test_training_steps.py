"""A rank that leaves a training step early: named on every rank, and no sums of different steps."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import gradring
from gradring.errors import GradringError
from gradring.testing import run_ranks
from support.tf_worker import join

BAD_STEP = 3


def each_in_its_own_group(
    cases: dict[str, Callable[[Any, list[Any]], None]], threads: int = 1
) -> Any:
    """What every case saw: the sums, as (step, sum), and the exception that ended it."""
    import tensorflow as tf

    join().close()
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    seen = {}
    for name, case in cases.items():
        comm = gradring.init(timeout=20.0)
        sums: list[Any] = []
        error: Any = None
        try:
            case(comm, sums)
        except Exception as raised:
            error = raised
        # As in a graph, where the exception is TensorFlow's alone.
        kinds = [kind.__name__ for kind in type(error).__mro__]
        seen[name] = sums, kinds, str(error)
        comm.close()
    return seen


def skipping(step: Callable[[int], None]) -> None:
    """A loop that goes on after a bad batch."""
    import tensorflow as tf

    for number in range(1, 6):
        try:
            step(number)
        except GradringError:
            raise
        except (ValueError, tf.errors.InvalidArgumentError):
            continue


def eager_loops() -> Any:
    """Rank 1, or every rank, leaves a step of two reductions of one name and shape."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer

    def of_strategy(where: str, on: tuple[int, ...], **step: Any) -> Any:
        def case(comm: Any, sums: list[Any]) -> None:
            strategy = CustomCollectiveStrategy(communicator=comm)

            def reduced(value: Any) -> float:
                context = tf.distribute.get_replica_context()
                return float(context.all_reduce("SUM", value))

            def replica_step(number: int) -> None:
                bad = comm.rank in on and number == BAD_STEP
                if bad and where == "before":
                    raise ValueError("a bad batch")
                sums.append((number, reduced(tf.constant(10.0**number))))
                if bad:
                    raise ValueError("a bad batch")
                sums.append((number, reduced(tf.constant(10.0**number))))

            def run(number: int) -> None:
                with comm.step(**step) if step else contextlib.nullcontext():
                    strategy.run(replica_step, args=(number,))

            skipping(run)

        return case

    def of_reducer(comm: Any, sums: list[Any]) -> None:
        reducer = GradientReducer("sum", communicator=comm)

        def step(number: int) -> None:
            with comm.step():
                sums.append((number, float(reducer([tf.constant(10.0**number)])[0])))
                if comm.rank == 1 and number == BAD_STEP:
                    raise ValueError("a bad batch")
                sums.append((number, float(reducer([tf.constant(10.0**number)])[0])))

        skipping(step)

    def of_data(early: tuple[int, ...]) -> Any:
        def case(comm: Any, sums: list[Any]) -> None:
            strategy = CustomCollectiveStrategy(communicator=comm)
            count = 2 if comm.rank in early else 3

            def epoch(first: int) -> None:
                batches = iter(tf.data.Dataset.range(first, first + count))

                def replica_step() -> None:
                    number = float(next(batches))
                    context = tf.distribute.get_replica_context()
                    total = context.all_reduce("SUM", tf.constant(10.0**number))
                    sums.append((number, float(total)))

                while True:
                    try:
                        strategy.run(replica_step)
                    except (StopIteration, tf.errors.OutOfRangeError):
                        return

            epoch(1)
            epoch(5)

        return case

    return each_in_its_own_group(
        {
            "after a reduction": of_strategy("between", (1,)),
            "before any": of_strategy("before", (1,)),
            "before any, all": of_strategy("before", (0, 1)),
            "all leave it": of_strategy("between", (0, 1), abort_on_exception=False),
            "was to be left by all": of_strategy("between", (1,), abort_on_exception=False),
            "reducer": of_reducer,
            "data end on all": of_data((0, 1)),
            "data end on one": of_data((1,)),
        }
    )


def graph_loops() -> Any:
    """The same, where an op of a `tf.function` fails."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer, all_reduce

    def check(ok: Any) -> Any:
        return tf.debugging.assert_equal(ok, True, "a bad batch")

    def loop(step: Any, on: tuple[int, ...], comm: Any, sums: list[Any]) -> None:
        def attempt(number: int) -> None:
            ok = tf.constant(not (comm.rank in on and number == BAD_STEP))
            sums.append((number, float(step(tf.constant(10.0**number), ok))))

        skipping(attempt)

    def of_strategy(between: bool) -> Any:
        def case(comm: Any, sums: list[Any]) -> None:
            strategy = CustomCollectiveStrategy(communicator=comm)

            def replica_step(value: Any, ok: Any) -> Any:
                context = tf.distribute.get_replica_context()
                first = context.all_reduce("SUM", value)
                with tf.control_dependencies([first]):
                    check(ok | (not between))
                    second = context.all_reduce("SUM", tf.identity(value))
                with tf.control_dependencies([second]):
                    check(ok)
                    return tf.identity(second)

            step = tf.function(lambda *args: strategy.run(replica_step, args=args))
            loop(step, (1,), comm, sums)

        return case

    def of_function(on: tuple[int, ...], **says: Any) -> Any:
        """The check fails while the reductions are in flight."""

        def case(comm: Any, sums: list[Any]) -> None:
            reducer = GradientReducer("sum", bucket_bytes=4, communicator=comm)

            @tf.function  # type: ignore[untyped-decorator]
            def step(value: Any, ok: Any) -> Any:
                total, _ = reducer([value, value])
                with tf.control_dependencies([total]):
                    check(ok)
                    return all_reduce(tf.identity(total) / comm.world_size, "sum", "more", comm)

            def run(*args: Any) -> Any:
                with comm.step(**says) if says else contextlib.nullcontext():
                    return step(*args)

            loop(run, on, comm, sums)

        return case

    def of_dataset(comm: Any, sums: list[Any]) -> None:
        """A loop over a dataset is part of the function around it."""

        @tf.function  # type: ignore[untyped-decorator]
        def epoch(dataset: Any) -> Any:
            before = all_reduce(tf.constant(1.0), "sum", "before", comm)
            total = tf.constant(0.0)
            for value in dataset:
                total += all_reduce(value, "sum", "x", comm)
            return before, total, all_reduce(total, "sum", "after", comm)

        for number in (1, 2):
            before, total, after = epoch(tf.data.Dataset.from_tensors(10.0**number).repeat(3))
            assert (float(before), float(after)) == (2.0, 2 * float(total))
            sums.append((number, float(total) / 3))

    def of_map(comm: Any, _: list[Any]) -> None:
        def reduced(value: Any) -> Any:
            return tf.cond(value > 0, lambda: all_reduce(value, "sum", "x", comm), lambda: value)

        tf.data.Dataset.range(3).map(reduced, num_parallel_calls=2)

    return each_in_its_own_group(
        {
            "between two": of_strategy(between=True),
            "after the last": of_strategy(between=False),
            "one rank": of_function((1,)),
            "all ranks": of_function((0, 1)),
            "all ranks say so": of_function((0, 1), abort_on_exception=False),
            "loop over a dataset": of_dataset,
            "map": of_map,
        }
    )


def two_threads() -> Any:
    """Two threads call one function at the same time: which comes first differs between ranks."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    def case(comm: Any, _: list[Any]) -> None:
        both_have_reduced = threading.Barrier(2)

        def meet(value: Any) -> Any:
            both_have_reduced.wait(60.0)
            return value

        @tf.function  # type: ignore[untyped-decorator]
        def step(value: Any) -> Any:
            first = all_reduce(value, "sum", "x", comm)
            met = tf.numpy_function(meet, [first], tf.float32)
            return all_reduce(tf.ensure_shape(met, []), "sum", "x", comm)

        def train(number: int) -> None:
            try:
                step(tf.constant(10.0**number))
            except Exception as error:
                raised.append(error)
                both_have_reduced.abort()

        raised: list[Exception] = []
        step.get_concrete_function(tf.constant(1.0))
        numbers = (1, 2) if comm.rank == 0 else (2, 1)
        threads = [threading.Thread(target=train, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raise RuntimeError("\n".join(map(str, raised)))

    return each_in_its_own_group({"threads": case}, threads=4)


def keras_fits(names: list[str]) -> Any:
    """Rank 1, or every rank, leaves `fit`, and begins another one."""
    import keras
    import numpy as np
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    class Leave(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == BAD_STEP:
                raise ValueError("the disk is full")

    def fit_twice(on: tuple[int, ...], bad_data: bool) -> Any:
        def case(comm: Any, sums: list[Any]) -> None:
            strategy = CustomCollectiveStrategy(communicator=comm)
            with strategy.scope():
                model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])

                def loss(labels: Any, outputs: Any) -> Any:
                    return tf.debugging.check_numerics(outputs - labels, "a bad batch")

                model.compile(keras.optimizers.SGD(0.1), loss)
            bad = comm.rank in on
            x = np.ones([10, 1], np.float32)
            if bad and bad_data:
                x[BAD_STEP] = np.nan
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = (
                tf.data.experimental.AutoShardPolicy.OFF
            )

            def fit(x: Any, callbacks: Any) -> None:
                data = tf.data.Dataset.from_tensor_slices((x, x)).batch(2).with_options(options)
                model.fit(data, callbacks=callbacks, verbose=0)

            try:
                fit(x, [Leave()] if bad and not bad_data else None)
            except GradringError:
                raise
            except (ValueError, tf.errors.InvalidArgumentError):
                pass
            fit(np.ones([4, 1], np.float32), None)
            sums.append(float(model.layers[0].kernel[0, 0]))

        return case

    cases = {
        "undisturbed": fit_twice((), bad_data=False),
        "a callback": fit_twice((1,), bad_data=False),
        "a callback, all": fit_twice((0, 1), bad_data=False),
        "a bad batch": fit_twice((1,), bad_data=True),
    }
    return each_in_its_own_group({name: cases[name] for name in names})


def assert_not_mixed(sums: Any) -> None:
    assert sums and all(total == 2 * 10.0**step for step, total in sums), sums


def test_a_rank_that_leaves_an_eager_step_is_named_and_no_sums_are_mixed() -> None:
    for seen in run_ranks(eager_loops, 2):
        for sums, _, _ in seen.values():
            assert_not_mixed(sums)

        left = f"its step {BAD_STEP} was left by ValueError: a bad batch"
        for name in ("after a reduction", "reducer"):
            _, kinds, message = seen[name]
            assert "AbortedError" in kinds and "GradringError" in kinds
            assert "rank 1 on " in message and left in message
            assert "abort_on_exception=False" in message

        for name, by in {"before any": "ValueError: a bad batch", "data end on one": ""}.items():
            _, kinds, message = seen[name]
            assert "MismatchError" in kinds
            assert f"in step {BAD_STEP + 1}, after it left step {BAD_STEP} by {by}" in message
            assert "rank 1 on " in message and f"in step {BAD_STEP} (rank 0)" in message
        _, kinds, message = seen["was to be left by all"]
        assert "MismatchError" in kinds and "rank 1 on " in message
        assert f"in step {BAD_STEP + 1}; the others" in message

        for name, count in {"before any, all": 8, "all leave it": 9, "data end on all": 4}.items():
            sums, kinds, _ = seen[name]
            assert "GradringError" not in kinds and len(sums) == count


def test_a_function_that_fails_in_the_middle_mixes_no_sums() -> None:
    for rank, seen in enumerate(run_ranks(graph_loops, 2)):
        for name, (sums, _, _) in seen.items():
            if name != "map":
                assert_not_mixed(sums)
        for name in ("between two", "one rank"):
            _, kinds, message = seen[name]
            assert "AbortedError" in kinds, message
            assert "rank 1 on " in message
        # What failed on rank 1 came after its last reduction, so nobody waits for anybody.
        steps = [1, 2, 3, 4, 5] if rank == 0 else [1, 2, 4, 5]
        assert [number for number, _ in seen["after the last"][0]] == steps
        assert [number for number, _ in seen["all ranks say so"][0]] == [1, 2, 4, 5]
        assert "NoneType" in seen["loop over a dataset"][1]
        assert "NotImplementedError" in seen["map"][1]
        assert "'x' on rank" in seen["map"][2] and "tf.data" in seen["map"][2]


def test_functions_that_reduce_in_two_threads_at_a_time_are_refused() -> None:
    for seen in run_ranks(two_threads, 2):
        _, kinds, message = seen["threads"]
        assert "RuntimeError" in kinds
        assert "AbortedError" in message and "two threads" in message


def test_leaving_fit_alone_ends_in_an_error_that_names_the_rank() -> None:
    for rank in run_ranks(keras_fits, 2, ["a callback"]):
        _, kinds, message = rank["a callback"]
        assert kinds[0] == "MismatchError"
        assert "by ValueError: the disk is full" in message and "rank 1 on " in message


@pytest.mark.slow
def test_leaving_fit_trains_the_same_weights_or_none() -> None:
    names = ["undisturbed", "a callback", "a callback, all", "a bad batch"]
    seen, other = run_ranks(keras_fits, 2, names)
    for name in seen:
        assert seen[name][0] == other[name][0], "the same weights, or none"
    for name in ("undisturbed", "a callback, all"):
        assert len(seen[name][0]) == 1, seen[name]
    for rank in (seen, other):
        _, kinds, message = rank["a bad batch"]
        assert kinds[0] == "AbortedError" and "rank 1 on " in message
        assert "left by InvalidArgumentError: " in message and "a bad batch" in message
