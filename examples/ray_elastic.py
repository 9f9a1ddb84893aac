"""An elastic job of Ray's actors: `python ray_elastic.py`, on a cluster of Ray with three CPUs.

Ray starts an actor that has died again, on any node, and calls its method again. One more actor
tells the workers each other's addresses.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import gradring.elastic
import gradring.ray


def train(comm: gradring.Communicator) -> float:
    """The training: weights that approach 1."""
    state = gradring.elastic.State(weights=np.zeros(1000), step=0)

    @gradring.elastic.run(comm)
    def steps(state: gradring.elastic.State) -> None:
        while state.step < 100:
            state.weights -= 0.1 * comm.all_reduce(state.weights - 1.0, op="mean")
            state.step += 1
            state.commit()

    steps(state)
    return float(state.weights[0])


@ray.remote
class Places:
    """Where each worker listens."""

    def __init__(self) -> None:
        self.places: dict[int, str] = {}

    def tell(self, index: int, address: str) -> dict[int, str]:
        """Notes where a worker listens; returns what is known of all."""
        self.places[index] = address
        return self.places


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=1, scheduling_strategy="SPREAD")
class Worker:
    """One rank; Ray starts it again, on any node, and calls `run` again."""

    def run(
        self, train: Callable[..., Any], index: int, count: int, places: Any, token: str
    ) -> Any:
        """Joins the job, or is in its first group, and trains."""
        own = gradring.ray.own_address()
        known: dict[int, str] = {}
        while len(known) < count:
            known = ray.get(places.tell.remote(index, own))
            time.sleep(0.1)
        with gradring.init(
            rank=index,
            world_size=count,
            rendezvous=known[0],
            listen=own,
            join=["auto", *known.values()],
            token=token,
            job_id=token[:8],
        ) as comm:
            return train(comm)


def run_elastic(train: Callable[..., Any], count: int) -> Any:
    """Runs `train` on so many workers; returns what the first one returns that ends."""
    # Where this program is, which no job outlives.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    places = Places.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    token = secrets.token_hex(32)
    workers = [Worker.remote() for _ in range(count)]  # type: ignore[attr-defined]
    work = [
        worker.run.remote(train, index, count, places, token)
        for index, worker in enumerate(workers)
    ]
    return ray.get(ray.wait(work)[0][0])


if __name__ == "__main__":
    print(run_elastic(train, 3))
