"""Every ``GRADRING_*`` variable: one table, of which the page of settings shows what is here.

``python -m gradring.settings`` prints it for the page, and ``python -m gradring.settings FILE``
writes it into that page, between the two comments that enclose it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

BEGIN = "<!-- settings: made by python -m gradring.settings docs/command-line.md -->"
END = "<!-- end of settings -->"


@dataclass(frozen=True)
class Setting:
    """One variable.

    Attributes:
        variable: Its name.
        kind: What its value is, in words.
        meaning: What it does, in a few words.
        default: What counts when it is unset or empty; None for nothing.
        argument: That of ``gradring.init()`` which beats it, if there is one.
        same: Whether all ranks need the same value.
    """

    variable: str
    kind: str
    meaning: str
    default: str | float | None = None
    argument: str | None = None
    same: bool = False


SETTINGS = (
    # Where a rank is.
    Setting("GRADRING_RANK", "number", "this process's index", argument="rank"),
    Setting("GRADRING_WORLD_SIZE", "number", "processes", argument="world_size", same=True),
    Setting("GRADRING_RENDEZVOUS", "host:port", "where rank 0 listens", argument="rendezvous"),
    Setting("GRADRING_JOB_ID", "text", "tells jobs apart", argument="job_id", same=True),
    Setting("GRADRING_INTERFACE", "name or IP", "network to listen at", argument="interface"),
    Setting("GRADRING_PORT", "port or range", "where in it to listen", argument="port"),
    # Who may join.
    Setting("GRADRING_TOKEN", "text", "the job's shared secret", argument="token", same=True),
    Setting("GRADRING_TOKEN_FILE", "file", "the same, in a file", argument="token"),
    Setting("GRADRING_REQUIRE_AUTH", "0 or 1", "no token is an error", False, "require_auth"),
    Setting("GRADRING_TLS_CA", "PEM file", "authorities that are accepted", argument="tls"),
    Setting("GRADRING_TLS_CERT", "PEM file", "this rank's certificate", argument="tls"),
    Setting("GRADRING_TLS_KEY", "PEM file", "its private key", argument="tls"),
    # How bytes travel.
    Setting("GRADRING_TRANSPORT", "name", "`auto`, `tcp` or `shm`", "auto", "transport"),
    Setting("GRADRING_STREAMS", "1 to 16", "TCP connections to each peer", 1, "streams", same=True),
    Setting("GRADRING_CHECKSUM", "0 or 1", "check all bytes", False, "checksum", same=True),
    Setting(
        "GRADRING_ALGORITHM",
        "names",
        "such as `ring` or `one_shot:64KiB,ring`",
        "auto",
        "algorithm",
        same=True,
    ),
    Setting(
        "GRADRING_REPRODUCIBLE",
        "0 or 1",
        "fold sums in the order of ranks",
        False,
        "reproducible",
        same=True,
    ),
    Setting(
        "GRADRING_WIRE_DTYPE",
        "name",
        "`bfloat16` or `float16`: half the bytes",
        argument="wire_dtype",
        same=True,
    ),
    Setting("GRADRING_TCP_CONGESTION", "name", "congestion control of TCP, or `system`"),
    Setting("GRADRING_KERNEL", "name", "arithmetic: `avx512`, `avx2` or `scalar`"),
    # How long to wait.
    Setting("GRADRING_TIMEOUT_S", "seconds", "bound on forming the group", 300.0, "timeout"),
    Setting(
        "GRADRING_STALL_TIMEOUT_S",
        "seconds",
        "standstill that ends a collective",
        1800.0,
        "stall_timeout",
    ),
    Setting(
        "GRADRING_STALL_WARNING_S",
        "seconds",
        "standstill that is logged",
        30.0,
        "stall_warning",
    ),
    # What to write and serve.
    Setting("GRADRING_LOG", "level", "of the logger `gradring`, such as `ERROR`"),
    Setting("GRADRING_LOG_DIR", "directory", "for rank 0's `steps.jsonl`, of a `Monitor`"),
    Setting("GRADRING_FLIGHT_DIR", "directory", "for the last collectives of each rank"),
    Setting("GRADRING_TRACE", "file", "for a timeline of all ranks"),
    Setting("GRADRING_PROMETHEUS_PORT", "port", "serve metrics, at this plus the local rank"),
    Setting("GRADRING_PROMETHEUS_ADDRESS", "name or IP", "where to serve them", "127.0.0.1"),
    # What a launcher tells.
    Setting("GRADRING_RESTART", "number", "set by `gradring run`: the attempt, from 0"),
)


def markdown() -> str:
    """The table for the page."""
    head = ["variable", "value", "default", "argument of `init()`", "meaning"]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *_rows()])


def _rows() -> list[list[str]]:
    return [
        [
            f"`{setting.variable}`" + "*" * setting.same,
            setting.kind,
            _shown(setting.default),
            f"`{setting.argument}`" if setting.argument else "",
            setting.meaning,
        ]
        for setting in SETTINGS
    ]


def _shown(default: str | float | None) -> str:
    if default is None:
        return ""
    return f"`{default}`" if isinstance(default, str) else f"{float(default):g}"


def written_into(page: str) -> str:
    """The page with the table of today."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(written_into(Path(name).read_text()))
    if not sys.argv[1:]:
        print(markdown(), end="")
