"""The worker of a parameter server that loses its power; it checks every weight that it gets."""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "updates"))

import parameters

ELEMENTS = 1_000_000
#: Steps after the server has come back.
STEPS_AFTER = 10


def main() -> None:
    """Prints the versions at which the server came back, and the weights that were wrong."""
    client = parameters.client([sys.argv[1]], 0, elements=ELEMENTS, timeout=600)
    weights = np.zeros(ELEMENTS, np.float32)
    before, back, wrong, steps = 0, 0, [], 0
    while steps < STEPS_AFTER:
        version = parameters.pulled(client, weights)
        # Each version is one gradient of 1 at both ends of the vector, and 0 between.
        expected = parameters.INITIAL - (version - 1)
        if {float(weights[0]), float(weights[-1])} != {expected} or np.ptp(weights[1:-1]):
            wrong.append([version, float(weights[0]), float(weights[-1])])
        if version <= before:
            back = before - version + 1
        steps += back > 0
        before = version
        client.push([parameters.gradient(0, ELEMENTS)], 1.0)
    client.leave()
    print("said", json.dumps({"back": back, "last": before, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
