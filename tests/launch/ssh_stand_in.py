"""A program named ``ssh`` that runs the command here, for tests of ``gradring run --hosts``.

Addresses of this machine play other hosts, and a user in front, as in ``me@127.0.0.2``, makes
`gradring run` reach them by ssh. So do network namespaces, by address in ``SSH_STAND_IN_HOSTS``.

As with the real one, the command runs in a session of its own, which is not told when the client is
killed: it only sees its standard input end. Every command line that it is given is written down.
Where the command itself is killed, the host is gone: the client says so once there is the file
``SSH_STAND_IN_NOTICES``, or at once.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import executable

from support.commands import head_of_script

PROGRAM = f"""{head_of_script()}import json, os, subprocess, sys, threading, time
arguments = sys.argv[1:]
while arguments[0].startswith("-"):
    arguments = arguments[2 if arguments[0] in ("-o", "-p", "-i") else 1 :]
target, command = arguments
host = target.rpartition("@")[2]
with open(os.environ["SSH_STAND_IN_NOTES"], "a") as notes:
    notes.write(repr(sys.argv) + "\\n")
gone = os.environ.get("SSH_STAND_IN_GONE", "")
down = open(gone).read() if os.path.exists(gone) else os.environ.get("SSH_STAND_IN_DOWN", "")
if host in down.split():
    sys.exit(f"ssh: connect to host {{host}} port 22: No route to host") or 255
namespace = json.loads(os.environ.get("SSH_STAND_IN_HOSTS", "{{}}")).get(host)
inside = ["ip", "netns", "exec", namespace] if namespace else []
environ = {{name: text for name, text in os.environ.items() if not name.startswith("HERE_")}}
environ["SSH_HOST"] = host
environ["TMPDIR"] = os.path.join(os.path.dirname(os.environ["SSH_STAND_IN_NOTES"]), "tmp-" + host)
os.makedirs(environ["TMPDIR"], exist_ok=True)
far = subprocess.Popen(
    [*inside, "sh", "-c", "exec " + command],
    stdin=subprocess.PIPE,
    env=environ,
    start_new_session=True,
)
def carry():
    try:
        while data := os.read(0, 65536):
            far.stdin.write(data)
            far.stdin.flush()
        far.stdin.close()
    except OSError:
        pass
threading.Thread(target=carry, daemon=True).start()
code = far.wait()
if code < 0:
    notices = os.environ.get("SSH_STAND_IN_NOTICES")
    while notices and not os.path.exists(notices):
        time.sleep(0.01)
    print(f"Timeout, server {{host}} not responding.", file=sys.stderr, flush=True)
os._exit(code if code >= 0 else 255)
"""


def install(directory: Path) -> dict[str, str]:
    """Puts the stand-in into ``directory``; returns the variables that make it found first."""
    program = executable(directory / "bin" / "ssh", PROGRAM)
    return {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "SSH_STAND_IN_NOTES": str(directory / "notes"),
    }


BIND = "import socket; socket.create_server(('127.0.0.2', 0))"

#: Where not all of 127.0.0.0/8 is this machine, it cannot play several hosts.
needs_addresses = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", BIND], check=False).returncode != 0,
    reason="127.0.0.2 is not an address of this system (Linux has it)",
)
