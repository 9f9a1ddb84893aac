"""Horovod's functions on tensors, with two ranks, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.tf_worker import take_one_thread

Found = dict[Any, Any]

DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8", "int8")
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "Sum": lambda a, b: a + b,
    "Average": lambda a, b: (a + b) / 2,
    "Min": np.minimum,
    "Max": np.maximum,
    "Product": lambda a, b: a * b,
}
#: What programs of Horovod call; test_collectives.py has the core's other reductions.
QUICK = ("Sum", "Average")
#: Whole numbers, whose means are whole, too.
OWN = [np.array([[1, 2, 3], [4, 5, 6]]), np.array([[3, 2, 1], [2, 1, 10]])]


def call_all(ops: list[str]) -> Found:
    import gradring.horovod.tensorflow as hvd

    take_one_thread()
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) before"):
        hvd.rank()
    hvd.init()
    hvd.init()
    found = {"place": place(hvd), **reductions(hvd, ops), **rows(hvd), **gradients(hvd)}
    found |= {**refused(hvd), **joins(hvd), **objects(hvd), **other_order(hvd)}
    hvd.shutdown()
    found["initialized"] = hvd.is_initialized()
    return found


def place(hvd: Any) -> Any:
    numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    numbers += [hvd.cross_rank(), hvd.cross_size(), int(hvd.rank_op()), int(hvd.size_op())]
    built = [hvd.mpi_built(), hvd.gloo_enabled(), hvd.nccl_built(), hvd.mpi_threads_supported()]
    return numbers, built, hvd.is_homogeneous(), hvd.is_initialized()


def reductions(hvd: Any, ops: list[str]) -> Found:
    import tensorflow as tf

    found: Found = {}
    own = OWN[hvd.rank()]
    for op in ops:

        def reduce(dtype: str, op: str = op) -> Any:
            return hvd.allreduce(tf.constant(own, dtype), op=getattr(hvd, op), name=op)

        for dtype in DTYPES:
            found[op, dtype, "eager"] = reduce(dtype).numpy()
            found[op, dtype, "graph"] = tf.function(reduce)(dtype).numpy()
    scaled = {"prescale_factor": 0.5, "postscale_factor": 3.0, "op": hvd.Sum}
    for dtype in ("float16", "int32"):
        found["scaled", dtype] = hvd.allreduce(tf.constant(own, dtype), **scaled).numpy()
    x = tf.constant(own, "float32")
    found["default"] = hvd.allreduce(x).numpy()
    found["old"] = hvd.allreduce(x, average=False).numpy()
    compressed = hvd.allreduce(x / 3, compression=hvd.Compression.fp16, op=hvd.Sum)
    found["fp16"] = compressed.numpy(), compressed.dtype.name
    slices = tf.IndexedSlices(x, tf.constant([hvd.rank(), 5]), tf.constant([6, 3]))
    group = hvd.grouped_allreduce([x, slices, tf.constant(hvd.rank())], op=hvd.Sum)
    found["group"] = [group[0].numpy(), tf.convert_to_tensor(group[1]).numpy(), int(group[2])]
    found["mean of rows"] = tf.convert_to_tensor(hvd.allreduce(slices)).numpy()
    variables = [tf.Variable([hvd.rank(), 7]), tf.Variable(hvd.rank() == 1)]
    values = hvd.broadcast_(variables, 1)
    hvd.broadcast_variables([same := tf.Variable(float(hvd.rank()))], root_rank=1)
    found["broadcast"] = [each.numpy().tolist() for each in (*variables, *values, same)]
    found["broadcast tensor"] = hvd.broadcast(x, root_rank=1).numpy()
    hvd.barrier()
    return found


def rows(hvd: Any) -> Found:
    """What has as many rows as a rank likes."""
    import tensorflow as tf

    rank = hvd.rank()
    mine = tf.fill([2 - rank, 2], rank)
    found: Found = {"allgather": hvd.allgather(mine).numpy()}
    found["allgathers"] = [each.numpy() for each in hvd.grouped_allgather([mine, mine[:1] > 0])]
    parts = tf.cast(tf.range(5) + 10 * rank, tf.uint16)
    splits = [[3, 2], [0, 5]][rank]
    for how, alltoall in (("eager", hvd.alltoall), ("graph", tf.function(hvd.alltoall))):
        received, counts = alltoall(parts, splits)
        found["alltoall", how] = received.numpy().tolist(), counts.numpy().tolist()
    before = sent_bytes()
    hvd.alltoall(parts, splits)
    found["alltoall bytes"] = sent_bytes() - before
    found["nothing"] = hvd.alltoall(tf.zeros([0, 3])).shape.as_list()
    found["equal"] = hvd.alltoall(tf.range(2 + 2 * rank)).numpy().tolist()
    with pytest.raises(tf.errors.InvalidArgumentError, match="no 2 equal parts"):
        hvd.alltoall(tf.range(3))
    with pytest.raises(tf.errors.InvalidArgumentError, match="do not add up"):
        hvd.alltoall(tf.range(3), [1, 1])
    for alltoall in (hvd.alltoall, tf.function(hvd.alltoall)):
        with pytest.raises(ValueError, match=r"splits=\[3, -1\] would give"):
            alltoall(tf.range(2), [3, -1])
        with pytest.raises(TypeError, match="splits are of float32"):
            alltoall(tf.range(3), [1.5, 1.5])
    given = tf.function(hvd.alltoall, reduce_retracing=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a split is negative"):
        given(tf.range(2), tf.constant([3, -1]))
    tensor = tf.reshape(tf.range(10.0), [5, 2]) * (rank + 1)
    found["reducescatter"] = hvd.reducescatter(tensor, op=hvd.Sum).numpy()
    found["mean"] = [each.numpy() for each in hvd.grouped_reducescatter([tensor, tensor[:1]])]
    for function in (hvd.reducescatter, hvd.allgather, hvd.alltoall):
        with pytest.raises(ValueError, match="a scalar has no"):
            function(1.0)
    return found


def sent_bytes() -> int:
    """Of payload in all-to-alls so far."""
    from gradring.horovod import basics

    return basics.communicator().stats()["collectives"]["all_to_all"]["bytes_sent"]


def gradients(hvd: Any) -> Found:
    """Of what each function makes of this rank's tensor, weighted by 1, 2, 3 and so on."""
    import tensorflow as tf

    programs: dict[str, Callable[[Any], Any]] = {
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
        "average": hvd.allreduce,
        "allgather": lambda x: hvd.allgather(x[: 2 - hvd.rank()]),
        "broadcast": lambda x: hvd.broadcast(x, 1),
        "alltoall": lambda x: hvd.alltoall(x, [1, 1])[0],
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
        "mean of parts": hvd.reducescatter,
    }

    def gradient(name: str) -> Any:
        x = tf.constant([1.0, 5.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = programs[name](x)
            loss = tf.reduce_sum(y * tf.range(1.0, 1.0 + tf.cast(tf.size(y), tf.float32)))
        return tape.gradient(loss, x)

    return {
        ("gradient", name, how): call(name).numpy().tolist()
        for name in programs
        for how, call in (("eager", gradient), ("graph", tf.function(gradient)))
    }


def refused(hvd: Any) -> Found:
    """What differs, or does not exist; the group goes on."""
    import tensorflow as tf

    import gradring
    from gradring.horovod.basics import communicator

    rank, host = hvd.rank(), communicator().hosts[1]
    places = tf.constant([0], tf.int64 if rank else tf.int32)
    variables = [tf.Variable(1.0), tf.Variable(2.0)]

    def of_one_variable() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = 2.0 * variables[rank]
        tape.gradient(loss, variables)

    calls: dict[str, Callable[[], Any]] = {
        "gradients": of_one_variable,
        "places": lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), places, [3, 2])),
        "shape": lambda: hvd.allreduce(tf.ones([17 + rank])),
        "dtype": lambda: hvd.allgather(tf.ones([2], tf.int32 if rank else tf.float32)),
        "root": lambda: hvd.broadcast(tf.ones([2]), rank),
        "order": lambda: hvd.allreduce(tf.ones([2]), name=["first", "second"][rank]),
        "kind": lambda: [hvd.barrier, lambda: hvd.allreduce(1.0)][rank](),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(gradring.errors.MismatchError) as caught:
            call()
        assert isinstance(caught.value, tf.errors.FailedPreconditionError)
        assert (caught.value.rank, caught.value.host) == (1, host)
        said[name] = str(caught.value)
        assert float(hvd.allreduce(2.0, op=hvd.Sum)) == 4.0
    for unknown in (hvd.Adasum, hvd.Min):
        with pytest.raises(NotImplementedError, match="; use"):
            hvd.reducescatter(tf.ones([2]), op=unknown)
    sgd = tf.keras.optimizers.SGD()
    for no_way in (hvd.Compression, None, "fp16"):
        for call in (hvd.allreduce, hvd.reducescatter, hvd.DistributedGradientTape):
            with pytest.raises(TypeError, match=r"cannot compress; pass hvd\.Compression\.none"):
                call(tf.ones([2]), compression=no_way)
        with pytest.raises(TypeError, match="cannot compress"):
            hvd.DistributedOptimizer(sgd, compression=no_way)
    with pytest.raises(ValueError, match=r"SGD\.apply_gradients: there are no gradients"):
        hvd.DistributedOptimizer(sgd).apply_gradients([])
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(1.0, op=hvd.Adasum)
    for once in (hvd.join, hvd.barrier, lambda: hvd.allgather_object(1)):
        with pytest.raises(RuntimeError, match="would happen once"):
            tf.function(once, autograph=False)()
    with pytest.raises(TypeError, match="is no reduction; pass one such"):
        hvd.allreduce(1.0, op="sum")
    with pytest.raises(ValueError, match="both given"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    return {"said": said}


def joins(hvd: Any) -> Found:
    """Rank 0 has no more data, and rank 1 goes on."""
    import tensorflow as tf

    import gradring

    found: Found = {}
    if hvd.rank() == 1:
        tensors = [tf.ones([2, 3]), tf.constant([4])]
        sums = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        found["with zeros"] = [each.numpy().tolist() for each in sums]
        found["mean with zeros"] = float(hvd.allreduce(8.0))
        with pytest.raises(gradring.errors.MismatchError, match=r"rank 0 .* has called join\(\)"):
            hvd.broadcast(tf.ones([2]), 0)
        weight = tf.Variable([1.0])
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = weight * 6.0
        found["gradient with zeros"] = tape.gradient(loss, [weight])[0].numpy().tolist()
    found["joined"] = int(hvd.join()), int(hvd.join())
    return found


def objects(hvd: Any) -> Found:
    from gradring.config.values import DEFAULTS
    from gradring.errors import ConfigError
    from gradring.horovod.basics import communicator

    own = {"rank": hvd.rank(), 0: [1, (2, 3)]}
    group = communicator()
    hosts, config = group.hosts, group._config
    group.hosts, group._config = ["one", "two"], DEFAULTS.for_core()
    for call in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises(ConfigError, match="set GRADRING_TOKEN"):
            call(own)
    group.hosts, group._config = hosts, config
    return {
        "broadcast object": hvd.broadcast_object(own, root_rank=1),
        "objects": hvd.allgather_object("x" * hvd.rank()),
    }


def other_order(hvd: Any) -> Found:
    """Inside a graph the core compares, and the group ends."""
    import tensorflow as tf

    import gradring

    def reduce_both() -> Any:
        names = ["first", "second"] if hvd.rank() == 0 else ["second", "first"]
        return [hvd.allreduce(tf.ones([2]), name=name) for name in names]

    with pytest.raises(gradring.errors.MismatchError) as caught:
        tf.function(reduce_both)()
    return {"order in a graph": str(caught.value)}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[Found]:
    return run_ranks(call_all, 2, chosen(request, "op"))


def test_processes_know_their_places(ranks: list[Found]) -> None:
    for rank, found in enumerate(ranks):
        assert found["place"] == (
            [rank, 2, rank, 2, 0, 1, rank, 2],
            [False, True, 0, False],
            True,
            True,
        )
        assert found["initialized"] is False


@pytest.mark.parametrize("op", marked(OPS, QUICK))
def test_reductions_are_numpys_eagerly_and_in_graphs(ranks: list[Found], op: str) -> None:
    expected = OPS[op](*OWN)
    for found in ranks:
        for dtype in DTYPES:
            for how in ("eager", "graph"):
                result = found[op, dtype, how]
                assert result.dtype == dtype
                np.testing.assert_array_equal(result, expected.astype(dtype))


def test_factors_scale_before_and_after(ranks: list[Found]) -> None:
    halves = [(own * 0.5).astype("int32") for own in OWN]
    for found in ranks:
        np.testing.assert_array_equal(found["scaled", "int32"], sum(halves) * 3)
        np.testing.assert_array_equal(found["scaled", "float16"], sum(OWN) * 1.5)


def test_the_older_argument_compression_and_groups(ranks: list[Found]) -> None:
    total = sum(OWN)
    halves = [(own.astype("float32") / 3).astype("float16") for own in OWN]
    dense = np.zeros((6, 3))
    for rank, own in enumerate(OWN):
        dense[rank] += own[0]
        dense[5] += own[1]
    for found in ranks:
        np.testing.assert_array_equal(found["default"], total / 2)
        np.testing.assert_array_equal(found["old"], total)
        np.testing.assert_array_equal(found["fp16"][0], sum(halves))
        assert found["fp16"][1] == "float32"
        np.testing.assert_array_equal(found["group"][0], total)
        np.testing.assert_array_equal(found["group"][1], dense)
        assert found["group"][2] == 1
        np.testing.assert_array_equal(found["mean of rows"], dense / 2)


def test_the_roots_values_win(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["broadcast"] == [[1, 7], True, [1, 7], True, 1.0]
        np.testing.assert_array_equal(found["broadcast tensor"], OWN[1])


def test_rows_of_different_numbers_travel(ranks: list[Found]) -> None:
    received = [[0, 1, 2], [3, 4, 10, 11, 12, 13, 14]]
    counts = [[3, 0], [2, 5]]
    parts = [np.arange(10.0).reshape(5, 2)[:3] * 3, np.arange(10.0).reshape(5, 2)[3:] * 3]
    for rank, found in enumerate(ranks):
        assert found["allgather"].tolist() == [[0, 0], [0, 0], [1, 1]]
        assert found["allgathers"][1].tolist() == [[False, False], [True, True]]
        for how in ("eager", "graph"):
            assert found["alltoall", how] == (received[rank], counts[rank])
        # Two bytes for each number that is for the other rank, and eight to tell how many.
        assert found["alltoall bytes"] == [2 * 2 + 8, 0 + 8][rank]
        assert found["nothing"] == [0, 3]
        assert found["equal"] == [[0, 0, 1], [1, 2, 3]][rank]
        np.testing.assert_array_equal(found["reducescatter"], parts[rank])
        np.testing.assert_array_equal(found["mean"][0], parts[rank] / 2)
        assert found["mean"][1].tolist() == [[[0.0, 1.5]], []][rank]


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_gradients_are_those_of_horovod(ranks: list[Found], how: str) -> None:
    """It averages what comes back, where not each rank gets something else."""
    expected = {
        "sum": [[1.0, 2.0]] * 2,
        "average": [[1.0, 2.0]] * 2,
        "allgather": [[1.0, 2.0], [3.0, 0.0]],
        "broadcast": [[0.0, 0.0], [1.0, 2.0]],
        "alltoall": [[1.0, 1.0], [2.0, 2.0]],
        "reducescatter": [[2.0, 2.0]] * 2,
        "mean of parts": [[1.0, 1.0]] * 2,
    }
    for rank, found in enumerate(ranks):
        for name, each in expected.items():
            assert found["gradient", name, how] == each[rank], name


def test_a_difference_is_told_to_all_and_the_group_goes_on(ranks: list[Found]) -> None:
    one, other = (found["said"] for found in ranks)
    assert one == other
    assert "calls allreduce (mean) 'allreduce' float32[17]" in one["shape"]
    assert "calls allreduce (mean) 'allreduce' float32[18]" in one["shape"]
    assert "float32[any]" in one["dtype"] and "int32[any]" in one["dtype"]
    assert "(root 0)" in one["root"] and "(root 1)" in one["root"]
    assert "'gradients without 1'" in one["gradients"]
    assert "'gradients without 0'" in one["gradients"]
    assert "int32[any], and" in one["places"] and "int64[any];" in one["places"]
    assert "'first'" in one["order"] and "'second'" in one["order"]
    assert "calls barrier" in one["kind"] and "calls allreduce" in one["kind"]


def test_a_rank_that_has_joined_contributes_zeros(ranks: list[Found]) -> None:
    assert ranks[1]["with zeros"] == [[[1.0] * 3] * 2, [4]]
    assert ranks[1]["mean with zeros"] == 4.0
    assert ranks[1]["gradient with zeros"] == [3.0]
    # In the second round both come at once.
    assert [found["joined"] for found in ranks] == [(1, 1)] * 2


def test_objects_travel(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["broadcast object"] == {"rank": 1, 0: [1, (2, 3)]}
        assert found["objects"] == ["", "x"]


def test_another_order_inside_a_graph_is_an_error_that_names_both(ranks: list[Found]) -> None:
    for found in ranks:
        assert "'first'" in found["order in a graph"]
        assert "'second'" in found["order in a graph"]
