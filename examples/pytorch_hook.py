"""PyTorch's DistributedDataParallel, whose gradients gradring reduces.

    gradring run -np 2 -- python examples/pytorch_hook.py

DDP sends the first weights over a process group of its own; no gradient takes that way.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import distributed, nn
from torch.distributed import GradBucket
from torch.futures import Future

import gradring

waiting = ThreadPoolExecutor(1)  # works end in the order of their launch


def average(comm: gradring.Communicator, bucket: GradBucket) -> Future[torch.Tensor]:
    """A communication hook: averages the bucket in place, while the backward pass goes on."""
    work = comm.all_reduce_async(bucket.buffer(), "mean", name=f"bucket {bucket.index()}")
    reduced = Future()

    def finish() -> None:
        try:
            reduced.set_result(work.wait())
        except gradring.GradringError as error:
            reduced.set_exception(error)

    waiting.submit(finish)
    return reduced


def main() -> None:
    """Trains on this rank's part of the data; all ranks print the same losses and weights."""
    with gradring.init() as comm:
        address = os.environ["GRADRING_RENDEZVOUS"].rpartition(":")[0]
        store = distributed.TCPStore(address, 0, is_master=True) if comm.rank == 0 else None
        port = int(comm.broadcast(torch.tensor(store.port if store else 0)))
        store = store or distributed.TCPStore(address, port)
        distributed.init_process_group("gloo", None, None, comm.world_size, comm.rank, store)
        inputs = torch.rand(64, 8, generator=torch.manual_seed(comm.rank))
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
        ddp.register_comm_hook(comm, average)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(1, 4):
            loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {comm.all_reduce(loss.item(), 'mean'):.4f}", flush=True)
        print("weights", nn.utils.parameters_to_vector(ddp.parameters()).tolist(), flush=True)
        distributed.destroy_process_group()  # its threads must not outlive the interpreter


if __name__ == "__main__":
    main()
