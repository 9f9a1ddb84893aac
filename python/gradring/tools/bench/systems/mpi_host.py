"""The replacement of ssh for Open MPI: ``mpi_host.py ADDRESS=PID,... ADDRESS COMMAND...``.

The command gets the network and the cores of the process PID, one of our ranks on that simulated
host. It also gets a host name of its own, because Open MPI identifies its daemons by the name.
"""

import os
import sys


def main() -> None:
    """Replaces this process by the command."""
    networks, address, *words = sys.argv[1:]
    process = dict(pair.split("=") for pair in networks.split(","))[address]
    os.sched_setaffinity(0, os.sched_getaffinity(int(process)))
    named = f"hostname host-{address.replace('.', '-')} && {' '.join(words)}"
    enter = ["nsenter", f"--net=/proc/{process}/ns/net", "unshare", "--uts"]
    os.execvp(enter[0], [*enter, "sh", "-c", named])


if __name__ == "__main__":
    main()
