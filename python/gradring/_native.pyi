from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    NoReturn,
    Protocol,
    TypedDict,
    TypeVar,
    final,
    type_check_only,
)

import numpy as np
from typing_extensions import Never, Self, disjoint_base

from gradring.errors import GradringError
from gradring.stats import RankStats

__all__ = [
    "ALGORITHMS",
    "SURVIVABLE",
    "Block",
    "Collective",
    "Communicator",
    "Config",
    "Listening",
    "ParameterClient",
    "ParameterServer",
    "Participant",
    "Plan",
    "Work",
    "after_fork",
    "await_others",
    "before_fork",
    "build_info",
    "check_dtype",
    "check_plain",
    "check_readable",
    "check_unused",
    "diagnose",
    "end_by_sigterm",
    "inquire",
    "leave_to_parent",
    "lent",
    "refuse_others",
    "settings",
    "tensorflow_counters",
    "tensorflow_failure",
    "tensorflow_register",
    "time_collective",
]

_T = TypeVar("_T")

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

@type_check_only
class Timing(TypedDict):
    algorithm: str
    seconds: float
    first_seconds: float
    pieces: int
    busiest_line: float
    busiest_rank: float
    bandwidth_bound_s: float
    latency_bound_s: float

ALGORITHMS: list[str]
SURVIVABLE: list[str]

def build_info() -> BuildInfo:
    """How the extension was built.

    Returns:
        A dict with `version`; `debug`, whether it was built without optimization; and
        `instruction_set`, the one in which reductions are computed.
    """

def settings() -> list[dict[str, Any]]: ...
def leave_to_parent(communicators: list[Communicator]) -> None: ...
def end_by_sigterm() -> None: ...
def before_fork() -> None: ...
def after_fork() -> None: ...
def refuse_others(exception: object) -> None: ...
def await_others() -> None: ...
def check_dtype(descriptor: np.dtype[Any]) -> None: ...
def check_plain(object: object) -> None: ...
def check_readable(array: np.ndarray[Any, Any]) -> None: ...
def check_unused(arrays: object) -> None: ...
def lent(object: object) -> tuple[object, str, dict[str, Any]] | None: ...
def inquire(address: str, token: bytes, tls: Any, timeout: float) -> dict[str, Any]: ...
def diagnose(
    world_size: int,
    statements: list[tuple[int, list[tuple[int, str | None, int, bool]], list[int], float]],
) -> Findings | None: ...
def time_collective(
    network: object, sizes: list[int], algorithm: str, splits: list[int] | None = None
) -> list[Timing]: ...
def tensorflow_register() -> None: ...
def tensorflow_counters() -> dict[str, int]: ...
def tensorflow_failure(message: str) -> GradringError | None: ...

# settings: written by make settings

@type_check_only
class Options(TypedDict, total=False):
    streams: int | None
    checksum: bool | None
    rack: str | None
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
    transport: Literal["auto", "tcp", "shm"]
    streams: int
    checksum: bool
    algorithm: str
    reproducible: bool
    wire_dtype: Literal["bfloat16", "float16"] | None
    rack: str | None
    timeout: float
    stall_timeout: float
    stall_warning: float
    kernel: Literal["avx512", "avx2", "scalar"] | None
    log: int | None
    log_dir: Path | None
    flight_dir: Path | None
    trace: Path | None
    prometheus_port: int | None
    prometheus_address: str
    as_horovod: bool
    as_mwms: bool
    with_strategy: bool
    servers: bool
    verify: Path | None
    claims: str | None

# end of settings

@final
class Collective:
    @staticmethod
    def all_reduce(op: str) -> Collective: ...
    @staticmethod
    def reduce(op: str, root: int) -> Collective: ...
    @staticmethod
    def reduce_scatter(op: str, counts: list[int]) -> Collective: ...
    @staticmethod
    def all_gather(counts: list[int]) -> Collective: ...
    @staticmethod
    def broadcast(root: int) -> Collective: ...
    @staticmethod
    def gather(root: int, chunk: int) -> Collective: ...
    @staticmethod
    def scatter(root: int, chunk: int) -> Collective: ...
    @staticmethod
    def send(to: int) -> Collective: ...
    @staticmethod
    def receive(source: int) -> Collective: ...
    @staticmethod
    def all_to_all() -> Collective: ...
    @staticmethod
    def all_to_all_v(sent: list[int], received: list[int]) -> Collective: ...

