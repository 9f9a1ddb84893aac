"""The simulation: gets times from the core, and prints each at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradring._native import time_collective
from gradring.errors import ConfigError
from gradring.tools.bench.options import format_size
from gradring.tools.bench.table import format_time, header, row
from gradring.tools.simulate.options import Network, Options

if TYPE_CHECKING:
    from gradring._native import Timing

_COLUMNS = (
    ("ranks", 6, "world_size", ""),
    ("hosts", 6, "hosts", ""),
    ("size", 8, "size", ""),
    ("wanted", 12, "wanted", ""),
    ("algorithm", 12, "algorithm", ""),
    ("time", 8, "time", ""),
    ("first rank", 10, "first", ""),
    ("busbw GB/s", 10, "busbw_gbps", ".3f"),
    ("bytes bound", 11, "bandwidth_bound", ""),
    ("log2 bound", 10, "latency_bound", ""),
    ("of bounds", 9, "of_bounds", ""),
    ("line", 5, "busiest_line", ".0%"),
    ("rank", 5, "busiest_rank", ".0%"),
)


@dataclass(frozen=True)
class Simulated:
    """The result of one collective on one network.

    Attributes:
        collective: Its name.
        splits: Relative chunk sizes of an all-to-all; None for an all-reduce.
        world_size: Number of ranks.
        ranks_per_host: Number of ranks on each host.
        bytes: Size of the buffer on each rank.
        wanted: The requested algorithm; ``auto`` chooses as a group does.
        algorithm: The algorithm used.
        time_us: Time until the last rank has its result.
        first_us: Time until the first rank has its result.
        busbw_gbps: 2(N-1)/N of an all-reduce's bytes over the time, in 1e9 bytes/s. For an
            all-to-all (N-1)/N, the mean share that a rank sends.
        bandwidth_bound_us: Lower bound of the time by the bandwidth of the lines.
        latency_bound_us: Lower bound of the time by the latency of log2(N) steps.
        busiest_line: Fraction of the time in which the busiest line is used.
        busiest_rank: Fraction of the time in which the busiest rank's processor works.
        pieces: Number of pieces sent.
    """

    collective: str
    splits: list[int] | None
    world_size: int
    ranks_per_host: int
    bytes: int
    wanted: str
    algorithm: str
    time_us: float
    first_us: float
    busbw_gbps: float
    bandwidth_bound_us: float
    latency_bound_us: float
    busiest_line: float
    busiest_rank: float
    pieces: int


def simulate(options: Options, say: Callable[[str], None]) -> list[Simulated]:
    """Simulates each algorithm at each number of ranks and size.

    Args:
        options: The checked options.
        say: Called with each line of the report.

    Raises:
        ConfigError: None of the combinations can be simulated; the message has the reason.
    """
    for line in options.words():
        say(f"# {line}")
    say(header(_COLUMNS))
    found: list[Simulated] = []
    refusals: list[ConfigError] = []
    for network in options.networks():
        for size in options.sizes:
            for algorithm in options.algorithms:
                try:
                    (timing,) = time_collective(network, [size], algorithm, options.parts)
                except ConfigError as refusal:
                    refusals.append(refusal)
                    say(f"# left out: {algorithm}, {network.world_size} ranks: {refusal}")
                    continue
                found.append(_simulated(options, network, size, algorithm, timing))
                say(row(_facts(found[-1]), _COLUMNS))
    if not found and refusals:
        raise refusals[0]
    return found


def write(simulated: Sequence[Simulated], network: Network, path: Path) -> None:
    """Writes a JSON list: an object for each row, with the network under ``network``.

    Raises:
        OSError: The file cannot be written.
    """
    described = asdict(network)
    del described["world_size"], described["ranks_per_host"]
    rows = (json.dumps(asdict(each) | {"network": described}) for each in simulated)
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def _simulated(
    options: Options, network: Network, size: int, wanted: str, timing: Timing
) -> Simulated:
    ranks, seconds = network.world_size, timing["seconds"]
    times = 2 if options.parts is None else 1
    return Simulated(
        collective=options.collective,
        splits=options.parts,
        world_size=ranks,
        ranks_per_host=network.ranks_per_host,
        bytes=size,
        wanted=wanted,
        algorithm=timing["algorithm"],
        time_us=seconds * 1e6,
        first_us=timing["first_seconds"] * 1e6,
        # The time is 0 if all costs are 0.
        busbw_gbps=times * (ranks - 1) / ranks * size / seconds / 1e9 if seconds else 0.0,
        bandwidth_bound_us=timing["bandwidth_bound_s"] * 1e6,
        latency_bound_us=timing["latency_bound_s"] * 1e6,
        busiest_line=timing["busiest_line"],
        busiest_rank=timing["busiest_rank"],
        pieces=timing["pieces"],
    )


def _facts(found: Simulated) -> dict[str, Any]:
    facts = asdict(found)
    bound = max(found.bandwidth_bound_us, found.latency_bound_us)
    return {
        **facts,
        **{key.removesuffix("_us"): format_time(facts[key]) for key in facts if "_us" in key},
        "hosts": found.world_size // found.ranks_per_host,
        "size": format_size(found.bytes),
        "of_bounds": f"{found.time_us / bound:.2f}x" if bound else None,
    }
