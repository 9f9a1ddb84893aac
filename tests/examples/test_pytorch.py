"""The example with PyTorch's DistributedDataParallel, and PyTorch's tensors in collectives."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from test_examples import EXAMPLES, numbers, run_two

import gradring
from gradring.testing import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="needs torch, gigabytes that only this needs; `make bench-peers` installs it",
)


def test_the_hook_trains_as_ddp_without_it(tmp_path: Path) -> None:
    text = (EXAMPLES / "pytorch_hook.py").read_text()
    assert len(text.splitlines()) < 60
    without = tmp_path / "without_hook.py"
    the_line = "        ddp.register_comm_hook(comm, average)\n"
    assert text.count(the_line) == 1
    without.write_text(text.replace(the_line, ""))
    *steps, weights = run_two(EXAMPLES / "pytorch_hook.py")
    losses = [numbers(step)[0] for step in steps]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 10
    # The mean of two numbers is the same bits, however it is computed.
    assert run_two(without) == [*steps, weights]


def _reduced() -> list[list[float]]:
    import torch

    with gradring.init() as comm:
        wide = torch.full((2, 3), comm.rank + 1.0)
        assert comm.all_reduce(wide) is wide
        narrow = torch.full((5,), 1.5 + comm.rank, dtype=torch.bfloat16)
        comm.all_reduce_async([narrow, torch.zeros(0, dtype=torch.bfloat16)], "mean").wait()
        scalar = comm.broadcast(torch.tensor(comm.rank), root=1)
        gathered = comm.all_gather(torch.full((1,), comm.rank))
        joined = comm.all_gather(torch.full((1,), comm.rank + 0.5, dtype=torch.bfloat16))
        own = comm.reduce_scatter(torch.full((2,), 1.5, dtype=torch.bfloat16))
        return [x.ravel().tolist() for x in (wide, narrow, scalar, gathered, joined, own)]


def test_tensors_are_reduced_in_place() -> None:
    for found in run_ranks(_reduced, 2):
        assert found == [[3.0] * 6, [2.0] * 5, [1], [0, 1], [0.5, 1.5], [3.0]]


def test_what_cannot_be_reduced_is_refused() -> None:
    import torch

    with gradring.Communicator(rank=0, world_size=1) as comm:
        for tensor, error, says in (
            (torch.ones(3, requires_grad=True), ValueError, "does not lend its memory"),
            (torch.ones(4, 4).T[:2], ValueError, "not C-contiguous"),
            (torch.ones(3, dtype=torch.int16), TypeError, "arrays of int16"),
            (torch.ones(3, dtype=torch.complex64).conj().imag, TypeError, r"call resolve_neg\(\)"),
            (torch.ones(3, dtype=torch.complex64).conj(), TypeError, r"call resolve_conj\(\)"),
            ([torch.ones(3), np.ones(3)], TypeError, "same dtype"),
        ):
            with pytest.raises(error, match=says):
                comm.all_reduce(tensor)
