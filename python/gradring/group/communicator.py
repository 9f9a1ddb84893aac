"""A connected group of ranks: forming, splitting, statistics, traces and closing."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import logging
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast, overload

import numpy as np

from gradring import _native
from gradring.config import parse
from gradring.config.settings import takes_settings
from gradring.config.values import Settings, TlsFiles, Transport, WireDtype, check_token
from gradring.errors import AbortedError, ConfigError, GradringError
from gradring.group import arrays, forks
from gradring.group.collectives import Collectives, all_gather_bytes
from gradring.group.open_groups import OpenGroups
from gradring.group.steps import Step, described
from gradring.group.together import agreed
from gradring.machine import versions
from gradring.records import lateness
from gradring.stats import SlowestRank, Stats

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray
    from typing_extensions import Unpack

    from gradring._native import Options


_log = logging.getLogger("gradring")

#: Default capacity of a trace in collectives: about 25 MB of memory, minutes of training.
TRACE_LIMIT = 50_000


class Communicator(Collectives):
    """A connected group of ranks with an order.

    All ranks must call the same collectives in the same order, with the same dtype, shapes, op and
    name. A difference raises `MismatchError` on every rank before a wrong value is written.

    Arrays are C-contiguous, writable buffers of float32, float64, float16, bfloat16 (ml_dtypes),
    int32, int64 or uint8. They can be numpy arrays, or anything in host memory with the buffer
    protocol or DLPack, such as PyTorch's tensors. A list of arrays of one dtype is one bucket: it
    is reduced together, without copies. Do not read or write the arrays of a collective while it
    runs. After a failed collective, their contents are undefined.

    Call collectives from one thread at a time: a collective that starts while another thread is
    inside a blocking one fails the group. Any thread can wait for a work. A signal handler can call
    `close`, `abort` and `stats`; it can call collectives only if none is waiting.

    16-bit floats accumulate in float32 and are rounded once. Integer sums and products wrap; the
    integer mean is rounded towards zero. A NaN wins every min and max.

    Args:
        rank: This process's index, from 0.
        world_size: Number of processes.
        rendezvous: ``host:port`` at which rank 0 listens; not needed in a world of one.
        listen: ``host:port`` at which this rank listens; by default a free port on the interface
            that reaches the rendezvous.
        announce: ``host:port`` at which the others reach this rank, if it differs from ``listen``,
            for example behind a forwarded port.
        addresses: ``host:port`` of every rank, if known beforehand. Messages about missing ranks
            then report the state of these addresses.
        token: The job's shared secret, text in UTF-8 or bytes; a peer without it is rejected.
        require_auth: Refuse to join without a token; None: as ``GRADRING_REQUIRE_AUTH`` says.
        interface: Name or IP address of the network interface at which this rank listens. It
            replaces the hosts of ``rendezvous`` and ``listen``, but not their ports. Default: the
            hosts of these two.
        ports: First and last port of a range. This rank listens at the first free port in it if
            ``listen`` gives none; rank 0 listens at the rendezvous. None: any free port.
        tls: Certificates for TLS 1.3, which then encrypts all TCP traffic; every rank must have
            some. None: no TLS.
        transport: ``auto``: shared memory between ranks of one host, TCP between hosts; ``tcp``:
            TCP everywhere; ``shm``: shared memory everywhere, or `ConfigError`.
        timeout: Seconds in which the group must form.
        algorithm: ``auto`` chooses by the size of the buffer, the number of ranks, their hosts, and
            times measured when the group forms. Or one of ``ring``, ``direct``, ``one_shot``,
            ``star``, ``hierarchical``, ``halving`` and ``doubling``. Or a list such as
            ``one_shot:64KiB,direct``: each algorithm up to its size, the last for larger buffers. A
            collective that cannot use the given algorithm uses ``auto``. ``hierarchical`` needs
            several hosts, and several ranks on one host or several hosts in one rack.
        reproducible: Makes every sum the left fold ``g0 + g1 + ... + gN-1`` in rank order, for
            every algorithm, transport and division into buckets.
        wire_dtype: ``bfloat16`` or ``float16``, which halves the traffic of float32 reductions of
            64 KiB and more. Contributions are rounded to this dtype before they are sent. The owner
            of each element sums them in float32 and rounds the result once. Smaller reductions,
            such as losses, metrics and statistics, stay exact. None: elements are sent in their own
            dtype.
        job_id: Identifier that separates this job from others at the same addresses; ranks with
            different identifiers do not form a group. None: no identifier.
        streams: TCP connections with each peer, 1 to 16; 1 by default. Several connections fill a
            link that limits each one, such as a cloud's limit per flow or a long path; on other
            links they only add overhead. Results have the same bits. Shared memory does not use
            this setting.
        checksum: Adds a CRC-32C to every 64 KiB of a link, TCP or shared memory, and checks it
            before the bytes are used. Bytes changed by a network card, a switch, a proxy or memory
            then raise a `ProtocolError` on every rank; the error names the link. Off by default.
            ``gradring bench all-reduce --checksum`` measures the cost.
        rack: Name of this rank's rack, at most 24 characters. Hosts with the same name share one
            uplink. Larger buffers are reduced inside racks before they leave them. None: unknown;
            if one rank has None, the whole group ignores racks.
        stall_timeout: Seconds without any movement after which a collective fails although all
            ranks are alive; 1800 by default. One reason is a rank that does not enter it. A dead or
            silent rank is detected long before, independent of this value.
        stall_warning: Seconds without any movement in a collective after which a log line (logger
            ``gradring``) names the ranks that it waits for; 30 by default. Further lines follow
            after twice as long, four times as long, and so on.

    Attributes:
        rank: This process's index.
        world_size: Number of processes.
        host: The name of this rank's host.
        hosts: The names of all ranks' hosts, by rank.
        local_rank: This process's index among the ranks of its host.
        local_size: Number of ranks on its host.
        generation: Number that grows each time the processes of an elastic job form a new group.

    Raises:
        ConfigError: A setting is invalid.
        RendezvousError: The group did not form in time; names the missing ranks.
        AuthenticationError: A peer does not know the token, or has no certificate that this rank
            accepts.

    Examples:
        >>> with gradring.Communicator(rank=0, world_size=1) as alone:
        ...     alone.all_reduce(np.ones(3, np.float32), op="mean")
        array([1., 1., 1.], dtype=float32)
        >>> comm  # as all examples have it, here on rank 0
        <gradring.Communicator rank 0 of 2 on ...>
        >>> comm.rank, comm.world_size, comm.local_rank, comm.local_size, comm.generation
        (0, 2, 0, 2, ...)
        >>> comm.hosts[1] == comm.host
        True
    """

    local_rank: int
    local_size: int
    generation: int

    @takes_settings
    def __init__(
        self,
        rank: int,
        world_size: int,
        rendezvous: str = "",
        token: bytes | str | None = None,
        transport: Transport = "auto",
        timeout: float = 300.0,
        algorithm: str = "auto",
        reproducible: bool = False,
        wire_dtype: WireDtype | None = None,
        *,
        listen: str | None = None,
        interface: str | None = None,
        ports: tuple[int, int] | None = None,
        tls: TlsFiles | None = None,
        announce: str | None = None,
        addresses: Sequence[str] = (),
        require_auth: bool | None = None,
        job_id: str | None = None,
        **settings: Unpack[Options],
    ) -> None:
        values = Settings.from_environ(
            {},
            token=token,
            transport=transport,
            timeout=timeout,
            algorithm=algorithm,
            reproducible=reproducible,
            wire_dtype=wire_dtype,
            interface=interface,
            tls=tls,
            **settings,
        )
        parse.argument_place(rank, world_size)
        if world_size > 1 and not rendezvous:
            raise ConfigError("rendezvous is missing; give the host:port at which rank 0 listens")
        if ports is not None:
            values = replace(values, port=parse.ports("-".join(map(str, ports)), "ports"))
        if announce is not None:
            announce = parse.address(announce, "announce")
        check_token(rank, world_size, values.token, require_auth)
        config = values.for_core(listen=listen, announce=announce, job_id=job_id)
        self._join(rank, world_size, rendezvous, addresses, config)

    def _join(
        self,
        rank: int,
        world_size: int,
        rendezvous: str,
        addresses: Sequence[str],
        config: _native.Config,
    ) -> None:
        """Joins a group, unless a process from which this one was forked holds the same rank."""
        if world_size > 1:
            rendezvous = parse.address(rendezvous, "rendezvous")
        forks.check_not_held(rendezvous, rank)
        _native.end_by_sigterm()
        self._begin(rank, world_size, rendezvous, addresses, config)

    def _begin(
        self,
        rank: int,
        world_size: int,
        rendezvous: str,
        addresses: Sequence[str],
        config: _native.Config,
        listening: tuple[_native.Listening, Sequence[int]] | None = None,
        part: tuple[str, Sequence[int]] | None = None,
    ) -> None:
        """Forms the group; the arguments are already checked."""
        self._config = config
        #: Name and world ranks of a group made by `split`; None for the group of all ranks.
        self._part = part
        self._native = _native.Communicator(
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            addresses=list(addresses),
            config=config,
            listening=listening,
            part=part,
        )
        self._held_rank: forks.HeldRank | None = None
        self._trace_path: Path | None = None
        #: Context managers registered by `around_close`.
        self._around_close: list[AbstractContextManager[None]] = []
        #: Hooks registered by `at_new_group`; a hook returns None once its object is gone.
        self._at_new_group: list[Callable[[], Callable[[Communicator], None] | None]] = []
        #: Set while `gradring.elastic.run` runs, in an elastic job.
        self._participant: _native.Participant | None = None
        #: The `Step` that the program is in.
        self._step: Step | None = None
        self._describe(rendezvous)
        open_groups.add(self)

    def _describe(self, rendezvous: str) -> None:
        """Copies the group's facts from the core, for the first group and each next one."""
        native = self._native
        self._rendezvous = rendezvous
        self.rank = native.rank
        self.world_size = native.world_size
        self._place = arrays.Place(self.rank, self.world_size)
        self.local_rank = native.local_rank
        self.local_size = native.local_size
        self.hosts = native.hosts
        self.host = self.hosts[self.rank]
        self.generation = native.generation
        if self._held_rank is not None:
            self._held_rank.leave()
        several = self.world_size > 1
        self._held_rank = forks.HeldRank(rendezvous, self.rank) if several else None
        for peer, reason in native.memory_not_shared.items():
            _log.warning(
                "rank %d uses TCP to rank %d of the same host: %s", self.rank, peer, reason
            )
        if self.rank == 0 and self._part is None:
            _warn_of_versions(*versions.differences(native.versions))

    @overload
    def split(self, color: int, key: int = 0, *, name: str | None = None) -> Communicator: ...
    @overload
    def split(self, color: None, key: int = 0, *, name: str | None = None) -> None: ...
    def split(
        self, color: int | None, key: int = 0, *, name: str | None = None
    ) -> Communicator | None:
        """Forms one group for each ``color``, of the ranks that pass it; every rank calls it.

        Each group has its own connections, order of collectives and failures. Settings, token and
        certificates are those of this group. Groups can work at the same time, and each is closed
        separately, before or after this one. A group listens at another port: one of the range of
        ``port=``, or any free port if there is no range.

        Args:
            color: The group that this rank joins; any whole number. None: no group.
            key: Ranks of the new group are in the order of their keys; equal keys are in the order
                of the ranks in this group. Default 0.
            name: Name of the group in error messages; by default "the group of color" and the
                color.

        Returns:
            The group, or None where ``color`` is None.

        Raises:
            TypeError: ``color`` or ``key`` is not a whole number; nothing is sent then.
            ConfigError: The group belongs to a running elastic job, whose ranks change; or a rank
                has an ``announce`` address, which is valid for one port only.
            RendezvousError: A group did not form within the timeout of this one.
            GradringError: As in `all_reduce`; also if a rank of the new group makes this group
                fail.

        Examples:
            >>> with comm.split(color=0, key=-rank, name="reversed") as group:
            ...     group.rank, group.world_size, group.all_gather(np.array([rank]))
            (1, 2, array([1, 0]))
            >>> group = comm.split(color=0 if rank == 0 else None)  # None on rank 1
            >>> group
            <gradring.Communicator rank 0 of 1 on ...>
        """
        color = None if color is None else _whole_number(color, "color")
        key = _whole_number(key, "key")
        if self._participant is not None:
            raise ConfigError(
                "split: the ranks of an elastic job change; split a group that is not elastic"
            )
        announced = self._config.announce
        # The port must be open before other ranks receive its address.
        listening = None
        if self.world_size > 1 and announced is None:
            listening = listen_beside(self)
        address = listening.address if listening is not None else ""
        said = self.all_gather_object([color, key, address, announced], name="split")
        fixed = [(rank, at) for rank, (*_, at) in enumerate(said) if at is not None]
        if fixed:
            raise ConfigError(
                f"split: rank {fixed[0][0]} is announced at {fixed[0][1]}, and nothing says where "
                "another port of it would be; give no announce="
            )
        if color is None:
            return None
        places = [(of, rank) for rank, (theirs, of, *_) in enumerate(said) if theirs == color]
        members = [rank for _, rank in sorted(places)]
        addresses = [said[rank][2] for rank in members] if len(members) > 1 else []
        group = Communicator.__new__(Communicator)
        group._begin(
            members.index(self.rank),
            len(members),
            addresses[0] if addresses else "",
            addresses,
            config=self._config.listening_at(None),
            listening=(listening, members) if listening is not None and addresses else None,
            part=(
                name or f"the group of color {color}",
                [self._world_ranks[member] for member in members],
            ),
        )
        return group

    @property
    def _world_ranks(self) -> Sequence[int]:
        """Rank of each member in the group of all ranks, indexed by its rank in this group."""
        return range(self.world_size) if self._part is None else self._part[1]

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """Returns a new array for `all_reduce`, in memory that all ranks of this host read.

        An `all_reduce` of such an array makes no copies for the other ranks, if it is larger than
        64 KiB, or 256 KiB in a world of two. Each rank reads the arrays of its peers where they
        are. A contiguous view counts as such an array. Either all ranks pass one in a call, or none
        does; otherwise all ranks get a `MismatchError`. The sums are those of
        ``reproducible=True``.

        For everything else the array is an ordinary one: for other collectives, other groups and
        lists of arrays, and with a ``wire_dtype`` or an ``algorithm`` other than ``direct``. An
        elastic job that forms its group again must make new arrays to have the advantage. The
        memory is ordinary on all ranks if they do not all share memory, with ``checksum``, and
        under a limit on addresses or files (``ulimit -v``, ``ulimit -f``).

        Nothing is sent. Each array takes at least 64 KiB. The memory is free again once no array
        needs it, even after `close`. A forked process shares it: each of the two processes sees
        what the other one writes. Once the parent has no array there any more, the values are lost
        for the fork too, so it must copy what it keeps.

        Args:
            shape: As in ``numpy.empty``.
            dtype: One of those of `all_reduce`; default "float32". "bfloat16" needs the package
                ml_dtypes.

        Returns:
            A writable, C-contiguous array of zeros.

        Raises:
            TypeError: The dtype is not supported, or a length is not a whole number.
            ValueError: A length is negative.
            ConfigError: There is no memory for the array.
            AbortedError: This communicator is closed.

        Examples:
            >>> gradients = comm.empty(100_000)
            >>> gradients[:] = rank
            >>> comm.all_reduce(gradients)[:3]
            array([1., 1., 1.], dtype=float32)
            >>> comm.stats()["collectives"]["all_reduce"]["algorithm"]
            'mapped'
        """
        return arrays.empty(self._native, shape, dtype)

    def step(self, *, abort_on_exception: bool = True) -> Step:
        """Returns a context manager; its body is one step of the program.

        Every rank numbers its steps, and every collective compares the numbers. If a rank leaves a
        step early and is then one step ahead, all ranks get a `MismatchError`, even if names and
        shapes are the same in every step.

        An exception that leaves the step after one of its collectives has begun ends the group: the
        other ranks get an `AbortedError` with its text. After an exception before the first
        collective the program can continue, and the step counts. If other ranks do not leave that
        step too, the next collective raises a `MismatchError`. The same is true of the end of the
        data (``StopIteration``, ``tf.errors.OutOfRangeError``), KeyboardInterrupt and SystemExit,
        at any place in the step.

        All ranks must put the same code into steps. A step counts from its first collective on, so
        ranks can have different numbers of steps without collectives.
        `CustomCollectiveStrategy.run`, a `GradientReducer`, Keras' ``fit`` and every call of a
        ``tf.function`` are steps of their own; inside another step they are part of it.

        Args:
            abort_on_exception: False if every rank leaves the step in the same way or repeats it.
                Then no exception ends the group or counts as a step. If a single rank leaves after
                a collective, the number of the next step still differs.

        Examples:
            >>> for batch in range(2):
            ...     with comm.step():
            ...         comm.all_reduce(batch + 0.5 * rank, op="mean", name="loss")
            0.25
            1.25
        """
        return Step(self, abort_on_exception)

    def stats(self) -> Stats:
        """Returns this rank's counters and the slowest rank; docs/observability.md explains them.

        Returns:
            A dict; `gradring.stats` has the types of its entries.

        Examples:
            >>> x = comm.all_reduce(np.ones(1000, np.float32))
            >>> stats = comm.stats()
            >>> stats["collectives"]["all_reduce"]["bytes"]
            4000
            >>> print(f"{stats['waiting_s']:.4f} s waiting, {stats['moving_s']:.4f} s moving bytes")
            0... s waiting, 0... s moving bytes
        """
        own = self._native.stats()
        recent = {**self._waits(1), self.rank: own["lateness_recent_s"]}
        found = lateness.slowest(recent, range(self.world_size))
        if found is None:
            return {**own, "slowest": None}
        total = {**self._waits(0), self.rank: own["lateness_s"]}
        slowest: SlowestRank = {
            "rank": found.rank,
            "host": self.hosts[found.rank],
            "made_wait_s": lateness.made_wait_s(total, found.rank),
            "recent_s": found.skew_s,
        }
        return {**own, "slowest": slowest}

    def _waits(self, which: int) -> dict[int, dict[int, float]]:
        """Returns seconds that each rank waited for others.

        Status messages of the ranks carry these times; `which` is 0 for all time, 1 for recent.
        """
        return {
            gossip["rank"]: {rank: times[which] for rank, times in gossip["lateness_s"].items()}
            for gossip in self._native.gossip()
        }

    def trace_start(self, path: str | os.PathLike[str], *, limit: int = TRACE_LIMIT) -> None:
        """Begins the recording of a timeline; every rank calls it.

        Args:
            path: File to which `trace_stop` writes the timeline, on rank 0.
            limit: Capacity in collectives, at most 1,000,000; the last ones are kept.

        Raises:
            ConfigError: ``limit`` is not a whole number in this range.

        Examples:
            >>> comm.trace_start("timeline.json")
            >>> x = comm.all_reduce(np.ones(3, np.float32), name="gradients")
            >>> comm.trace_stop()  # None on rank 1
            PosixPath('timeline.json')
        """
        limit = parse.integer(limit, "limit", minimum=1, maximum=1_000_000)
        self._trace_path = Path(path)
        self._native.start_trace(limit)

    def trace_stop(self) -> Path | None:
        """Ends the recording and writes one timeline of all ranks; every rank calls it.

        The file is JSON in Chrome's trace format: open it at ui.perfetto.dev or chrome://tracing.

        Returns:
            The path on rank 0; None on other ranks, and if no recording was running.

        Raises:
            gradring.errors.SaveError: Rank 0 cannot write the file; raised on all ranks, and also
                an `OSError`.
            GradringError: The group failed; see `gradring.errors`.

        Examples:
            >>> import json
            >>> comm.trace_start("timeline.json")
            >>> x = comm.all_reduce(np.ones(3, np.float32), name="gradients")
            >>> path = comm.trace_stop()
            >>> if rank == 0:  # its file has the collectives of both
            ...     events = json.loads(path.read_text())["traceEvents"]
            ...     sorted(event["pid"] for event in events if "gradients" in event["name"])
            [0, 1]
        """
        path, self._trace_path = self._trace_path, None
        part = self._native.take_trace()
        if path is None or part is None:
            return None
        parts = all_gather_bytes(self, zlib.compress(part), "trace")
        with agreed(self, "write", path):
            if self.rank == 0:
                from gradring.records import records, timeline  # most programs write none

                timeline.write(path, [records.parse(zlib.decompress(part)) for part in parts])
        return path if self.rank == 0 else None

    def abort(self, reason: str) -> None:
        """Fails every pending and later work of every rank with `AbortedError` and ``reason``.

        Args:
            reason: Text for the errors of all ranks.

        Examples:
            >>> if rank == 1:
            ...     comm.abort("the loss is not finite")
            >>> comm.all_reduce(np.ones(3, np.float32), name="gradients")
            Traceback (most recent call last):
                ...
            gradring.errors.AbortedError: all_reduce(sum) 'gradients' float32[3] (collective #1):
            rank 1 on ...: aborted the communicator: the loss is not finite...; make a new
            communicator to go on
        """
        self._native.abort(reason)

    def close(self) -> None:
        """Leaves the group without an error on other ranks; can be called twice.

        A collective of this rank that is still running fails. If `init` has returned this
        communicator several times, only the last of as many `close` calls leaves the group.

        Any thread can call it, and so can a signal handler that runs while a collective waits; that
        collective then raises `AbortedError`.

        Examples:
            >>> group = comm.split(color=0)
            >>> group.all_reduce(1)
            2
            >>> group.close()
            >>> comm.all_reduce(1)  # the one that was split goes on
            2
        """
        if not open_groups.let_go(self):
            return
        around, self._around_close = self._around_close, []
        with contextlib.ExitStack() as stack:
            for observer in around:
                stack.enter_context(observer)
            try:
                if self._participant is not None:
                    self._participant.leave(tells=True)
                self._native.close()
            finally:
                # Last: a fork must not see a group as closed while another thread still closes it.
                open_groups.remove(self)
                if self._held_rank is not None:
                    self._held_rank.leave()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.abort(f"its program raised {described(error)}")
        self.close()

    def __reduce__(self) -> NoReturn:
        """A communicator cannot be pickled or copied."""
        raise TypeError(
            "a communicator cannot be pickled or copied: its connections are its process's; pass "
            "what gradring.init() needs, and call it where the communicator is to be"
        )

    def __repr__(self) -> str:
        return f"<gradring.Communicator rank {self.rank} of {self.world_size} on {self.host}>"


