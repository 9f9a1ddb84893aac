from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypedDict, final, type_check_only

import numpy as np

from gradring.errors import GradringError
from gradring.stats import RankStats

__all__ = [
    "Communicator",
    "Participant",
    "Work",
    "after_fork",
    "await_others",
    "before_fork",
    "build_info",
    "check_dtype",
    "diagnose",
    "inquire",
    "leave_to_parent",
    "lent",
    "refuse_others",
    "settings",
    "tensorflow_counters",
    "tensorflow_failure",
    "tensorflow_register",
]

@type_check_only
class BuildInfo(TypedDict):
    version: str
    debug: bool
    instruction_set: str

@type_check_only
class Findings(TypedDict):
    sequence: int
    problem: str
    blamed: int | None
    calls: list[tuple[str, list[int]]]
    late: list[int]

def build_info() -> BuildInfo: ...
def settings() -> list[dict[str, Any]]: ...
def leave_to_parent(communicators: list[Communicator]) -> None: ...
def before_fork() -> None: ...
def after_fork() -> None: ...
def refuse_others(exception: object) -> None: ...
def await_others() -> None: ...
def check_dtype(descriptor: np.dtype[Any]) -> None: ...
def lent(object: object) -> tuple[object, str, dict[str, Any]] | None: ...
def inquire(
    address: str, token: bytes, tls: tuple[str, str, str] | None, timeout: float
) -> dict[str, Any]: ...
def diagnose(
    world_size: int,
    statements: list[tuple[int, list[tuple[int, str | None, int, bool]], list[int], float]],
) -> Findings | None: ...
def tensorflow_register() -> None: ...
def tensorflow_counters() -> dict[str, int]: ...
def tensorflow_failure(message: str) -> GradringError | None: ...

# settings: written by make settings

@type_check_only
class Options(TypedDict, total=False):
    streams: int | None
    checksum: bool | None
    stall_timeout: float | None
    stall_warning: float | None

@type_check_only
class SettingValues:
    __dataclass_fields__: ClassVar[dict[str, Any]]
    def __init__(self, **values: Any) -> None: ...
    interface: str | None
    port: tuple[int, int] | None
    join: tuple[str, ...] | None
    token: bytes | None
    require_auth: bool
    tls: Any | None
    transport: str
    streams: int
    checksum: bool
    algorithm: str
    reproducible: bool
    wire_dtype: str | None
    timeout: float
    stall_timeout: float
    stall_warning: float
    log: int | None
    log_dir: Path | None
    flight_dir: Path | None
    trace: Path | None
    prometheus_port: int | None
    prometheus_address: str

# end of settings

@final
class Work:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...

@type_check_only
class Gossip(TypedDict):
    rank: int
    lateness_s: dict[int, tuple[float, float]]  # by peer: since the start, and of late
    note: bytes

@type_check_only
class Door(TypedDict):
    listen: str | None
    ports: tuple[int, int] | None
    interface: str | None
    announce: str | None
    job: str
    token: bytes
    tls: tuple[str, str, str] | None

@final
class Participant:
    def __new__(
        cls,
        *,
        group: Communicator | None,
        addresses: Sequence[str],
        patience: float,
        door: Door,
    ) -> Participant: ...
    @property
    def peer(self) -> tuple[bytes, str]: ...
    def found(
        self, peers: list[tuple[bytes, str]], generation: int, least: int, most: int
    ) -> None: ...
    def join(self, addresses: list[str], least: int, most: int) -> None: ...
    def agree(self) -> tuple[int, int, list[str]] | None: ...
    def connected(self, group: Communicator) -> None: ...
    def reform(self, unreached: list[int]) -> None: ...
    @property
    def joiners(self) -> int: ...
    def finish(self) -> None: ...
    def leave(self, tells: bool) -> None: ...

@final
class Communicator:
    def __new__(
        cls,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        addresses: Sequence[str],
        door: Door,
        settings: dict[str, str],
        follows: int | None = None,
        agreed: tuple[Participant, tuple[int, int, list[str]]] | None = None,
    ) -> Communicator: ...
    @property
    def id(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def hosts(self) -> list[str]: ...
    @property
    def transport(self) -> str: ...
    @property
    def memory_not_shared(self) -> dict[int, str]: ...
    def all_reduce(self, arrays: object, op: str, name: str) -> None: ...
    def all_reduce_async(self, arrays: object, op: str, name: str) -> Work: ...
    def reduce_scatter(self, arrays: object, op: str, counts: list[int], name: str) -> None: ...
    def all_gather(self, arrays: object, counts: list[int], name: str) -> None: ...
    def broadcast(self, arrays: object, root: int, name: str) -> None: ...
    def barrier(self) -> None: ...
    def stats(self) -> RankStats: ...
    def gossip(self) -> list[Gossip]: ...
    def note(self, note: bytes, now: bool) -> None: ...
    def write_records_to(self, directory: str | PathLike[str]) -> None: ...
    def start_trace(self, limit: int) -> None: ...
    def take_trace(self) -> bytes | None: ...
    @property
    def launched(self) -> int: ...
    @property
    def has_failed(self) -> bool: ...
    def begin_step(self, leaves_alike: bool) -> None: ...
    def end_step(self, left: str | None) -> tuple[int, int]: ...
    def abort(self, reason: str) -> None: ...
    def fail_without_memory(self, bytes: int, what: str) -> NoReturn: ...
    def close(self) -> None: ...
