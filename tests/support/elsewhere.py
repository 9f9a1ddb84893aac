"""``make test-elsewhere``: the tests of the package on a machine that is unlike this one.

Another user runs them, who is not root and has another home. The host has another name, which
stands for 127.0.1.1 as on Debian, another processor and one core of it, no network but the loopback
interface, no IPv6, and 16 MiB of /dev/shm. The time zone has a half hour, and the locale is C. The
checkout is a copy in a folder with a space in its name. Beside its environment, the user's own
site-packages have other versions of gradring, numpy and packaging, which raise an error if anything
imports them. All of this is in namespaces: of the machine itself nothing changes. ::

    PYTHONPATH=tests python -m support.elsewhere                        # all of tests/
    PYTHONPATH=tests python -m support.elsewhere tests/launch -k stdin  # for pytest

Tests that simulate hosts need root, and are skipped. `tests/packaging` needs a built wheel, and is
left out.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.commands import head_of_script

ROOT = Path(__file__).parents[2]
NAMESPACES = ("--mount", "--uts", "--net", "--ipc")
USER, ID = "elsewhere", 54321
HOST = "elsewhere-1"
PROCESSOR = "Elsewhere(R) Processor 1 MHz"
SHARED_MEMORY = "16m"
#: As POSIX writes it, so that no database of zones is needed.
TIME_ZONE = "IST-5:30"
#: Of which the user has other versions.
OTHER_VERSIONS = ("gradring", "numpy", "packaging")
PROGRAMS = {
    "unshare": "util-linux",
    "mount": "util-linux",
    "setpriv": "util-linux",
    "taskset": "util-linux",
    "ip": "iproute2",
    "git": "git",
}
OPTIONS = ("-q", "-rs", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
INSIDE = "--inside"


def main(arguments: list[str]) -> int:
    """Runs pytest there; returns its exit code."""
    if arguments[:1] == [INSIDE]:
        return inside(Path(arguments[1]), arguments[2:])
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        packages = " ".join(dict.fromkeys(PROGRAMS[name] for name in missing))
        sys.exit(f"missing: {' '.join(missing)}. Install with: apt-get install {packages}")
    as_root = [] if os.geteuid() == 0 else ["sudo"]
    if as_root and shutil.which("sudo") is None:
        sys.exit("another user and namespaces need root, and there is no sudo. Run this as root.")
    with tempfile.TemporaryDirectory(prefix="gradring elsewhere ") as folder:
        make(Path(folder))
        this = [
            sys.executable,
            "-m",
            "support.elsewhere",
            INSIDE,
            folder,
            *(arguments or ["tests"]),
        ]
        with_path = ["env", f"PYTHONPATH={ROOT / 'tests'}", "unshare", *NAMESPACES]
        code = subprocess.run([*as_root, *with_path, *this], check=False).returncode
        # The other user's files.
        subprocess.run([*as_root, "find", folder, "-mindepth", "1", "-delete"], check=False)
    return code


def make(folder: Path) -> None:
    """The checkout with its environment, and the user's home."""
    folder.chmod(0o755)
    checkout, home = folder / "checkout", folder / "home"
    for name in sources():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():  # unless it is to be removed by the next commit
            shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    environment = checkout / ".venv"
    # With those of the system an environment also has those of the user.
    made = ["-m", "venv", "--without-pip", "--system-site-packages", str(environment)]
    subprocess.run([sys.executable, *made], check=True)
    packages = Path(sysconfig.get_path("purelib"))
    there = environment / packages.relative_to(sys.prefix)

    def link(source: str, target: str) -> None:
        Path(target).symlink_to(folder / ".venv" / Path(source).relative_to(sys.prefix))

    shutil.copytree(packages, there, copy_function=link, dirs_exist_ok=True)
    for path in packages.glob("*.pth"):
        # That of the package leads to this checkout.
        (there / path.name).unlink()
        (there / path.name).write_text(path.read_text().replace(str(ROOT), str(checkout)))
    for path in Path(sys.prefix, "bin").iterdir():
        if not (environment / "bin" / path.name).exists():
            command(path, environment, folder)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for name in OTHER_VERSIONS:
        other = home / ".local" / "lib" / version / "site-packages" / name
        other.mkdir(parents=True)
        (other / "__init__.py").write_text(f"raise ImportError('this is another {name}')\n")
        metadata = other.with_name(f"{name}-0.0.1.dist-info") / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")