@disjoint_base
class Plan(Generic[_T]):
    def __new__(cls, communicator: object, arrays: _T, op: str, name: str) -> Self: ...
    @property
    def arrays(self) -> _T: ...
    def __class_getitem__(cls, _arrays: Any) -> type[Any]: ...
    def __call__(self, *args: Never, **kwargs: Never) -> _T: ...
    def _begin(self) -> Work: ...

@final
class Work:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...

@type_check_only
class Gossip(TypedDict):
    rank: int
    lateness_s: dict[int, tuple[float, float]]  # by peer: since the start, and of late
    note: bytes

@final
class Config:
    """Settings of this process in groups, with its addresses and its job.

    Args:
        settings: Object with all settings as attributes.
        listen: `host:port` at which this process listens; None for a free port.
        announce: `host:port` by which other ranks reach this process.
        job: Name of the job; empty for none.
        versions: Versions of the libraries that compute, for comparison with other ranks.

    Raises:
        ConfigError: A setting cannot be used.
    """

    def __new__(
        cls,
        settings: SettingValues,
        *,
        listen: str | None = None,
        announce: str | None = None,
        job: str = "",
        versions: str = "",
    ) -> Config: ...
    def listening_at(self, listen: str | None) -> Config:
        """The same, of a process that listens elsewhere."""
    @property
    def listen(self) -> str | None: ...
    @property
    def ports(self) -> tuple[int, int] | None: ...
    @property
    def announce(self) -> str | None: ...
    @property
    def job(self) -> str: ...
    @property
    def keeps_strangers_out(self) -> bool:
        """True if a token or certificates protect the group."""

@type_check_only
class Progress(Protocol):
    def left(self) -> None: ...
    def agreed(self, joins_again: bool) -> None: ...
    def not_formed(self, error: Exception) -> None: ...

@final
class Participant:
    def __new__(
        cls,
        *,
        group: Communicator,
        addresses: Sequence[str],
        workers: tuple[int, int],
        worker_timeout: float,
        config: Config,
    ) -> Participant: ...
    @property
    def peer(self) -> tuple[bytes, str]: ...
    def found(self, peers: list[tuple[bytes, str]], generation: int) -> None: ...
    def next_group(
        self, last: Communicator, progress: Progress, newcomers_failed: bool
    ) -> tuple[Communicator, str] | None: ...
    @property
    def has_state(self) -> bool: ...
    def establish(self, group: Communicator) -> None: ...
    @property
    def joiners(self) -> list[str]: ...
    @property
    def reconfigured_by(self) -> str | None: ...
    def finish(self) -> None: ...
    def leave(self, tells: bool) -> None: ...

@final
class Block:
    @property
    def address(self) -> int: ...

@final
class Listening:
    @property
    def address(self) -> str: ...

@final
class Communicator:
    def __new__(
        cls,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        addresses: Sequence[str],
        config: Config,
        listening: tuple[Listening, Sequence[int]] | None = None,
        part: tuple[str, Sequence[int]] | None = None,
    ) -> Communicator: ...
    def listen_beside(self, ports: tuple[int, int] | None) -> Listening: ...
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
    def versions(self) -> list[str]: ...
    @property
    def reachable_from_other_hosts(self) -> list[int]: ...
    @property
    def transport(self) -> str: ...
    @property
    def memory_not_shared(self) -> dict[int, str]: ...
    def allocate(self, bytes: int) -> Block | None: ...
    def all_reduce(self, arrays: object, op: str, name: str) -> None: ...
    def run(
        self,
        collective: Collective,
        arrays: object,
        name: str,
        shape: tuple[int, ...] | None = None,
    ) -> None: ...
    def start(
        self,
        collective: Collective,
        arrays: object,
        name: str,
        shape: tuple[int, ...] | None = None,
    ) -> Work: ...
    def barrier(self) -> None: ...
    def start_barrier(self) -> Work: ...
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
    def begin_step(self, collective_exit: bool) -> None: ...
    def end_step(self, left: str | None) -> tuple[int, int]: ...
    def abort(self, reason: str) -> None: ...
    def fail_without_memory(self, bytes: int, what: str) -> NoReturn: ...
    def elements_of_rows(
        self, rows: list[int], elements: int, bytes: int, call: str
    ) -> list[int]: ...
    def close(self) -> None: ...

