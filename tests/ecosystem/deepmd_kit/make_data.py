"""``python make_data.py DIRECTORY`` writes 64 frames of 12 atoms, and an input for `dp train`.

The energy is that of a Lennard-Jones liquid of two kinds of atoms in a cube, so that there is
something to learn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

FRAMES, ATOMS, EDGE, STEPS = 64, 12, 8.0, 200
SEED = 7


def main(directory: Path, steps: int) -> None:
    """Writes ``data`` and ``input.json``."""
    random = np.random.default_rng(0)
    axes = np.arange(3) * EDGE / 3, np.arange(2) * EDGE / 2, np.arange(2) * EDGE / 2
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(ATOMS, 3)
    places = grid + random.normal(scale=0.2, size=(FRAMES, ATOMS, 3))
    between = places[:, :, None] - places[:, None]
    between -= EDGE * np.round(between / EDGE)
    squares = (between**2).sum(-1) + 1e9 * np.eye(ATOMS)
    sixth = (2.2**2 / squares) ** 3
    energy = 0.1 * (sixth**2 - sixth).sum((1, 2))
    slopes = -0.1 * 2 * 6 * (2 * sixth**2 - sixth) / squares
    force = -(slopes[..., None] * between).sum(2)
    data = directory / "data" / "set.000"
    data.mkdir(parents=True)
    np.savetxt(data.parent / "type.raw", [0, 1] * (ATOMS // 2), fmt="%d")
    (data.parent / "type_map.raw").write_text("A\nB\n")
    box = np.tile((EDGE * np.eye(3)).ravel(), (FRAMES, 1))
    arrays = {"coord": places, "box": box, "energy": energy, "force": force}
    for name, array in arrays.items():
        np.save(data / f"{name}.npy", array.reshape(FRAMES, -1))
    (directory / "input.json").write_text(json.dumps(settings(steps), indent=2))


def settings(steps: int) -> object:
    """A small energy model; everything random has a seed."""
    descriptor = {"type": "se_e2_a", "rcut": 4.0, "rcut_smth": 0.5, "sel": [12, 12], "seed": SEED}
    sizes = {"neuron": [8, 16], "axis_neuron": 4, "resnet_dt": False}
    return {
        "model": {
            "type_map": ["A", "B"],
            "descriptor": descriptor | sizes,
            "fitting_net": {"neuron": [16, 16], "resnet_dt": True, "seed": SEED},
        },
        "learning_rate": {"type": "exp", "decay_steps": 50, "start_lr": 0.002, "stop_lr": 1e-5},
        "loss": {"start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 100, "limit_pref_f": 1},
        "training": {
            "training_data": {"systems": ["data"], "batch_size": 4},
            "numb_steps": steps,
            "seed": SEED,
            "disp_file": "lcurve.out",
            "disp_freq": 50,
            "save_freq": 100,
        },
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else STEPS)
