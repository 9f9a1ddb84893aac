"""`strategy.broadcast_update`: the chief computes, every replica receives."""

from typing import Any

import pytest

from gradring.testing import run_ranks
from support.tf_worker import join

Ranks = list[dict[str, Any]]


def updates() -> Any:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        rank = comm.rank
        executed = tf.Variable(0)  # outside the scope: each rank's own
        only_read = tf.Variable(float(rank))
        in_loop = tf.Variable(float(rank))
        counter = tf.Variable(0.0)
        with strategy.scope():
            mirrored = tf.Variable([0.0, 0.0])
            kept = keras.Variable([1.0, 2.0])

        def nest(x: Any, scale: float) -> Any:
            return {
                "sum": tf.reduce_sum(x) * scale,
                "parts": (tf.cast(x, tf.int8), x > 1.0, None),
                "complex": tf.complex(x, x),
            }

        def assigning(x: Any) -> Any:
            executed.assign_add(1)
            kept.assign(x + 5.0)
            for _ in tf.range(3):
                in_loop.assign_add(only_read + 1.0)
            if tf.reduce_sum(x) > 0.0:
                mirrored.assign(x)
            return mirrored.read_value()

        def data_dependent(x: Any) -> Any:
            return tf.boolean_mask(x, x > 1.0)

        def both() -> Any:
            # The chief's arguments count: 0 + 1 and 2 there, other numbers elsewhere.
            x = tf.constant([1.0, 2.0]) + 10.0 * rank
            scale = strategy.reduce("SUM", 1.0, axis=None)
            return {
                "nest": strategy.broadcast_update(nest, x, 3.0 + rank),
                "assigned": strategy.broadcast_update(assigning, x * scale),
                "dynamic": strategy.broadcast_update(data_dependent, x),
                "nothing": strategy.broadcast_update(lambda: None),
                "read after": mirrored.read_value() + 1.0,
            }

        @tf.function  # type: ignore[untyped-decorator]
        def repeated(count: Any) -> Any:
            for _ in tf.range(count):
                counter.assign_add(strategy.broadcast_update(lambda: counter * 2.0 + 1.0))
            return counter.read_value()

        traced = tf.function(both)
        eager, graph, again = both(), traced(), traced()
        found = tf.nest.map_structure(
            lambda v: v.numpy().tolist() if hasattr(v, "numpy") else v,
            {
                "eager": eager,
                "graph": graph,
                "again": again,
                "variables": {
                    "mirrored": mirrored.read_value(),
                    "kept": tf.convert_to_tensor(kept),
                    "in loop": in_loop,
                    "only read": only_read,
                    "executed": executed,
                },
                "repeated": repeated(tf.constant(3)),
            },
        )
        return {**found, "refusals": refusals(strategy)}


def refusals(strategy: Any) -> Any:
    """What wrong uses say. They abort the group, so they come last."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    @tf.function  # type: ignore[untyped-decorator]
    def closing_over(x: Any) -> Any:
        y = x + 1.0
        return strategy.broadcast_update(lambda: y * 2.0)

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])  # type: ignore[untyped-decorator]
    def of_any_rank(x: Any) -> Any:
        return strategy.broadcast_update(tf.identity, x)

    def said(call: Any) -> Any:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
            call()
        return type(raised.value).__name__, str(raised.value)

    update, comm = strategy.broadcast_update, strategy.communicator
    return {
        "replica": said(lambda: strategy.run(lambda: update(lambda: 1.0))),
        "collective": said(lambda: update(lambda: all_reduce(tf.ones([2]), "sum", "x", comm))),
        "outer": said(lambda: closing_over(tf.ones([]))),
        "rank": said(lambda: of_any_rank(tf.ones([2]))),
        "ragged": said(lambda: update(lambda: tf.ragged.constant([[1], [2, 3]]))),
        "string": said(lambda: update(lambda: tf.constant("text"))),
    }


def failing() -> Any:
    """What each rank sees when the chief fails while it executes, and when the ranks differ."""
    import tensorflow as tf

    import gradring
    from gradring.tensorflow import CustomCollectiveStrategy

    def attempt(comm: Any, fn: Any, in_graph: bool) -> Any:
        strategy = CustomCollectiveStrategy(communicator=comm)

        def update() -> Any:
            return strategy.broadcast_update(fn, tf.constant(-1.0))

        with pytest.raises(tf.errors.OpError) as raised:
            (tf.function(update) if in_graph else update)()
        comm.close()
        names = [cls.__name__ for cls in type(raised.value).__mro__]
        return names, str(raised.value)

    def wrong(x: Any) -> Any:
        tf.debugging.assert_positive(x, "told by the chief")
        return x

    first = join()
    pair = (lambda x: (x, x)) if first.rank == 0 else (lambda x: {"a": x, "b": x})
    # One group after another: each is of no use after its failure.
    return {
        "eager": attempt(first, wrong, False),
        "structure": attempt(gradring.init(), pair, False),
        # Last, because the others learn of it when the chief's process ends.
        "graph": attempt(gradring.init(), wrong, True),
    }


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(updates, 2)


@pytest.mark.parametrize("mode", ["eager", "graph", "again"])
def test_every_rank_gets_the_chiefs_result(ranks: Ranks, mode: str) -> None:
    for result in ranks:
        found = result[mode]
        assert found["nest"] == {
            "sum": 9.0,
            "parts": ([1, 2], [False, True], None),
            "complex": [1 + 1j, 2 + 2j],
        }
        assert found["dynamic"] == [2.0]
        assert found["nothing"] is None
        assert found["assigned"] == [2.0, 4.0]
        assert found["read after"] == [3.0, 5.0]


def test_variables_that_the_chief_assigned_are_the_same_everywhere(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks):
        assert result["variables"] == {
            "mirrored": [2.0, 4.0],
            "kept": [7.0, 9.0],
            # Three updates of three additions of 1, to the chief's 0.
            "in loop": 9.0,
            "executed": 3,
            # What is only read stays as it is.
            "only read": rank,
        }


def test_an_update_works_inside_a_loop_of_the_graph(ranks: Ranks) -> None:
    # 0, then 0 + 1, then 1 + 3, then 4 + 9.
    assert [result["repeated"] for result in ranks] == [13.0, 13.0]


def test_wrong_uses_say_what_to_do_instead(ranks: Ranks) -> None:
    for result in ranks:
        said = result["refusals"]
        assert "beside strategy.run" in said["replica"][1]
        assert "reduce before it" in said["collective"][1]
        assert "pass that tensor as an argument" in said["outer"][1]
        assert "tf.ensure_shape" in said["rank"][1]
        assert said["ragged"][0] == "TypeError" and "RaggedTensor" in said["ragged"][1]
        assert said["string"][0] == "TypeError" and "no fixed width" in said["string"][1]


@pytest.fixture(scope="module")
def failed() -> Any:
    return run_ranks(failing, 2)


def test_results_of_different_structure_are_a_mismatch(failed: Ranks) -> None:
    for seen in failed:
        names, message = seen["structure"]
        assert "MismatchError" in names and "broadcast_update" in message


def test_a_failing_chief_fails_every_rank(failed: Ranks) -> None:
    chief, other = failed
    for where in ("eager", "graph"):
        assert "InvalidArgumentError" in chief[where][0]
        assert "told by the chief" in chief[where][1]
        names, message = other[where]
        assert "AbortedError" in names
        assert "rank 0 on " in message
    # Executing eagerly, the chief can say why.
    assert "told by the chief" in other["eager"][1]
