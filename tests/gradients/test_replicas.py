"""The comparison of replicas, over real ranks."""

from typing import Any

import numpy as np

import gradring
from gradring.errors import MismatchError
from gradring.gradients.replicas import check_equal
from gradring.testing import run_ranks

WEIGHTS = {"kernel": (3, 4), "empty": (0, 4), "bias": (4,), "scalar": (), "flags": (2,)}


def compared() -> Any:
    """What each comparison says on this rank, by what was done to the weights before."""
    found: dict[str, Any] = {}
    with gradring.init() as comm:

        def compare(key: str, arrays: dict[str, Any]) -> None:
            try:
                check_equal(comm, arrays, "weights")
            except MismatchError as error:
                found[key] = (error.rank, error.host, str(error))
            else:
                found[key] = None

        weights: dict[str, Any] = {
            name: np.full(shape, 0.5, np.float32) for name, shape in WEIGHTS.items()
        }
        weights["flags"] = np.array([True, False])
        compare("equal", weights)
        compare("transposed", {**weights, "kernel": weights["kernel"].T[:, ::-1]})
        one_bit = weights["bias"].copy()
        if comm.rank == 2:
            one_bit.view(np.int32)[3] ^= 1
        compare("one bit of one rank", {**weights, "bias": one_bit})
        minus_zero = np.float32(-0.0 if comm.rank == 0 else 0.0)
        compare("rank 0 alone", {**weights, "bias": one_bit, "scalar": minus_zero})
        compare("two against one", {"x": np.array([comm.rank == 0])})
        compare("nothing", {})
        found["still usable"] = float(comm.all_reduce(np.ones(1))[0])
    return found


def test_a_difference_of_one_bit_is_told_to_every_rank_with_the_rank_and_the_array() -> None:
    ranks = run_ranks(compared, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    found = ranks[0]
    assert found["equal"] is found["transposed"] is found["nothing"] is None
    rank, host, text = found["one bit of one rank"]
    assert rank == 2
    assert host
    assert "'bias' is the first of 1 that do, of 5; rank 2 on" in text
    rank, _, text = found["rank 0 alone"]
    # The first array that differs decides.
    assert rank == 2
    assert "'bias' is the first of 2" in text
    rank, _, text = found["two against one"]
    assert rank == 0
    assert "than rank 1 on" in text
    assert found["still usable"] == 3.0
