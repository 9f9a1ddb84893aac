"""A helper process that kills the orphans of a killed launcher.

The kernel kills the rank processes themselves when the launcher dies (see ``exec_rank``), but not
their children. The guardian keeps the process group of every rank; when its pipe from the launcher
closes, it kills the groups that are still registered.

Run as a script, this module is the helper; it imports nothing of gradring.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Guardian:
    """The launcher's end of the pipe to the helper."""

    def __init__(self) -> None:
        """Starts the helper, in a session of its own so that Ctrl-C does not reach it."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Registers a process group, which the helper kills when this process dies."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Removes a group that has ended: another process can get its number."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the helper, which kills the groups that are still registered."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the kernel still kills the ranks
            os.write(self._process.stdin.fileno(), line.encode())


def main() -> None:
    """Reads registrations until the launcher is gone, then kills the registered groups."""
    # A batch system can send these signals to every process of a job.
    for name in ("INT", "TERM", "HUP", "USR1", "USR2", "TSTP"):
        signum = getattr(signal, f"SIG{name}")
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