@type_check_only
class GradientCounts(TypedDict):
    # Counts of all workers' gradients since the servers were last restored. Server 0 counts; other
    # servers have 0 and {}, and a worker has the counts of up to a second ago. Initial weights are
    # no gradient.
    queue: int  # gradients that wait in the queue
    pushes: int  # gradients in updates
    updates: int
    dropped_late: int
    dropped_overflow: int
    dropped_lost: int
    held_overflow: int  # gradients that had to wait because the queue was full
    superfluous: int  # initial weights of a worker that was not the first
    staleness: dict[
        int, int
    ]  # number of applied gradients by staleness in versions; 63 stands for 63 and more

@type_check_only
class CountsOfServers(GradientCounts):
    version: int  # of the weights

@type_check_only
class ServerStats(GradientCounts):
    # Bytes, connections, staged gradients and counts of gradients are those of all optimizers, the
    # rest is that of the first.
    server: int
    optimizers: int  # of the program; each has versions and snapshots of its own
    address: str  # where it listens, with the port that it got
    term: int  # grows whenever servers are restored; 0 before the first
    version: int  # of the weights: 1 for the initial ones, and 1 more with each update
    history: int  # equal on two servers at one version exactly if they applied the same log
    applied: dict[
        int, tuple[int, int, int]
    ]  # by worker, its last push: (term, incarnation, number)
    replicas: list[tuple[int, int]]  # version and history of its copies of other servers' shards
    staged: int  # gradients that wait here
    bytes_sent: int
    bytes_received: int
    connections: int
    restored: (
        int  # how often the servers were restored since this process started (server 0; else 0)
    )
    members: list[int]  # workers that count now (server 0; else [])
    left: list[int]  # workers that have left (server 0; else [])

@type_check_only
class ClientStats(TypedDict):
    worker: int
    version: int  # of the weights that the last pull gave; 0 before
    term: int
    pushes: int  # that push() took
    dropped: int  # of which are in no update, and will be in none, as far as servers have told
    pulls: int
    unsettled: int  # pushes that are not known to be applied or dropped
    bytes_sent: int
    bytes_received: int
    reconnects: int
    transport: str  # of the links to servers: "shm", "tcp", "shm+tcp"; "" while there are none
    waited_s: float  # in pull()
    servers: CountsOfServers

@final
class ParameterServer:
    """Parameter server: keeps a part of the weights, and applies the gradients of workers.

    Args:
        index: Index of this server. Server 0 orders the updates of all.
        addresses: `host:port` of all servers, the same list in the same order in every process.
            This server listens at its own entry; `listen`, `interface` and `announce` of `config`
            are not used.
        rules: Values as text, by name: `workers` at the start, whose indices are 0 .. workers - 1;
            `staleness`, `aggregate`, `overflow`, `late` (or "keep"), `backup`, `snapshot_every`,
            `replicas` as in `gradring.updates.ParameterServer`; `combine`, the "mean" or the "sum"
            of the gradients of one update.
        directory: Directory of this server's snapshots, created if it is missing. With None, the
            loss of a server means that training continues from a worker's weights, with new
            optimizer slots. After a successful job it is renamed to `directory.finished`.
        worker_timeout: Seconds after which a lost worker is lost for good.
        config: Settings. `timeout` bounds the wait for the first worker. `checksum` checks arrays
            too; everything else is always checked. `transport` chooses the kind of links, as
            between ranks.

    Listens from here on. All servers need the same rule; workers and servers in any order of start.

    Raises:
        ConfigError: A value that cannot be used, by name; a directory that another living process
            has.
        RendezvousError: The own address cannot be listened at.
    """

    def __new__(
        cls,
        *,
        index: int,
        addresses: Sequence[str],
        rules: dict[str, str],
        directory: str | PathLike[str] | None = None,
        worker_timeout: float = 60.0,
        config: Config,
    ) -> ParameterServer: ...
    def serve(self) -> None:
        """Serves until every worker has left, or has been lost for `worker_timeout` seconds.

        Lets signal handlers run (Ctrl-C raises KeyboardInterrupt here). Call it once, from any
        thread; `stats()` and `close()` may be called from others meanwhile.

        Raises:
            RendezvousError: No worker came within `timeout`, or (not server 0) server 0 did not.
            PeerLostError: No worker has left and all were lost for good; or server 0 was lost.
            AbortedError: `close()` was called.
            ProtocolError: A defect.
        """
    def stats(self) -> ServerStats: ...
    def close(self) -> None:
        """Ends `serve()`, if it is under way, and gives port and directory free."""

