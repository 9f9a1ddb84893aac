"""The first instructions of a rank process, run as a script: ``exec_rank.py LAUNCHER_PID CMD...``.

It asks the kernel to kill this process when the launcher dies, and becomes the command. The request
survives the exec, and so would signals that are ignored: those that Python ignores for itself are
given back. It imports nothing of gradring: it has to start in milliseconds.
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
    """Asks the kernel to kill this process when its parent dies, and ends it if that is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was made
        os._exit(128 + signal.SIGKILL)


def hint(program: str) -> str:
    """What is wrong with a program that is there and executable, and still cannot be executed."""
    if not (os.path.isfile(program) and os.access(program, os.X_OK)):
        return ""
    return "; its first line must be #! and the path of an interpreter that exists"


if __name__ == "__main__":
    main()
