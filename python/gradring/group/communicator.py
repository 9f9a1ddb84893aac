"""A connected group of ranks: how it is made, divided, watched and left."""

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
from typing import TYPE_CHECKING, NoReturn, cast, overload

import numpy as np

from gradring import _native
from gradring.config import parse
from gradring.config.settings import takes_settings
from gradring.config.values import Settings, TlsFiles, check_token
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
    from typing_extensions import Unpack

    from gradring._native import Options


_log = logging.getLogger("gradring")

#: How many collectives a trace keeps: about 25 MB of memory, minutes of training.
TRACE_LIMIT = 50_000


class Communicator(Collectives):
    """A connected group of ranks with an order.

    All ranks must call the same collectives in the same order, with the same dtype, shapes, op
    and name; a difference raises `MismatchError` on every rank before a wrong value is written.

    Arrays are C-contiguous, writable buffers of float32, float64, float16, bfloat16 (ml_dtypes),
    int32, int64 or uint8: numpy arrays, or anything with the buffer protocol or DLPack in the
    host's memory, such as PyTorch's tensors. A list of arrays of one dtype is one bucket: it is
    reduced together, without copies. While a collective is under way, its arrays must be left
    alone; after a failed one, their contents are undefined.

    Collectives are called by one thread at a time: one that is called while another thread is
    inside a blocking one fails the group. Works may be waited for in any thread. In a signal
    handler, `close`, `abort` and `stats` may be called, and collectives not while another waits.

    16-bit floats accumulate in float32 and are rounded once. Integer sums and products wrap; the
    integer mean is rounded towards zero. A NaN wins every min and max.

    Args:
        rank: This process's index, from 0.
        world_size: Number of processes.
        rendezvous: ``host:port`` at which rank 0 listens; not needed in a world of one.
        listen: ``host:port`` at which this rank listens; by default a free port on the interface
            that reaches the rendezvous.
        announce: ``host:port`` by which the others reach this rank, where that is not where it
            listens: behind a forwarded port.
        addresses: ``host:port`` of every rank, if known beforehand: messages about ranks that are
            missing then say what is found there.
        token: The job's shared secret, text in UTF-8 or bytes; a peer without it is turned away.
        require_auth: Refuse to join without a token; None: where ``GRADRING_REQUIRE_AUTH`` asks
            for it.
        interface: Name or IP address of the network interface at which this rank listens, whatever
            ``rendezvous`` and ``listen`` say; they still say the port. By default the addresses
            that these two say.
        ports: First and last of the ports of which this rank takes the first that is free, where
            ``listen`` does not say one; rank 0 listens at the rendezvous. None: any free port.
        tls: Certificates with which everything that travels over TCP is inside TLS 1.3; all ranks
            must have some. None: no TLS.
        transport: ``auto``: shared memory between ranks of one host, TCP between hosts; ``tcp``:
            TCP everywhere; ``shm``: shared memory everywhere, or `ConfigError`.
        timeout: Seconds in which the group must form.
        algorithm: ``auto``: by the size of the buffer, the number of ranks, which of them share a
            host, and times measured when the group forms; or ``ring``, ``direct``, ``one_shot``,
            ``star``, ``hierarchical``, ``halving`` or ``doubling``; or text with commas such as
            ``one_shot:64KiB,direct``: each up to its size, the last for everything else. A
            collective that the wish does not fit is done as by ``auto``: ``hierarchical`` needs
            several hosts, and several ranks on one of them or several hosts in one rack.
        reproducible: Makes every sum the left fold ``g0 + g1 + ... + gN-1`` in rank order, whatever
            the algorithm, the transport and the buckets.
        wire_dtype: ``bfloat16`` or ``float16``: float32 contributions to reductions of 64 KiB and
            more are rounded to it for travelling, which halves the traffic; the owner of each
            element sums them in float32, and rounds the result once. Smaller ones, such as losses,
            metrics and statistics, stay exact. None: elements travel as they are.
        job_id: What tells this job from others that may use the same addresses; ranks with
            different ones do not form a group. None: nothing does.
        settings: Any other setting of a group, by its name.

            * ``streams``: TCP connections with each peer, 1 to 16; 1 by default. Several fill a
              link that limits each connection, such as a cloud's limit per flow or a long path;
              elsewhere they only cost. Results are the same bits; shared memory does not use them.
            * ``checksum``: adds a CRC-32C to every 64 KiB that travel through a link, of whatever
              kind, and checks it before the bytes are used: bytes that a network card, a switch, a
              proxy or memory on the way has changed are a `ProtocolError` on every rank, which
              names the link, instead of a wrong result. Costs time; ``gradring bench all-reduce
              --checksum`` measures how much.
            * ``rack``: a name, of at most 24 characters, that this host has in common with those
              with which it shares a line to all others; each rank says its own. Larger buffers are
              then reduced inside racks before they leave them. None: unknown, which counts for the
              whole group.
            * ``stall_timeout``: seconds without any movement after which a collective fails
              although all ranks live, such as one that a rank does not enter; 1800 by default. A
              rank that is dead or silent is lost long before, whatever this is.
            * ``stall_warning``: seconds without any movement in a collective after which a line in
              the log (logger ``gradring``) names the ranks that it waits for; 30 by default. The
              next lines come when twice as long has gone by, four times, and so on.

    Attributes:
        rank: This process's index.
        world_size: Number of processes.
        host: The name of this rank's host.
        hosts: The names of all ranks' hosts, by rank.
        local_rank: Its index among the ranks of its host.
        local_size: Number of ranks on its host.
        generation: How often the processes of an elastic job have agreed on their group; it grows.

    Raises:
        ConfigError: A setting cannot be used.
        RendezvousError: The group did not form in time; names the missing ranks.
        AuthenticationError: A peer does not know the token, or has no certificate that is accepted.

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
        transport: str = "auto",
        timeout: float = 300.0,
        algorithm: str = "auto",
        reproducible: bool = False,
        wire_dtype: str | None = None,
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
        """Takes a place in a group, unless a process from which this one was forked has it."""
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
        """Forms the group; all of this has been checked."""
        self._config = config
        #: What its ranks are in the group of all, if it is a part of that.
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
        #: By `around_close`.
        self._around_close: list[AbstractContextManager[None]] = []
        #: By `at_new_group`.
        self._at_new_group: list[Callable[[], Callable[[Communicator], None] | None]] = []
        #: In an elastic job, as long as `gradring.elastic.run` is under way.
        self._participant: _native.Participant | None = None
        #: The `Step` that the program is in.
        self._step: Step | None = None
        self._describe(rendezvous)
        open_groups.add(self)

    def _describe(self, rendezvous: str) -> None:
        """Notes what the group is."""
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
        """Forms groups of the ranks that say the same ``color``; every rank calls it.

        Each is a group of its own: it has its own connections, made with the settings, the token
        and the certificates of this one, its own order of collectives and its own failures. So
        groups work at the same time, and each is closed by itself, before or after this one. It
        listens at another port: one of the range of ``port=``, or any free one where that has no
        range.

        Args:
            color: Which group this rank is to be in; any whole number. None: in none.
            key: Ranks of a group are in the order of their keys, and of their ranks here where
                keys are equal; default 0.
            name: What errors call the group; by default "the group of color" and the color.

        Returns:
            The group, or None where ``color`` is None.

        Raises:
            TypeError: ``color`` or ``key`` is no whole number; nothing is sent then.
            ConfigError: The group is part of an elastic job under way, whose ranks change; or a
                rank is announced at an address that another port cannot have.
            RendezvousError: A group did not form within the timeout of this one.
            GradringError: As in `all_reduce`; also if this group fails by a rank of the new one.

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
        # Open before anybody hears of it.
        listening = None
        if self.world_size > 1 and announced is None:
            listening = self._native.listen_beside(self._config.ports)
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
        """What its ranks are in the group of all."""
        return range(self.world_size) if self._part is None else self._part[1]

    def step(self, *, abort_on_exception: bool = True) -> Step:
        """What happens inside ``with communicator.step():`` is one step of the program.

        Every rank numbers its steps, and the numbers are compared with every collective: a rank
        that has left a step early, and goes on one step apart from the others, gets a
        `MismatchError` like all others, where names and shapes are the same in every step. An
        exception that leaves the step after one of its collectives has begun ends the group: the
        others get an `AbortedError` that carries its text. One that leaves it before that lets the
        program go on, and counts as a step: if other ranks do not leave it too, the next collective
        is a `MismatchError`. So it is after the end of the data (``StopIteration``,
        ``tf.errors.OutOfRangeError``), KeyboardInterrupt and SystemExit, wherever they leave it.

        All ranks must use it alike. A step counts from its first collective on: ranks may have
        different numbers of steps without any. `CustomCollectiveStrategy.run`, a
        `GradientReducer` and Keras' ``fit`` are steps by themselves, and so is every call of a
        ``tf.function``; inside another step they are a part of it.

        Args:
            abort_on_exception: False if every rank leaves the step alike, or repeats it: no
                exception ends the group or counts as a step. A rank that leaves it alone after a
                collective is still noticed by the number of the next step.

        Examples:
            >>> for batch in range(2):
            ...     with comm.step():
            ...         comm.all_reduce(batch + 0.5 * rank, op="mean", name="loss")
            0.25
            1.25
        """
        return Step(self, abort_on_exception)

    def stats(self) -> Stats:
        """What this rank has done so far, and who is late; docs/observability.md defines the times.

        Returns:
            A dict; `gradring.stats` has the types of all that is in it.

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
            "recent_s": found.excess_s,
        }
        return {**own, "slowest": slowest}

    def _waits(self, which: int) -> dict[int, dict[int, float]]:
        """Who waited for whom, by the last gossip: 0 for all of it, 1 for the recent part."""
        return {
            gossip["rank"]: {rank: times[which] for rank, times in gossip["lateness_s"].items()}
            for gossip in self._native.gossip()
        }

    def trace_start(self, path: str | os.PathLike[str], *, limit: int = TRACE_LIMIT) -> None:
        """Begins to record a timeline; every rank calls it.

        Args:
            path: Where `trace_stop` writes the timeline, on rank 0.
            limit: How many collectives are kept, the last ones; at most 1,000,000.

        Raises:
            ConfigError: ``limit`` is no whole number in this range.

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

        The file is Chrome's trace format, JSON: open it at ui.perfetto.dev or chrome://tracing.

        Returns:
            The path, on rank 0; None elsewhere, and if nothing was being recorded.

        Raises:
            gradring.errors.SaveError: On all ranks, if rank 0 cannot write the file; it is an
                `OSError`, too.
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
        """Leaves the group in good order; a collective under way fails. May be called twice.

        If `init` has returned it several times, only the last of as many calls leaves the group.

        May be called from any thread, and from a signal handler that runs while a collective waits:
        that collective then raises `AbortedError`.

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
                # Only now: a fork must not take for closed what another thread still closes.
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
    """The group of these settings, and of a place that has been checked.

    Raises:
        GradringError: As a `Communicator`.
    """
    communicator = Communicator.__new__(Communicator)
    communicator._join(rank, world_size, rendezvous, addresses, config)
    return communicator


def core_of(communicator: Communicator) -> _native.Communicator:
    """The group as the core has it, for what observes it and for front ends.

    Ask anew each time: a process that is forked from this one gets what refuses everything.
    """
    return communicator._native


def participant_of(
    communicator: Communicator,
    addresses: Sequence[str],
    workers: tuple[int, int],
    worker_timeout_s: float,
) -> _native.Participant:
    """This process in an elastic job, to go on from its group, or to join those at addresses.

    It leaves the job when the communicator is closed.
    """
    config = communicator._config
    if communicator.world_size == 1 and not addresses and config.listen is None:
        # Where it would listen if it was not alone.
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
    """Makes it the next group of its elastic job; TensorFlow's graphs find it by the same number.

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
    """Lets `close` enter an observer before it leaves the group, and exit it afterwards."""
    communicator._around_close.append(observer)