@final
class ParameterClient:
    """Connections of one worker to all servers, in a thread of their own.

    A program calls begin() once, pull() and push() in each step, and leave() at the end.

    Args:
        worker: Index of this worker, from 0; only one living process may have it.
        addresses: As for `ParameterServer`.
        config: Settings. `timeout` bounds the absence of a server, and `stall_timeout` the wait
            for other workers; `checksum` and `transport` are those of a server.
        optimizer: Number of optimizers that this worker began to use before. Each has a client of
            its own, with the same number in all workers.

    The connections are opened by begin().
    """

    def __new__(
        cls, *, worker: int, addresses: Sequence[str], config: Config, optimizer: int = 0
    ) -> ParameterClient: ...
    @property
    def id(self) -> int:
        """Number of this client in the process, by which TensorFlow's ops find it."""
    def begin(
        self,
        variables: Sequence[tuple[str, Sequence[int], str, bool]],
        optimizer: str,
        placement: dict[int, int] | None = None,
    ) -> None:
        """Says what is trained, the same in all workers, and starts to connect. Does not wait.

        Args:
            variables: Name, shape, dtype ("float32", "float64", "bfloat16" or "float16"; others
                raise) and whether weight decay counts for it.
            optimizer: JSON: {"sgd": {"momentum": 0.0, "nesterov": false}} |
                {"adagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-7}} | {"adam":
                {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": false}}
                (AdamW is adam with a weight decay in push()). Likewise rmsprop, adadelta, adamax,
                nadam, lion and ftrl, with Keras' names. All keys must be there. Nadam also has
                "product_dtype", the dtype of the first variable.
            placement: By index of a variable, the server that is to have it whole. Others are
                spread by size, large ones split between rows.

        Raises:
            ConfigError: A value that cannot be used, by name.
        """
    def pull(self, into: Sequence[object]) -> int | None:
        """Waits for leave to go on, and fills `into` with the weights to compute with.

        Args:
            into: For each variable a writable C-contiguous numpy array of its shape and dtype.

        Returns:
            The oldest version of the weights (1 or more); or None, then nothing was filled in:
            initial weights are wanted, push_initial() next.

        Raises:
            PeerLostError: A server could not be reached for `timeout` s; names server and address.
            CollectiveTimeoutError: The rule did not let this worker go on for `stall_timeout` s.
            MismatchError: Another worker has variables of other names, shapes or dtypes, another
                optimizer or placement, or began to use several optimizers in another order.
            AuthenticationError, ConfigError: A server turns this process away; ConfigError also if
                another living process is this worker.
            GradringError: pull() twice without a push in between.
            AbortedError: The client is closed.
        """
    def push_initial(self, weights: Sequence[object]) -> bool:
        """Sends the initial weights, after a pull() that returned None; otherwise as push()."""
    def push(
        self, gradients: Sequence[object], learning_rate: float, weight_decay: float = 0.0
    ) -> bool:
        """Copies the gradients, and sends the copies while the program continues.

        Args:
            gradients: One entry for each variable, after clipping: an array of its shape and
                dtype, a pair (indices, rows), or None. Indices of rows are int32 or int64, in any
                order; rows are of that dtype, and repeated ones are summed from left to right.
            learning_rate: Learning rate of this step.
            weight_decay: As Keras has it; 0 for none.

        Returns:
            True if the gradient can count. False if the servers were restored to an earlier state
            than the weights of this gradient, or got another worker's initial weights first. Then
            pull() returns the weights to continue with.

        Raises:
            As pull(), at once, if something has gone wrong meanwhile; TypeError, ValueError for
            arrays that do not fit.
        """
    def stats(self) -> ClientStats: ...
    def leave(self) -> None:
        """Waits until the rule has applied or queued the last push, and leaves the job.

        No other worker waits for this one afterwards. Gradients still in the queue are dropped,
        and count as lost. Raises as pull(). Call it before the process ends (atexit): a process
        that ends without it is a lost worker.
        """
    def close(self) -> None:
        """Closes at once, without a message; the servers count this worker as lost."""
