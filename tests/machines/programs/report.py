"""A rank that says what its machine is, and what it got from reductions of all kinds."""

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import gradring
from support import bits


def large_sum(comm: gradring.Communicator) -> str:
    """Digest of a sum of 8 MB, which takes thousands of packets."""
    x = bits.contribution(comm.rank, 2_000_003, "float32").copy()
    return hashlib.sha256(comm.all_reduce(x).tobytes()).hexdigest()


def main() -> None:
    """Prints all as one line of JSON."""
    processor = Path("/proc/cpuinfo").read_text()
    with gradring.init() as comm:
        said = {
            "host": comm.host,
            "kernel": os.uname().release,
            "year": time.gmtime().tm_year,
            "python": sys.version.split()[0],
            "processor": sorted(set(re.findall(r"\b(?:avx2|avx512f|fma)\b", processor))),
            "has a token": "GRADRING_TOKEN" in os.environ,
            "large": large_sum(comm),
        }
        if "grid" in sys.argv:
            said["digests"] = bits.digests(comm)
    print("said", json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
