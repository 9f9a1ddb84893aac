"""A process that runs programs in turn: alone, or as a rank of a group.

``python worker.py DIRECTORY RESULTS SEED...`` runs `DIRECTORY/SEED.py`, and writes what each finds
to `RESULTS/SEED.RANK.json`. A rank ends at the first program that fails, since others wait for it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def main() -> int:
    directory, results = Path(sys.argv[1]), Path(sys.argv[2])
    rank, size = (os.environ.get(f"GRADRING_{name}") for name in ("RANK", "WORLD_SIZE"))
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for seed in sys.argv[3:]:
        (results / f"{seed}.{rank or 0}.begun").touch()
        found = outcome_of(directory / f"{seed}.py", results / f"{seed}.files")
        written = results / f"{seed}.{rank or 0}.part"
        written.write_text(json.dumps(found))
        written.rename(written.with_suffix(".json"))
        if "error" in found and size is not None:
            os._exit(1)
    return 0


def outcome_of(program: Path, files: Path) -> dict[str, Any]:
    """The numbers that a program finds, or its error."""
    files.mkdir(exist_ok=True)
    sys.argv[1:] = [str(files)]
    # What an earlier program has drawn, or called its layers, is of no concern.
    keras.utils.clear_session()
    random.seed(0), np.random.seed(0), tf.random.set_seed(0)
    try:
        result = runpy.run_path(str(program))["result"]
        return {"result": plain(result)}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[-500:]
        return {
            "error": f"{type(error).__name__}: {text}",
            "place": f"{place.filename}:{place.lineno}",
        }


def plain(value: Any) -> Any:
    """Numbers as JSON has them."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "dtype") and str(value.dtype) == "string":
        return None
    found = np.asarray(value)
    return found.astype(np.float64).tolist() if found.dtype.kind not in "OSU" else None


if __name__ == "__main__":
    sys.exit(main())
