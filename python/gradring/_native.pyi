from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, final, type_check_only

from numpy.typing import NDArray

from gradring.errors import GradringError

__all__ = [
    "Communicator",
    "Work",
    "build_info",
    "tensorflow_counters",
    "tensorflow_failure",
    "tensorflow_register",
]

@type_check_only
class BuildInfo(TypedDict):
    version: str
    debug: bool
    instruction_set: str

def build_info() -> BuildInfo: ...
def tensorflow_register() -> None: ...
def tensorflow_counters() -> dict[str, int]: ...
def tensorflow_failure(message: str) -> GradringError | None: ...

@final
class Work:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...

_Arrays: TypeAlias = NDArray[Any] | list[NDArray[Any]]

@final
class Communicator:
    def __new__(
        cls,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        listen: str | None,
        interface: str | None,
        announce: str | None,
        addresses: Sequence[str],
        token: bytes,
        tls: tuple[str, str, str] | None,
        timeout: float,
        transport: str,
        algorithm: str,
        reproducible: bool,
        wire_dtype: str | None,
        streams: int,
        stall_warning: float,
    ) -> Communicator: ...
    @property
    def id(self) -> int: ...
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
    def all_reduce(self, arrays: _Arrays, op: str, name: str) -> None: ...
    def all_reduce_async(self, arrays: _Arrays, op: str, name: str) -> Work: ...
    def reduce_scatter(self, arrays: _Arrays, op: str, counts: list[int], name: str) -> None: ...
    def all_gather(self, arrays: _Arrays, counts: list[int], name: str) -> None: ...
    def broadcast(self, arrays: _Arrays, root: int, name: str) -> None: ...
    def barrier(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
