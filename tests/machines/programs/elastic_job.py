"""A process of an elastic training on machines, one of which loses its power as the others regroup.

The rank with `dies` ends at step 10. Then the machine with `goes dark` has just told the others
that it leaves the old group when its power is cut.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import gradring
import gradring.elastic
from gradring.elastic.job import _Job

sys.path.append(str(Path(__file__).parents[2]))

from machines.programs.power import cut_power

STEPS, LOSS_AT = 40, 10
DIES, GOES_DARK = int(sys.argv[1]), int(sys.argv[2])


def main() -> None:
    """Trains; the survivors print their last weights."""
    job: Any = _Job
    first_rank = int(os.environ["GRADRING_RANK"])
    is_first_life = os.environ.get("GRADRING_RESTART", "0") == "0"
    if first_rank == GOES_DARK:
        job.left = lambda _: cut_power("it regroups")
    with gradring.init() as comm:
        state = gradring.elastic.State(weights=np.zeros(1000), step=0)

        @gradring.elastic.run(comm, min_workers=2)
        def train(state: gradring.elastic.State) -> None:
            while state.step < STEPS:
                if state.step == LOSS_AT and first_rank == DIES and is_first_life:
                    os.kill(os.getpid(), signal.SIGKILL)
                state.weights += comm.all_reduce(np.full(1000, 2.0), op="mean")
                state.step += 1
                state.commit()

        train(state)
        print("ended", comm.world_size, comm.generation, set(state.weights), flush=True)


if __name__ == "__main__":
    main()
