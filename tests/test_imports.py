"""What every program imports with gradring."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import numpy
before = set(sys.modules)
import gradring
gradring.init(rank=0, world_size=1).close()
print(json.dumps(sorted(set(sys.modules) - before)))
"""
#: Each takes milliseconds, in each rank, and most programs do without.
UNNEEDED = {
    "asyncio",
    "concurrent.futures",
    "ctypes",
    "decimal",
    "gradring.elastic",
    "gradring.observe.metrics",
    "gradring.observe.monitor",
    "gradring.records",
    "gradring.testing",
    "gradring.timeline",
    "gradring.updates",
    "hashlib",
    "http",
    "multiprocessing",
    "random",
    "statistics",
    "subprocess",
    "tensorflow",
}


def test_who_joins_a_group_imports_nothing_that_only_others_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=300
    )
    imported = set(json.loads(done.stdout))
    assert "gradring.communicator" in imported
    assert not imported & UNNEEDED