open_groups: OpenGroups[Communicator] = OpenGroups()


def formed(
    config: _native.Config, rank: int, world_size: int, rendezvous: str, addresses: Sequence[str]
) -> Communicator:
    """Returns a communicator for settings and a place that are already checked.

    Raises:
        GradringError: As in `Communicator`.
    """
    communicator = Communicator.__new__(Communicator)
    communicator._join(rank, world_size, rendezvous, addresses, config)
    return communicator


def core_of(communicator: Communicator) -> _native.Communicator:
    """Returns the native communicator, for observers and front ends.

    Do not keep it: in a forked process the communicator gets a native part that refuses all calls.
    """
    return communicator._native


def listen_beside(communicator: Communicator) -> _native.Listening:
    """Opens a second port of this rank, in a group of at least two, until the result is dropped.

    Its host is that of the first one. Its port is of the range ``GRADRING_PORT``, if that is set.

    Raises:
        RendezvousError: No port is free.
        AbortedError: The communicator is closed.
    """
    return communicator._native.listen_beside(communicator._config.ports)


def participant_of(
    communicator: Communicator,
    addresses: Sequence[str],
    workers: tuple[int, int],
    worker_timeout_s: float,
) -> _native.Participant:
    """Returns this process's member of an elastic job: it keeps its group, or joins `addresses`.

    The member leaves the job when the communicator is closed.
    """
    config = communicator._config
    if communicator.world_size == 1 and not addresses and config.listen is None:
        # A world of one does not listen; in an elastic job it must, at its rendezvous.
        config = config.listening_at(communicator._rendezvous or None)
    participant = _native.Participant(
        group=communicator._native,
        addresses=addresses,
        workers=workers,
        worker_timeout=worker_timeout_s,
        config=config,
    )
    communicator._participant = participant
    return participant


