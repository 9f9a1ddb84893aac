"""Functions that the tests of ``run_ranks`` and of the launcher start as ranks."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gradring.errors import PeerLostError

LONG_S = 300


@dataclass
class Point:
    x: int
    y: int


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def my_rank() -> int:
    return int(os.environ["GRADRING_RANK"])


def place_and_arguments(*arguments: object) -> tuple[int, int, str, tuple[object, ...]]:
    world_size = int(os.environ["GRADRING_WORLD_SIZE"])
    return my_rank(), world_size, os.environ["GRADRING_RENDEZVOUS"], arguments


def moved(point: Point) -> Point:
    return Point(point.x + my_rank(), point.y)


def environment() -> dict[str, str]:
    return dict(os.environ)


def rank_1_raises() -> int:
    print(f"hello from rank {my_rank()}")
    if my_rank() == 1:
        raise KeyError("no such layer")
    return my_rank()


def rank_1_raises_what_cannot_be_pickled() -> None:
    if my_rank() == 1:
        raise Unpicklable(3, 4)


def rank_1_returns_what_cannot_be_pickled() -> object:
    return (lambda: None) if my_rank() == 1 else None


def rank_1_is_killed_and_the_others_blame_it(directory: str) -> None:
    gone = Path(directory) / "gone"
    if my_rank() == 1:
        gone.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not gone.exists():
        time.sleep(0.01)
    raise PeerLostError("rank 1 has gone", rank=1, host="here", elapsed_s=0.5)


def rank_1_leaves(exit_code: int) -> int:
    if my_rank() == 1:
        os._exit(exit_code)
    return my_rank()


def rank_1_calls_exit(exit_code: int) -> int:
    if my_rank() == 1:
        sys.exit(exit_code)
    return my_rank()


def rank_0_sleeps_with_a_child(directory: str) -> None:
    if my_rank() == 0:
        note_pids(directory)
        time.sleep(LONG_S)


def all_sleep_with_a_child(directory: str) -> None:
    note_pids(directory)
    time.sleep(LONG_S)


def note_pids(directory: str) -> None:
    """Starts a child that ignores SIGTERM, and writes both process ids to a file."""
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = subprocess.Popen([sys.executable, "-c", f"{ignore}; time.sleep({LONG_S})"])
    unfinished = Path(directory) / f"unfinished-{my_rank()}"
    unfinished.write_text(f"{os.getpid()} {child.pid}")
    unfinished.rename(Path(directory) / f"pids-{my_rank()}")
