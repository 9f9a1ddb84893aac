"""Options of a simulation, parsed and checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradring.errors import ConfigError
from gradring.tools.bench.options import format_size, parse_rate

#: Largest number of ranks of a simulated group.
MOST_RANKS = 1 << 16
ELEMENT_BYTES = 4
DEFAULT_SIZES = "4KiB,1MiB,100MiB"
COLLECTIVES = (ALL_REDUCE, ALL_TO_ALL) = ("all_reduce", "all_to_all")
#: Largest relative chunk size of a split.
LARGEST_PART = 1_000_000
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ns|us|ms|s)")
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Network:
    """Equal hosts and their connections; the fields are those of the core's `Network`.

    The defaults inside a host are measurements of one host with two cores
    (docs/performance.md). The defaults between hosts were not measured.

    Attributes:
        world_size: Number of ranks.
        ranks_per_host: Number of ranks on each host, with consecutive numbers.
        latency_s: Latency of the first byte between two hosts.
        bytes_per_s: Bandwidth of each host's line, in each direction.
        local_latency_s: Latency between two ranks of a host.
        local_bytes_per_s: Bandwidth of each rank to others on its host, in each direction.
        hosts_per_rack: Number of hosts that share an uplink, if there are uplinks.
        uplink_bytes_per_s: Bandwidth of each rack's uplink, in each direction.
        cores: Cores of each host; None: one for each rank.
        message_s: Processor time for each piece sent or received.
        copy_s_per_byte: Processor time for each byte sent or received.
        fold_s_per_byte: Processor time for each byte reduced.
        stragglers: Slow ranks, each with a factor for all of its times.
    """

    world_size: int = 2
    ranks_per_host: int = 1
    latency_s: float = 20e-6
    bytes_per_s: float = 1.25e9
    local_latency_s: float = 3e-6
    local_bytes_per_s: float = 5e9
    hosts_per_rack: int | None = None
    uplink_bytes_per_s: float | None = None
    cores: int | None = None
    message_s: float = 1.5e-6
    copy_s_per_byte: float = 0.15e-9
    fold_s_per_byte: float = 0.05e-9
    stragglers: tuple[tuple[int, float], ...] = ()

    def words(self) -> list[str]:
        """Returns the network in words, a line for each part."""
        inside = f"{_us(self.local_latency_s)}, {_gbit(self.local_bytes_per_s)} for a rank"
        lines = [
            f"between hosts {_us(self.latency_s)}, {_gbit(self.bytes_per_s)} each way; "
            f"inside a host {inside}",
            f"a processor needs {_us(self.message_s)} for a piece, {_ns(self.copy_s_per_byte)} to "
            f"send or receive, {_ns(self.fold_s_per_byte)} to reduce",
        ]
        if self.cores is not None:
            lines.append(f"{self.cores} cores on each host of {self.ranks_per_host} ranks")
        if self.hosts_per_rack is not None and self.uplink_bytes_per_s is not None:
            racks = f"racks of {self.hosts_per_rack} hosts"
            lines.append(f"{racks} with an uplink of {_gbit(self.uplink_bytes_per_s)} each way")
        lines += [f"rank {rank} needs {factor:g} times as long" for rank, factor in self.stragglers]
        return lines


@dataclass(frozen=True)
class Options:
    """One run of ``gradring simulate``.

    Attributes:
        world_sizes: Numbers of ranks, each simulated.
        sizes: Sizes of the buffer on each rank, in bytes.
        algorithms: Names from `ALGORITHMS`, each simulated.
        network: The network; its number of ranks is replaced.
        collective: A name from `COLLECTIVES`.
        splits: Relative chunk sizes of an all-to-all, repeated for further ranks; None: equal
            chunks.
    """

    world_sizes: tuple[int, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    network: Network
    collective: str = ALL_REDUCE
    splits: tuple[int, ...] | None = None

    def check(self) -> None:
        """Checks that the options are consistent.

        Raises:
            ConfigError: Hosts have unequal numbers of ranks. A straggler is not a rank. A size is
                not a multiple of the element. Only one of uplink and hosts per rack is given. There
                are more cores or hosts than ranks could use. Splits are given for another
                collective, or are 0 for all ranks.
        """
        network = self.network
        counts = {"--cores": network.cores, "--hosts-per-rack": network.hosts_per_rack}
        for option, number in counts.items():
            if number is not None and number > MOST_RANKS:
                raise ConfigError(f"{option} {number} is more than {MOST_RANKS} ranks could use")
        if (network.hosts_per_rack is None) != (network.uplink_bytes_per_s is None):
            raise ConfigError(
                "--uplink and --hosts-per-rack belong together: the rate of a rack's uplink, and "
                "how many hosts share it; give both, such as --uplink 40gbit --hosts-per-rack 8"
            )
        if self.splits is not None and self.collective != ALL_TO_ALL:
            raise ConfigError(f"--splits is for --collective {ALL_TO_ALL}, which it does not name")
        for size in self.sizes:
            if size % ELEMENT_BYTES:
                raise ConfigError(
                    f"{format_size(size)} is no whole number of float32; choose sizes that are "
                    f"multiples of {ELEMENT_BYTES}"
                )
        for world_size in self.world_sizes:
            self._check_ranks(world_size)

    def _check_ranks(self, world_size: int) -> None:
        if world_size % self.network.ranks_per_host:
            raise ConfigError(
                f"{world_size} ranks do not fill hosts of {self.network.ranks_per_host}; choose a "
                f"--world-size that is a multiple of --ranks-per-host"
            )
        if self.splits is not None and not any(self.splits[:world_size]):
            raise ConfigError(
                f"--splits gives nothing to any of {world_size} ranks; give one of them a part"
            )
        for rank, _ in self.network.stragglers:
            if rank >= world_size:
                raise ConfigError(
                    f"--straggler {rank} does not exist in a world of {world_size}; ranks run from "
                    f"0 to {world_size - 1}"
                )

    @property
    def parts(self) -> list[int] | None:
        """Relative chunk sizes of an all-to-all; None for an all-reduce."""
        return None if self.collective == ALL_REDUCE else list(self.splits or (1,))

    def words(self) -> list[str]:
        """Returns the options in words, a line for each part."""
        if self.splits is None:
            return [self.collective, *self.network.words()]
        splits = ",".join(map(str, self.splits))
        return [f"{self.collective}, splits {splits}", *self.network.words()]

    def networks(self) -> Iterator[Network]:
        """Yields the network with each number of ranks."""
        for world_size in self.world_sizes:
            yield replace(self.network, world_size=world_size)


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Reads ``8``, ``2,4,8`` or ``16..4096``, the doublings from 16 to 4096.

    Raises:
        ValueError: The text has another form.
    """
    found: list[int] = []
    for word in text.split(","):
        first, dots, last = word.strip().partition("..")
        bounds = [first, last if dots else first]
        if not all(re.fullmatch("[0-9]{1,5}", bound) for bound in bounds):
            raise ValueError(f"{word!r} is no number of ranks; write 8, 2,4,8 or 16..4096")
        low, high = map(int, bounds)
        if not 2 <= low <= high <= MOST_RANKS:
            raise ValueError(f"{word!r} is not within 2 to {MOST_RANKS} ranks, in growing order")
        while low <= high:
            found.append(low)
            low *= 2
    return tuple(dict.fromkeys(found))


