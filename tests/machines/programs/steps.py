"""A rank that reduces until its group fails, and says how it failed and when."""

import json
import os
import sys
import time

import numpy as np

import gradring
from gradring.errors import GradringError

STEPS = 1_000_000


def main() -> None:
    """Prints `going` after some steps, and the error as one line of JSON."""
    last = time.monotonic()
    try:
        with gradring.init(timeout=float(sys.argv[1])) as comm:
            for step in range(STEPS):
                comm.all_reduce(np.ones(1000), name="gradient")
                last = time.monotonic()
                if step == 20:
                    print("going", flush=True)
    except GradringError as error:
        said = {
            "type": type(error).__name__,
            "text": str(error),
            "rank": error.rank,
            "host": error.host,
            "after_s": time.monotonic() - last,
        }
        print("said", json.dumps(said), flush=True)
        sys.exit(f"rank {os.environ['GRADRING_RANK']} has failed")


if __name__ == "__main__":
    main()
