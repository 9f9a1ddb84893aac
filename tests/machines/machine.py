"""Machines with kernels of their own: QEMU processes on a virtual network with this host.

QEMU computes all instructions itself (TCG), so hardware virtualisation is not needed. A machine
boots a kernel of Debian in half a minute and sees the files of this host, with an overlay in
memory: the environment and the checkout are there, and nothing that it writes is here. What it
writes to /disk outlives a cut of its power. The tests reach it by ssh.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = ("qemu-system-x86_64", "busybox", "cpio", "ip", "modprobe", "sshd", "ssh", "mkfs.ext4")
MODULES = ("virtio_pci", "virtio_net", "9p", "9pnet_virtio", "overlay", "virtio_blk", "ext4")
SEARCHED = f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
#: Of this host on the network of the machines.
HOST = "10.77.0.1"
BOOT_S, COMMAND_S = 400.0, 300.0
DISK_BYTES = 256 << 20


def why_unavailable() -> str | None:
    """Returns the reason why machines cannot boot here; None if they can."""
    if os.geteuid() != 0:
        return "a network of machines needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    if not kernels():
        missing.append("a kernel in /boot")
    if missing:
        return f"{', '.join(missing)} not found; make test-machines installs all, as root"
    return None


def kernels() -> list[str]:
    """Returns the installed releases with modules, oldest first, such as 6.1.0-57-amd64."""
    found = [path.name.removeprefix("vmlinuz-") for path in Path("/boot").glob("vmlinuz-*")]
    return sorted((name for name in found if Path("/lib/modules", name).is_dir()), key=_numbers)


def _numbers(release: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", release)]


@dataclass(frozen=True)
class Hardware:
    """What a machine is made of.

    Attributes:
        kernel: An installed release; default: the newest.
        processor: That of QEMU, with features that it has not.
        clock: The time when it boots; default: that of this host.
        mtu: Largest packet of its network card in bytes.
        memory_mib: With what it writes outside of its disk.
    """

    kernel: str = ""
    processor: str = "max"
    clock: str = "utc"
    mtu: int = 1500
    memory_mib: int = 3072


@dataclass
class Machine:
    """A machine that runs, until its power is cut."""

    number: int
    hardware: Hardware
    laboratory: Laboratory
    process: subprocess.Popen[bytes]
    console: Path
    connection: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """IPv4 address of its network card."""
        return f"10.77.0.1{self.number}"

    def command(self, *command: object, environ: Mapping[str, str] | None = None) -> list[str]:
        """Returns the command line for this host that runs `command` there."""
        given = [f"{name}={value}" for name, value in (environ or {}).items()]
        there = shlex.join(["env", *given, *map(str, command)])
        return self._ssh(there)

    def _ssh(self, *arguments: str) -> list[str]:
        path = f"-oControlPath={self.console.with_suffix('.ssh')}"
        return self.laboratory.command(
            "ssh", *self.laboratory.ssh_options, path, self.address, *arguments
        )

    def wait(self) -> None:
        """Waits until the machine lets in, and opens the connection that all commands share.

        Its handshake takes seconds of a slow processor.

        Raises:
            AssertionError: It has ended or took too long; the message has its last words.
        """
        deadline = time.monotonic() + BOOT_S
        while self._quietly("-O", "check").wait():
            said = self.console.read_text(errors="replace")[-2000:]
            assert self.process.poll() is None, f"machine {self.number} has ended: {said}"
            assert time.monotonic() < deadline, f"machine {self.number} does not answer: {said}"
            if self.connection is None or self.connection.poll() is not None:
                self.connection = self._quietly("-M", "-N", "-oConnectTimeout=30")
            time.sleep(1.0)

    def _quietly(self, *arguments: str) -> subprocess.Popen[bytes]:
        nothing = subprocess.DEVNULL
        command = self._ssh(*arguments)
        return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)

    def run(
        self,
        *command: object,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = COMMAND_S,
        check: bool = True,
    ) -> str:
        """Runs a command and returns what it wrote to both outputs.

        Raises:
            AssertionError: It failed, and `check` is given.
            subprocess.TimeoutExpired: It ran for too long.
        """
        done = subprocess.run(
            self.command(*command, environ=environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{self.address}: {command}: {done.stdout}"
        return done.stdout

    def shell(self, script: str, timeout_s: float = COMMAND_S) -> str:
        """Runs a script of the shell; returns its output."""
        return self.run("bash", "-ec", script, timeout_s=timeout_s)

    def cut_power(self) -> None:
        """Ends the machine without a word: nobody gets a FIN or an RST."""
        self.process.kill()
        self.wait_until_dark()

    def wait_until_dark(self, within_s: float = COMMAND_S) -> None:
        """Waits for a machine that cuts its own power."""
        self.process.wait(within_s)
        if self.connection is not None:
            self.connection.kill()
            self.connection.wait()


@dataclass
class Laboratory:
    """The network, the files to boot from, and the machines; a context manager that ends all."""

    directory: Path
    machines: dict[int, Machine] = field(default_factory=dict)
    _files: int = 0

    @property
    def namespace(self) -> str:
        """The network namespace of the host's side."""
        return f"gradring-machines-{os.getpid()}"

    @property
    def ssh_options(self) -> list[str]:
        """Options with which ssh reaches machines."""
        given = [f"-oIdentityFile={self.directory / 'key'}"]
        for name, value in self.ssh_settings.items():
            given.append(f"-o{name}={value}")
        return given

    @property
    def ssh_settings(self) -> dict[str, str]:
        """The same but for the key, as `gradring run --ssh-option` takes them."""
        return {
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
        }

    def command(self, *command: object) -> list[str]:
        """Returns the command line that runs `command` on this host, in the machines' network."""
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]

    def gradring(self, *arguments: object) -> list[str]:
        """Returns the command line of `gradring` on this host, in the machines' network."""
        return self.command(sys.executable, "-m", "gradring", *arguments)

    def run_command(self, hosts: str, *arguments: object) -> list[str]:
        """Returns that of `gradring run` on hosts such as 10.77.0.1:1,10.77.0.11:1."""
        options = ["--hosts", hosts, "--ssh-identity-file", self.directory / "key"]
        for name, value in self.ssh_settings.items():
            options += ["--ssh-option", f"{name}={value}"]
        return self.gradring("run", *options, *arguments)

    def boot(self, number: int, hardware: Hardware | None = None) -> Machine:
        """Starts machine `number`, 1 to 9; its power is cut if it runs."""
        hardware = hardware or Hardware()
        if number in self.machines:
            self.machines[number].cut_power()
        release = hardware.kernel or kernels()[-1]
        console = self.new_file(f"machine-{number}.console")
        # Beside other work, ticks of a machine come too late for the kernel's check of its timer.
        words = "console=ttyS0 quiet mitigations=off panic=-1 no_timer_check nowatchdog"
        words += f" machine={number} mtu={hardware.mtu} start={self.directory / 'start.sh'}"
        tap = f"tap{number}"
        card = f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:0{number},romfile="
        files = "local,id=files,path=/,security_model=none,readonly=on,multidevs=remap"
        options = [
            *("-accel", "tcg,thread=multi", "-cpu", hardware.processor),
            *("-m", hardware.memory_mib, "-smp", 1, "-rtc", f"base={hardware.clock}"),
            *("-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio"),
            *("-kernel", f"/boot/vmlinuz-{release}", "-initrd", self._first_files(release)),
            *("-append", words, "-fsdev", files),
            *("-device", "virtio-9p-pci,fsdev=files,mount_tag=host"),
            *("-netdev", f"tap,id=net,ifname={tap},script=no,downscript=no", "-device", card),
            *("-drive", f"file={self._disk(number)},if=virtio,format=raw,cache=writethrough"),
        ]
        # It ends with the tests, also when they are killed.
        guarded = ("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *options)
        with open(console, "wb") as output:
            process = subprocess.Popen(
                self.command(*guarded),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        machine = Machine(number, hardware, self, process, console)
        self.machines[number] = machine
        return machine

    def boot_all(self, machines: Mapping[int, Hardware]) -> dict[int, Machine]:
        """Starts several and waits until all let in."""
        booted = {number: self.boot(number, made_of) for number, made_of in machines.items()}
        for machine in booted.values():
            machine.wait()
        return booted

    def new_file(self, name: str) -> Path:
        """Returns a path that nothing has yet; machines may know an older file as it was."""
        self._files += 1
        return self.directory / f"{self._files}-{name}"

    def _disk(self, number: int) -> Path:
        """Returns the disk of a machine, which outlives cuts of its power; it is made once."""
        path = self.directory / f"disk-{number}"
        if not path.exists():
            with open(path, "wb") as file:
                file.truncate(DISK_BYTES)
            _run("mkfs.ext4", "-q", path)
        return path

    def _first_files(self, release: str) -> Path:
        """Returns the archive with busybox, the modules and `init.sh`; it is made once."""
        archive = self.directory / f"initramfs-{release}"
        if archive.exists():
            return archive
        tree = self.directory / f"tree-{release}"
        for name in ("bin", "lib", "proc", "sys", "dev"):
            (tree / name).mkdir(parents=True)
        shutil.copy(shutil.which("busybox", path=SEARCHED) or "", tree / "bin/busybox")
        modules: dict[str, None] = {}
        for name in MODULES:
            said = _run("modprobe", "-S", release, "--show-depends", name)
            modules |= dict.fromkeys(re.findall(r"^insmod (\S+)", said, re.MULTILINE))
        names = []
        for module in map(Path, modules):
            names.append(f"/lib/{module.name.removesuffix('.xz')}\n")
            kept = lzma.decompress if module.suffix == ".xz" else bytes
            (tree / names[-1].strip()[1:]).write_bytes(kept(module.read_bytes()))
        (tree / "modules").write_text("".join(names))
        shutil.copy(HERE / "init.sh", tree / "init")
        (tree / "init").chmod(0o755)
        found = subprocess.run(["find", "."], cwd=tree, stdout=subprocess.PIPE, check=True).stdout
        packed = subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"],
            cwd=tree,
            input=found,
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        archive.write_bytes(gzip.compress(packed, 1))
        return archive

    def _prepare(self, count: int) -> None:
        for name in ("host_key", "key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.directory / name)
        shutil.copy(HERE / "start.sh", self.directory)
        (self.directory / "sshd_config").write_text(
            f"HostKey {self.directory}/host_key\nAuthorizedKeysFile {self.directory}/key.pub\n"
            "StrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nUseDNS no\n"
            "UsePAM no\nPidFile none\n"
        )
        names = [f"{HOST} host"] + [f"10.77.0.1{n} machine{n}" for n in range(1, count + 1)]
        hosts = "\n".join(["127.0.0.1 localhost", *names, ""])
        (self.directory / "hosts").write_text(hosts)
        for_namespace = Path("/etc/netns", self.namespace)
        for_namespace.mkdir(parents=True)
        (for_namespace / "hosts").write_text(hosts)
        _run("ip", "netns", "add", self.namespace)
        inside = ("ip", "-n", self.namespace)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "add", "machines", "type", "bridge")
        for number in range(1, count + 1):
            tap = f"tap{number}"
            _run(*inside, "tuntap", "add", tap, "mode", "tap")
            _run(*inside, "link", "set", tap, "master", "machines", "up")
        _run(*inside, "address", "add", f"{HOST}/24", "dev", "machines")
        _run(*inside, "link", "set", "machines", "up")

    def _remove(self) -> None:
        for machine in self.machines.values():
            machine.cut_power()
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns", self.namespace), ignore_errors=True)


@contextlib.contextmanager
def laboratory(count: int = 3) -> Iterator[Laboratory]:
    """Makes the network for `count` machines; all that runs ends with the block.

    Yields:
        The laboratory, without machines.

    Raises:
        RuntimeError: Machines cannot boot here; the message has the reason.
    """
    if reason := why_unavailable():
        raise RuntimeError(f"cannot boot machines: {reason}")
    with tempfile.TemporaryDirectory(prefix="gradring-machines-") as directory:
        made = Laboratory(Path(directory))
        try:
            made._prepare(count)
            yield made
        finally:
            made._remove()


def _run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(map(str, command))} failed: {done.stderr.strip()}")
    return done.stdout