def at_new_group(communicator: Communicator, begin: Callable[[Communicator], None]) -> None:
    """Has this called whenever an elastic job has formed another group, which counts anew.

    A method is called as long as its object lives elsewhere.
    """
    hook = weakref.WeakMethod(begin) if inspect.ismethod(begin) else lambda: begin
    communicator._at_new_group.append(hook)


def _whole_number(given: object, argument: str) -> int:
    """One of Python or numpy, as Python's.

    Raises:
        TypeError: It is something else.
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
    """Shows what ends a thread, but for errors of gradring."""
    return lambda end: None if issubclass(end.exc_type, GradringError) else show(end)


@functools.cache  # once for an elastic job, whose groups change
def _warn_of_versions(*differences: str) -> None:
    if differences:
        _log.warning(
            "ranks run different versions, which may compute differently: %s; install the same on "
            "all hosts",
            "; ".join(differences),
        )


def program_error() -> BaseException | None:
    """What the program that ends now has raised, if it did."""
    # At a prompt, it is that of an earlier line.
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


@atexit.register
def _close_all() -> None:
    """Says goodbye for programs that end without closing; peers see a clean leave, or the error.

    Daemon threads may be inside collectives: they are let out first, and no more come in.
    """
    _native.refuse_others(AbortedError("this process ends; end or join its threads before"))
    error = program_error()
    if error is not None:
        # They end because of it, and must not have the last word.
        threading.excepthook = _unless_gradrings(threading.excepthook)
    for communicator in open_groups:
        open_groups.use_of(communicator).users = 1
        if error is not None:
            communicator.abort(f"its program raised {described(error)}")
        communicator.close()
    _native.await_others()
