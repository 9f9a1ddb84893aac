"""An elastic program that tells what it sees; `observed` says how."""

import json
import os

import numpy as np

import gradring.elastic


def take_part(comm: gradring.Communicator, here: str, node: str) -> int:
    """Trains until there is a file ``enough``; returns the last step."""

    def tell(**facts: object) -> None:
        run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        facts.update(pid=os.getpid(), node=node, run=run)
        with open(f"{here}/seen", "a") as seen:
            seen.write(json.dumps(facts) + "\n")

    state = gradring.elastic.State(total=np.zeros(1), step=0)
    state.checkpoint_to(f"{here}/checkpoints")

    @gradring.elastic.run(comm)
    def train(state: gradring.elastic.State) -> None:
        tell(rank=comm.rank, size=comm.world_size, generation=comm.generation, step=state.step)
        enough = np.zeros(1, np.uint8)
        while not enough[0]:
            state.total += comm.all_reduce(np.ones(1), op="mean")
            state.step += 1
            enough[0] = os.path.exists(f"{here}/enough")
            comm.all_reduce(enough, "max")
            state.commit()

    train(state)
    assert state.total[0] == state.step, state.total
    tell(done=int(state.step))
    return int(state.step)


if __name__ == "__main__":
    with gradring.init() as comm:
        take_part(comm, os.path.dirname(__file__), os.environ.get("SLURMD_NODENAME", ""))