def continue_as(communicator: Communicator, native: _native.Communicator, rendezvous: str) -> None:
    """Replaces the communicator's native group by the next one of its elastic job.

    TensorFlow's graphs find the new group by the communicator's number, which stays the same.

    Raises:
        AbortedError: The communicator was closed meanwhile.
    """
    communicator._native.close()
    if communicator not in open_groups:  # by a signal handler, or another thread
        native.close()
        raise AbortedError("the communicator was closed while its next group was forming")
    communicator._native = native
    communicator._step = None
    communicator._describe(rendezvous)
    for hook in communicator._at_new_group:
        begin = hook()
        if begin is not None:
            begin(communicator)


def around_close(communicator: Communicator, observer: AbstractContextManager[None]) -> None:
    """Makes `close` enter `observer` before it leaves the group, and exit it afterwards."""
    communicator._around_close.append(observer)


def at_new_group(communicator: Communicator, begin: Callable[[Communicator], None]) -> None:
    """Calls `begin` whenever an elastic job has formed its next group.

    Counters of the next group start at 0. A bound method is kept by a weak reference, so that it
    does not keep its object alive.
    """
    hook = weakref.WeakMethod(begin) if inspect.ismethod(begin) else lambda: begin
    communicator._at_new_group.append(hook)


def _whole_number(given: object, argument: str) -> int:
    """Returns a whole number of Python or numpy as an `int`.

    Raises:
        TypeError: `given` is something else, or a bool.
    """
    if not isinstance(given, int | np.integer) or isinstance(given, bool):
        raise TypeError(f"split: {argument}={given!r} is no whole number")
    return int(given)


