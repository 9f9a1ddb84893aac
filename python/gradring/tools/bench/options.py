"""Options of a measurement, parsed and checked before any rank starts."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, replace
from typing import cast

from gradring import _native, build_info
from gradring.config.settings import READ
from gradring.config.values import TLS_VARIABLES, Settings, Transport
from gradring.config.words import PAGES
from gradring.errors import ConfigError
from gradring.group.arrays import ReduceOp
from gradring.group.communicator import Communicator
from gradring.machine import resources
from gradring.tools.bench import systems, values

DEFAULT_SIZES = "4,4KiB,64KiB,1MiB,16MiB,100MiB"
TLS = "tls"
TRANSPORTS = (*READ["transport"].choices, TLS)
ALGORITHMS = ("auto", *_native.ALGORITHMS)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"([0-9]+) ?(?:([kmg])i?)?b?", re.IGNORECASE)
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmg]?)bit")
_RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_DECIMAL = re.compile(r"[0-9]+ ?[kmg]b", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """One run of ``gradring bench all-reduce``.

    Attributes:
        world_size: Number of ranks.
        sizes: Sizes of the buffer on each rank, in bytes.
        dtype: Element type by numpy's name.
        op: The reduce op.
        transports: gradring's transports to measure: ``auto``, ``tcp`` or ``shm``, always without
            TLS; ``tls`` is ``tcp`` inside TLS.
        algorithm: One of `ALGORITHMS`; ``auto`` replaces it if it does not apply.
        iterations: Timed iterations of each system at each size; None adapts the number to the time
            of one.
        peers: Names from `gradring.tools.bench.systems.PEERS` to compare with.
        congestion: The kernel's TCP congestion control for all systems; None leaves its default.
        checksum: True to measure gradring also with checksums, once for each transport.
        disturb: True to run a process that occupies a core meanwhile.
        hosts: Number of simulated hosts with equal numbers of ranks; 1 is this machine itself.
        rate: Bandwidth of the hosts' links in each direction, in the form of ``tc``; None: no
            limit.
    """

    world_size: int
    sizes: tuple[int, ...]
    dtype: str = "float32"
    op: ReduceOp = "sum"
    transports: tuple[str, ...] = ("auto",)
    algorithm: str = "auto"
    iterations: int | None = None
    peers: tuple[str, ...] = ()
    congestion: str | None = None
    checksum: bool = False
    disturb: bool = False
    hosts: int = 1
    rate: str | None = None

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host; they are neighbours in the ring."""
        return self.world_size // self.hosts

    def where(self) -> str:
        """Returns words for the place of the ranks."""
        if self.hosts == 1:
            return "this machine"
        links = f"with links of {self.rate}" if self.rate else "with unlimited links"
        return f"{self.hosts} simulated hosts {links}"

    def check(self, *, allow_debug: bool = False) -> None:
        """Checks for options that would make the ranks fail, or the numbers worthless.

        Peers that are not installed are no error: see `measurable`.

        Args:
            allow_debug: True to measure an unoptimised build.

        Raises:
            ConfigError: A size is not a multiple of the element or exceeds the memory. The dtype is
                too narrow for this number of ranks. A transport is unknown, or ``tls`` has no
                certificates. Hosts have unequal numbers of ranks. A rate is invalid or has no links
                to limit. The build is not optimised.
        """
        if not allow_debug:
            refuse_debug_build()
        element_bytes = values.dtype_of(self.dtype).itemsize
        for size in self.sizes:
            if size % element_bytes:
                raise ConfigError(
                    f"{format_size(size)} is no whole number of {self.dtype} elements of "
                    f"{element_bytes} bytes; choose sizes that are multiples of {element_bytes}"
                )
        self._check_memory()
        values.period(self.dtype, self.world_size)
        self._check_network()
        if TLS in self.transports and Settings.from_environ().tls is None:
            raise ConfigError(
                f"the transport {TLS} needs certificates for 127.0.0.1: set "
                f"{', '.join(TLS_VARIABLES)} ({PAGES}/clusters.md shows how to make them)"
            )
        for transport in self.transports:
            Communicator(0, 1, transport=native(transport), algorithm=self.algorithm).close()

    def _check_network(self) -> None:
        if self.world_size % self.hosts or self.ranks_per_host == 0:
            raise ConfigError(
                f"--world-size {self.world_size} does not give {self.hosts} hosts equally many "
                f"ranks; choose a multiple of {self.hosts}"
            )
        if self.hosts > 1 and "shm" in self.transports:
            raise ConfigError(
                "--transport shm does not reach between hosts; choose tcp, or auto for shared "
                "memory inside each host"
            )
        if self.rate is None:
            return
        try:
            parse_rate(self.rate)
        except ValueError as error:
            raise ConfigError(f"--rate: {error}") from None
        if self.hosts == 1:
            raise ConfigError(
                f"--rate {self.rate} limits links between hosts, and there is one; add --hosts 2"
            )

    def _check_memory(self) -> None:
        size = max(self.sizes)
        communicators = len(self.transports) * (2 if self.checksum else 1)
        # Each communicator has a source, a buffer and the expected result; peers need more.
        needed = 3 * size * communicators * self.world_size
        available = resources.available_memory()
        if available is not None and needed > available:
            found = format_size(available >> 20 << 20)
            raise ConfigError(
                f"{format_size(size)} on each of {self.world_size} ranks takes "
                f"{format_size(needed)} of memory or more, and {found} are available; "
                "choose smaller sizes, fewer ranks or fewer transports"
            )

    def measurable(self) -> tuple[Options, list[str]]:
        """Returns the options with only the usable peers, and the reasons against the others.

        gradring is measured over TCP too, for comparison with the peers. A reason names the peer
        and a command to type.
        """
        reasons: list[str] = []
        able: list[str] = []
        for name in self.peers:
            peer = systems.load_peer(name)
            reason = peer.missing() or peer.refusal(
                self.dtype, self.op, self.world_size, self.hosts
            )
            if reason is None:
                able.append(name)
            else:
                reasons.append(reason)
        # Peers use TCP; between hosts `auto` uses it too.
        is_alike = not able or self.hosts > 1 or not set(self.transports).isdisjoint(("tcp", TLS))
        transports = self.transports if is_alike else (*self.transports, "tcp")
        return replace(self, peers=tuple(able), transports=transports), reasons

    def command(self) -> str:
        """Returns the command that repeats this run, with all defaults."""
        options = {
            "--world-size": self.world_size,
            "--sizes": ",".join(format_size(size).replace(" ", "") for size in self.sizes),
            "--transport": ",".join(self.transports),
            "--algorithm": self.algorithm,
            "--dtype": self.dtype,
            "--op": self.op,
            "--iterations": self.iterations,
            "--compare": ",".join(self.peers),
            "--congestion": self.congestion,
            "--hosts": self.hosts if self.hosts != 1 else None,
            "--rate": self.rate,
        }
        words = [word for name, value in options.items() if value for word in (name, str(value))]
        flags = {"--checksum": self.checksum, "--disturb": self.disturb}
        words += [flag for flag, given in flags.items() if given]
        return shlex.join(["gradring", "bench", "all-reduce", *words])


