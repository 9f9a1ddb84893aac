"""The stand-in for ssh that Open MPI runs: ``mpi_host.py ADDRESS=PID,... ADDRESS COMMAND...``.

The command gets the network and the cores of the process PID, which is one of our ranks on that
simulated host, and a host name of its own: Open MPI takes daemons of one name for one and the same.
"""

import os
import sys


def main() -> None:
    """Executes the command in the place of this process."""
    networks, address, *words = sys.argv[1:]
    process = dict(pair.split("=") for pair in networks.split(","))[address]
    os.sched_setaffinity(0, os.sched_getaffinity(int(process)))
    named = f"hostname host-{address.replace('.', '-')} && {' '.join(words)}"
    enter = ["nsenter", f"--net=/proc/{process}/ns/net", "unshare", "--uts"]
    os.execvp(enter[0], [*enter, "sh", "-c", named])


if __name__ == "__main__":
    main()