def _leave_to_parent() -> None:
    """Makes a forked child forget the groups: their threads and peers are its parent's."""
    inherited = list(open_groups)
    _native.leave_to_parent([communicator._native for communicator in inherited])
    for communicator in inherited:
        open_groups.remove(communicator)
        if communicator._held_rank is not None:
            forks.inherit(communicator._held_rank)
        communicator._around_close.clear()
        communicator._at_new_group.clear()
        communicator._participant = None
        of_parent = forks.OfParent(communicator.rank, communicator.host)
        communicator._native = cast(_native.Communicator, of_parent)


os.register_at_fork(
    before=_native.before_fork,
    after_in_parent=_native.after_fork,
    after_in_child=_leave_to_parent,
)


def _unless_gradrings(
    show: Callable[[threading.ExceptHookArgs], object],
) -> Callable[[threading.ExceptHookArgs], object]:
    """Wraps a thread's exception hook so that it ignores errors of gradring."""
    return lambda end: None if issubclass(end.exc_type, GradringError) else show(end)


@functools.cache  # one warning for an elastic job, although it forms several groups
def _warn_of_versions(*differences: str) -> None:
    if differences:
        _log.warning(
            "ranks run different versions, which may compute differently: %s; install the same on "
            "all hosts",
            "; ".join(differences),
        )


def program_error() -> BaseException | None:
    """Returns the exception that ends the program, or None."""
    # At a prompt, `sys.last_value` belongs to an earlier line.
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


@atexit.register
def _close_all() -> None:
    """Closes groups of a program that ends without `close`: peers see a clean leave or its error.

    Daemon threads can be inside collectives: first their collectives fail, and new ones are
    refused.
    """
    _native.refuse_others(AbortedError("this process ends; end or join its threads before"))
    error = program_error()
    if error is not None:
        # Threads end because of this error; their own errors must not be printed after it.
        threading.excepthook = _unless_gradrings(threading.excepthook)
    for communicator in open_groups:
        open_groups.use_of(communicator).users = 1
        if error is not None:
            communicator.abort(f"its program raised {described(error)}")
        communicator.close()
    _native.await_others()