def sources() -> Iterator[str]:
    """Files of the checkout that git knows or would add, and the extension."""
    of_git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    yield from subprocess.check_output(of_git, cwd=ROOT, text=True).split("\0")[:-1]
    for native in ROOT.glob("python/gradring/_native*.so"):
        yield str(native.relative_to(ROOT))


def command(path: Path, environment: Path, folder: Path) -> None:
    """A command of this environment in the other one."""
    there = environment / "bin" / path.name
    first, _, rest = path.read_bytes().partition(b"\n")
    if first.startswith(b"#!") and b"python" in first:
        there.write_bytes(head_of_script(str(environment / "bin" / "python")).encode() + rest)
        there.chmod(0o755)
    elif not path.name.startswith(("python", "activate", "Activate")):
        there.symlink_to(folder / ".venv" / "bin" / path.name)


def inside(folder: Path, arguments: list[str]) -> int:
    """In the namespaces, as root: makes the machine, and runs pytest as the user."""
    socket.sethostname(HOST)
    run("ip", "link", "set", "lo", "up")
    for interface in ("all", "default"):
        without = Path(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6")
        if without.exists():
            without.write_text("1")
    run("mount", "-t", "tmpfs", "-o", f"size={SHARED_MEMORY},mode=1777", "tmpfs", "/dev/shm")
    replace(folder, "/proc/cpuinfo", one_processor(Path("/proc/cpuinfo").read_text()))
    replace(folder, "/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {HOST}\n")
    home = folder / "home"
    user = f"{USER}:x:{ID}:{ID}::{home}:/bin/sh\n"
    replace(folder, "/etc/passwd", Path("/etc/passwd").read_text() + user)
    replace(folder, "/etc/group", Path("/etc/group").read_text() + f"{USER}:x:{ID}:\n")
    bind(sys.prefix, folder / ".venv")
    open_to_all(Path(sys.base_prefix), folder)
    checkout = folder / "checkout"
    for path in (home, checkout):
        run("chown", "-hR", f"{ID}:{ID}", str(path))
    core = str(min(os.sched_getaffinity(0)))
    user_of = ("setpriv", f"--reuid={ID}", f"--regid={ID}", "--clear-groups", "--no-new-privs")
    variables = ("env", "-i", f"HOME={home}", f"PATH={os.defpath}", "LANG=C", f"TZ={TIME_ZONE}")
    as_user = (*user_of, "taskset", "--cpu-list", core, *variables)
    os.chdir(checkout)
    # What git tracks is asked by tests.
    run(*as_user, "git", "init", "--quiet")
    run(*as_user, "git", "add", "--all")
    pytest = (".venv/bin/python", "-m", "pytest", *OPTIONS, *arguments)
    return subprocess.run([*as_user, *pytest], check=False).returncode


def one_processor(cpuinfo: str) -> str:
    """The first processor of /proc/cpuinfo, with another name."""
    first = cpuinfo.partition("\n\n")[0] + "\n\n"
    return re.sub(r"(model name\s*: ).*", rf"\g<1>{PROCESSOR}", first)


def replace(folder: Path, path: str, text: str) -> None:
    """Gives a file of the system another text."""
    other = folder / Path(path).name
    other.write_text(text)
    other.chmod(0o644)
    run("mount", "--bind", str(other), path)


def bind(source: str, target: Path) -> None:
    """Shows a folder at another place, too."""
    target.mkdir(parents=True, exist_ok=True)
    run("mount", "--bind", source, str(target))


def open_to_all(path: Path, folder: Path) -> None:
    """Lets every user reach what is there, also below a home that others may not enter."""
    for above in reversed(path.parents):
        if not above.stat().st_mode & stat.S_IXOTH:
            held = folder / "interpreter"
            bind(str(path), held)
            run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(above))
            bind(str(held), path)
            return


def run(*words: str) -> None:
    """Runs a command that must not fail."""
    subprocess.run(words, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