def parse_sizes(text: str) -> tuple[int, ...]:
    """Reads ``4,64KiB,1M``: a number of bytes, or one with K, M or G (KiB, MiB, GiB), each 1024.

    Returns:
        The sizes in bytes, in the order given.

    Raises:
        ValueError: The text has another form, such as KB, which is ambiguous: 1000 or 1024.
    """
    return tuple(_parse_size(word.strip()) for word in text.split(","))


def parse_rate(text: str) -> float:
    """Reads ``1gbit`` or ``500mbit``, the form of ``tc``; returns 1e9 bytes/s.

    Raises:
        ValueError: The text has another form.
    """
    found = _RATE.fullmatch(text)
    rate = 0.0 if found is None else float(found[1]) * _RATE_UNITS[found[2]] / 8e9
    if not 0 < rate < math.inf:
        raise ValueError(f"{text!r} is no rate; write it as 1gbit or 500mbit")
    return rate


def native(transport: str) -> Transport:
    """Returns the setting of `Communicator` for one of `TRANSPORTS`."""
    return cast(Transport, "tcp" if transport == TLS else transport)


def format_size(size: int) -> str:
    """Returns a size with the largest unit that divides it, such as ``100 MiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def _parse_size(word: str) -> int:
    found = _SIZE.fullmatch(word)
    if found is None or _DECIMAL.fullmatch(word):
        raise ValueError(f"{word!r} is no size; write bytes as 4, or 64KiB, 1MiB, 2GiB")
    size = int(found[1]) * _UNITS[(found[2] or "").lower()]
    if size == 0:
        raise ValueError("a size of 0 bytes takes no time worth measuring; start at one element")
    return size


def refuse_debug_build() -> None:
    """Refuses to measure an unoptimised build.

    Raises:
        ConfigError: The build is not optimised.
    """
    if build_info()["debug"]:
        raise ConfigError(
            "this is a debug build, whose times mean nothing; build it with `maturin develop "
            "--release` (or `make setup`), or pass --allow-debug"
        )
