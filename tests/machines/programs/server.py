"""A parameter server on a machine; with `cut`, the power goes while it writes a snapshot."""

import sys
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "updates"))

import parameters

from machines.programs.power import cut_power

SNAPSHOTS = Path("/disk/snapshots")
#: The cut is in the first write after so many snapshots.
WHOLE = 2


def cut_in_a_write() -> None:
    """Cuts the power when an incomplete file is there, beside enough complete ones."""
    while True:
        names = [path.name for path in SNAPSHOTS.glob("snapshot-*")]
        whole = [name for name in names if not name.endswith(".partial")]
        if len(whole) >= WHOLE and len(names) > len(whole):
            size = sum(path.stat().st_size for path in SNAPSHOTS.glob("*.partial"))
            cut_power(f"{size} bytes of a snapshot are written, {len(whole)} are whole")


def main() -> None:
    """Serves one worker at the address that is given."""
    address, how = sys.argv[1:]
    server = parameters.server(
        [address], 0, 1, directory=SNAPSHOTS, staleness=0, snapshot_every=3, worker_timeout=60.0
    )
    if how == "cut":
        threading.Thread(target=cut_in_a_write, daemon=True).start()
    server.serve()
    server.close()


if __name__ == "__main__":
    main()