def parse_time(text: str) -> float:
    """Reads ``25us``, ``1.5ms`` or ``0s``; returns seconds.

    Raises:
        ValueError: The text has another form.
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time; write it as 25us or 1.5ms")
    return float(found[1]) * _TIME_UNITS[found[2]]


def parse_bytes_per_s(text: str) -> float:
    """Reads ``10gbit``; returns bytes per second.

    Raises:
        ValueError: The text has another form.
    """
    return parse_rate(text) * 1e9


def parse_s_per_byte(text: str) -> float:
    """Reads ``40gbit``; returns seconds per byte.

    Raises:
        ValueError: The text has another form.
    """
    return 1 / parse_bytes_per_s(text)


def parse_splits(text: str) -> tuple[int, ...]:
    """Reads relative chunk sizes such as ``3,1``.

    Raises:
        ValueError: The text has another form.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,7}", word) and int(word) <= LARGEST_PART for word in words):
        raise ValueError(
            f"{text!r} are no splits; write relative sizes such as 3,1, each at most {LARGEST_PART}"
        )
    return tuple(map(int, words))


def parse_straggler(text: str) -> tuple[int, float]:
    """Reads a straggler such as ``3:2.5``: rank 3 takes 2.5 times as long.

    Raises:
        ValueError: The text has another form.
    """
    found = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,6}(?:\.[0-9]+)?)", text)
    if found is None or float(found[2]) < 1:
        raise ValueError(
            f"{text!r} is no straggler; write RANK:FACTOR as 3:2.5, with a factor of at least 1"
        )
    return int(found[1]), float(found[2])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:g} us"


def _ns(seconds_per_byte: float) -> str:
    return f"{seconds_per_byte * 1e9:.3g} ns/B"


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:g} Gbit/s"
