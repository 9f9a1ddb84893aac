"""The first instructions of a rank process, run as a script: ``exec_rank.py LAUNCHER_PID CMD...``.

The script asks the kernel to kill this process when the launcher dies, and then executes the
command. The request survives the exec. Ignored signals would survive too, so the script restores
those that Python ignores. It imports nothing of gradring, to start in milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
#: Exit code of a command that cannot be executed, as in a shell.
CANNOT_START = 127


def main() -> None:
    """Ties this process to its launcher and executes the command in its place."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    die_with(launcher)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}{hint(command[0])}", file=sys.stderr)
        sys.exit(CANNOT_START)


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies; exits if the parent is dead."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(128 + signal.SIGKILL)


def hint(program: str) -> str:
    """Returns the reason why an existing, executable file cannot be executed; empty if unknown."""
    if not (os.path.isfile(program) and os.access(program, os.X_OK)):
        return ""
    return "; its first line must be #! and the path of an interpreter that exists"


if __name__ == "__main__":
    main()
