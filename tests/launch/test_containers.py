"""Containers lack a first process that cares for others, interfaces, calls, a disk."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import PYTHON, command_line, completed

NAMESPACE = ("unshare", "--map-root-user")
#: In which a command is the first process, and sees only those that it starts.
FIRST = (*NAMESPACE, "--pid", "--fork", "--mount-proc", "--kill-child")
ALONE = {"GRADRING_RANK": "0", "GRADRING_WORLD_SIZE": "1"}
COORDINATOR = {
    "GRADRING_RANK": "0",
    "GRADRING_WORLD_SIZE": "2",
    "GRADRING_RENDEZVOUS": "127.0.0.1:29500",
}
UPDATES = str(Path(__file__).parent.parent / "updates")
#: Of eventfd2, by processor.
EVENTFD2 = {"x86_64": 290, "aarch64": 19}


def inside(
    namespace: tuple[str, ...], *command: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command there to its end."""
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs the right to {' '.join(namespace)}")
    return completed([*namespace, *map(str, command)], env=variables)


def program(directory: Path, *lines: str) -> Path:
    path = directory / "program.py"
    path.write_text("\n".join(("import contextlib, os, signal, subprocess, sys, time", *lines)))
    return path


@pytest.mark.parametrize(
    ("before", "exit_code"),
    [("", 128 + 15), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))", 5)],
    ids=["by itself", "by a handler of the program"],
)
def test_sigterm_ends_a_program_that_is_the_first_process(
    tmp_path: Path, before: str, exit_code: int
) -> None:
    path = program(
        tmp_path,
        before,
        "import gradring",
        "with gradring.init():",
        "    subprocess.run(['kill', '-TERM', '1'])",
        "    print('it goes on')",
    )
    done = inside(FIRST, sys.executable, path, **ALONE)
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr


def test_sigterm_ends_forks_of_the_first_process_as_any_other(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        "import gradring",
        "with gradring.init():",
        "    fork = os.fork()",
        "    while not fork:",
        "        signal.pause()",
        "    os.kill(fork, signal.SIGTERM)",
        "    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))",
    )
    done = inside(FIRST, sys.executable, path, **ALONE)
    assert done.stdout == "-15\n", done.stderr


def test_the_launcher_as_the_first_process_collects_what_nobody_waits_for(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        "subprocess.run(['sh', '-c', 'for n in $(seq 20); do (setsid true &); done'])",
        "def zombies():",
        "    stats = []",
        "    for process in filter(str.isdigit, os.listdir('/proc')):",
        "        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone",
        "            stats.append(open(f'/proc/{process}/stat').read())",
        "    return [s for s in stats if s.rpartition(')')[2].split()[:2] == ['Z', '1']]",
        f"sys.path.insert(0, {str(Path(__file__).parent.parent)!r})",
        "from support.waiting import wait_until",
        "wait_until(lambda: not zombies(), 'nothing is left of them')",
        "sys.exit(3)",
    )
    done = inside(FIRST, *command_line("run", "-np", 1, path))
    assert done.returncode == 3, done.stderr


def test_the_launcher_as_the_first_process_passes_signals_on(tmp_path: Path) -> None:
    path = program(tmp_path, "os.kill(1, signal.SIGTERM)", "signal.pause()")
    done = inside(FIRST, *command_line("run", "-np", 1, path))
    assert done.returncode == 128 + 15, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import gradring; gradring.init()",
        f"import sys; sys.path.insert(0, {UPDATES!r}); import parameters; "
        "parameters.server(['127.0.0.1:29500'], 0, 1).serve()",
    ],
    ids=["rank", "parameter server"],
)
def test_a_loopback_interface_that_is_down_is_named_at_once(code: str) -> None:
    done = inside((*NAMESPACE, "--net"), sys.executable, "-c", code, **COORDINATOR)
    assert "interface of this host or container is down; type: ip link set lo up" in done.stderr


@pytest.mark.skipif(platform.machine() not in EVENTFD2, reason="knows no number of the call")
def test_a_sandbox_that_refuses_eventfd_is_named(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        "import ctypes, struct",
        f"call = {EVENTFD2.get(platform.machine())}",
        "refuse = struct.pack('=HBBIHBBIHBBIHBBI',",
        "    0x20, 0, 0, 0, 0x15, 0, 1, call, 0x06, 0, 0, 0x00050001, 0x06, 0, 0, 0x7fff0000)",
        "memory = ctypes.create_string_buffer(refuse)",
        "filter = struct.pack('HL', 4, ctypes.addressof(memory))",
        "libc = ctypes.CDLL(None)",
        "assert libc.prctl(38, 1, 0, 0, 0) == 0",
        "assert libc.prctl(22, 2, filter, 0, 0) == 0",
        "import gradring",
        "gradring.init()",
    )
    done = inside((*NAMESPACE, "--net"), "sh", "-c", f"ip link set lo up; {PYTHON} {path}",
                  **COORDINATOR)  # fmt: skip
    assert "refuses eventfd2" in done.stderr and "seccomp" in done.stderr, done.stderr
    assert "29500" not in done.stderr.splitlines()[-1]


def test_the_launcher_says_that_it_needs_a_temporary_directory() -> None:
    freeze = "mount --rbind $place $place && mount -o remount,ro,bind $place"
    places = f"for place in /tmp /var/tmp; do {freeze} || exit; done; cd /proc"
    command = shlex.join(command_line("run", "-np", 1, "true"))
    script = f"{places} && exec {command}"
    done = inside((*NAMESPACE, "--mount"), "sh", "-c", script, TMPDIR="/proc")
    assert done.returncode == 2
    assert "needs a temporary directory" in done.stderr and "set TMPDIR" in done.stderr
