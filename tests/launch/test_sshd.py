"""``gradring run`` through a real ssh server, at a port and with a key of its own."""

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import ssh_stand_in
from launching import gradring, script

from gradring.machine.ports import free_ports
from support.waiting import wait_until

SERVER = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
HOST = "127.0.0.2"

pytestmark = [
    pytest.mark.skipif(
        SERVER is None or shutil.which("ssh") is None,
        reason="needs ssh and sshd (apt-get install openssh-client openssh-server)",
    ),
    pytest.mark.skipif(
        os.geteuid() == 0 and not Path("/run/sshd").is_dir(),
        reason="sshd of root needs a directory: mkdir /run/sshd",
    ),
    ssh_stand_in.needs_addresses,
]


def answers(port: int) -> bool:
    try:
        socket.create_connection((HOST, port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Where a server lets in who has `my key`."""
    for name in ("host key", "my key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    (number,) = free_ports(1, HOST)
    (tmp_path / "sshd_config").write_text(
        f'HostKey "{tmp_path / "host key"}"\n'
        f'AuthorizedKeysFile "{tmp_path / "my key.pub"}"\n'
        f"ListenAddress {HOST}:{number}\n"
        "StrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nPidFile none\n"
    )
    assert SERVER is not None
    command = [SERVER, "-D", "-e", "-f", str(tmp_path / "sshd_config")]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(command, stderr=log)
    try:
        wait_until(lambda: server.poll() is not None or answers(number), "sshd answers")
        yield number
    finally:
        server.terminate()
        server.wait()


def test_ranks_start_through_a_server_at_a_port_with_a_key(tmp_path: Path, port: int) -> None:
    script(
        tmp_path,
        "import gradring\n"
        "with gradring.init() as comm:\n"
        "    print(os.environ['SSH_CONNECTION'].split()[2:], comm.all_reduce(1.0), sys.argv[1:])\n",
    )
    (tmp_path / "hosts").write_text(f"{HOST} slots=2 username={getpass.getuser()}\n")
    options = ["--hostfile", tmp_path / "hosts", "--ssh-port", port]
    options += ["--ssh-option", "StrictHostKeyChecking=no"]
    options += ["--ssh-option", f'UserKnownHostsFile="{tmp_path / "known"}"']
    program = [tmp_path / "train.py", "a b", "$HOME"]
    done = gradring("run", *options, "--ssh-identity-file", tmp_path / "my key", *program)
    said = f"['{HOST}', '{port}'] 2.0 ['a b', '$HOME']"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {said}" for rank in (0, 1)], done.stderr
    # Without the key: what ssh says, and what to type to see it.
    done = gradring("run", *options, "--ssh-option", "IdentitiesOnly=yes", *program)
    assert done.returncode == 1 and "Permission denied" in done.stderr
    assert f"without a password: ssh -p {port} -o StrictHostKeyChecking=no" in done.stderr
