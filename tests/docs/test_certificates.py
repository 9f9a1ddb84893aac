"""The certificates that docs/clusters.md makes for two machines let two ranks meet."""

import os
import subprocess
import sys
from pathlib import Path

from gradring.clusters import without_cluster_variables
from gradring.machine.ports import free_ports
from support.documents import blocks, programs

ADDRESSES = {"node-a": "127.0.0.2", "node-b": "127.0.0.3"}
DEADLINE_S = 120


def test_the_certificates_of_the_document_let_two_hosts_meet(tmp_path: Path) -> None:
    (script,) = (block.text for block in blocks() if "openssl req" in block.text)
    script = script.replace("10.0.0.5", ADDRESSES["node-a"]).replace("10.0.0.6", "127.0.0.3")
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True, capture_output=True)
    tmp_path.joinpath("sum.py").write_text(programs()["sum.py"])
    rendezvous = f"{ADDRESSES['node-a']}:{free_ports(1)[0]}"
    ranks = []
    for rank, (name, address) in enumerate(ADDRESSES.items()):
        environ = {
            **without_cluster_variables(os.environ),
            "GRADRING_RANK": str(rank),
            "GRADRING_WORLD_SIZE": "2",
            "GRADRING_RENDEZVOUS": rendezvous,
            "GRADRING_TOKEN": "certificates-are-not-enough",
            "GRADRING_TRANSPORT": "tcp",
            "GRADRING_INTERFACE": address,
            "GRADRING_TLS_CA": str(tmp_path / name / "ca.pem"),
            "GRADRING_TLS_CERT": str(tmp_path / name / "rank.pem"),
            "GRADRING_TLS_KEY": str(tmp_path / name / "rank.key"),
        }
        command = [sys.executable, "sum.py"]
        ranks.append(
            subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=DEADLINE_S)[0].splitlines()[:1] for process in ranks]
    assert said == [["0 2 0.5"], ["1 2 0.5"]]
