"""A rank of a job whose rank 0 keeps commits in the directory that is given."""

import json
import sys

import numpy as np

import gradring
from gradring.elastic import State
from gradring.errors import GradringError


def main() -> None:
    """Prints the error that ends the training."""
    with gradring.init() as comm:
        state = State(weights=np.zeros(1_000_000), step=0)

        @gradring.elastic.run(comm)
        def train(state: State) -> None:
            while True:
                state.weights += comm.all_reduce(np.ones(1_000_000), op="mean")
                state.step += 1
                state.commit()

        state.checkpoint_to(sys.argv[1], max_failures=2)
        try:
            train(state)
        except GradringError as error:
            said = {"type": type(error).__name__, "text": str(error), "rank": error.rank}
            print("said", json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
