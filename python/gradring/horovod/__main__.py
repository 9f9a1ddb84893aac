"""``python -m gradring.horovod PROGRAM ...`` runs a program that imports ``horovod``.

PROGRAM is a program as for `gradring run`: a Python script, ``-m`` and a module, or any other
program. The program replaces this process, so that srun and mpirun see it.
"""

from __future__ import annotations

import os
import sys

from gradring.launch.exec_rank import CANNOT_START
from gradring.launch.program import Program
from gradring.machine.streams import print_error
from gradring_start import AS_HOROVOD, advice_to_install

USAGE_ERROR = 2


def main(words: list[str]) -> int:
    """Replaces this process by the program; returns an exit code if it cannot be started."""
    module = words[:1] == ["-m"]
    words = words[module:]
    if not words:
        print_error("usage: python -m gradring.horovod [-m] PROGRAM ...")
        return USAGE_ERROR
    advice = advice_to_install()
    if advice is not None:
        print_error(f"gradring.horovod: {advice}")
        return USAGE_ERROR
    program, path = Program(words, module), os.environ.get("PATH")
    problem = program.problem(path)
    if problem is None:
        command = program.command(path)
        os.environ[AS_HOROVOD] = "1"
        try:
            os.execvp(command[0], command)
        except OSError as error:
            problem = f"cannot start {command[0]!r}: {error.strerror}"
    print_error(f"gradring.horovod: {problem}")
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
