"""Elastic training: it continues when processes are lost, leave or join."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from gradring import _native, errors
from gradring.config import parse
from gradring.elastic.state import State
from gradring.errors import ConfigError, GradringError, MismatchError, RendezvousError
from gradring.group.collectives import all_gather_bytes, named
from gradring.group.communicator import (
    Communicator,
    continue_as,
    core_of,
    open_groups,
    participant_of,
)
from gradring.group.job_end import ends_with_the_job
from gradring.group.require_equal import must_match, require_equal
from gradring.group.steps import described
from gradring.machine.notices import Notices

_log = logging.getLogger("gradring")

#: Errors of a group after which another group may succeed.
_SURVIVABLE = tuple(getattr(errors, name) for name in _native.SURVIVABLE)
#: Limit of losses without a commit in between; after more, the program itself is at fault.
_LOSSES_WITHOUT_COMMIT_MAX = 10
#: Commits after which a joiner's probation ends. More than 1, because the function may begin
#: with a commit.
_TRIAL_COMMITS = 2
#: Default limit of the workers of a group.
_WORKERS_MAX = 2048
_ID_BYTES = 16
#: A rank's vote at a commit if it could not write its files; 1 votes for a new group, 0 for
#: none.
_UNSAVED = 2


class _Standing(enum.IntEnum):
    """Standing of a rank: ranks with the highest standing decide which settings are right."""

    JOINS = 0
    #: The rank has the job's values, and has not shown yet that it does the same with them.
    ON_TRIAL = 1
    OF_JOB = 2


class Strategy(Protocol):
    """Part of `gradring.tensorflow.CustomCollectiveStrategy` that `run` needs."""

    communicator: Communicator


_Train = TypeVar("_Train", bound=Callable[..., Any])
#: A formed group, and the address on which its first rank listens.
_Group = tuple[_native.Communicator, str]


def run(
    group: Communicator | Strategy,
    *,
    min_workers: int = 1,
    max_workers: int | None = None,
    timeout: float = 600.0,
) -> Callable[[_Train], _Train]:
    """Makes a training function elastic: it continues when processes are lost, leave or join.

    Before each call of the function, every process receives the newest commit (`State.sync`). When
    the group fails, the remaining processes agree on a new one without a restart, go back to the
    last commit, and call the function again.

    ``communicator.rank``, ``world_size`` and ``generation`` change only between two calls.
    Processes join at the next commit. After SIGTERM, a process leaves at its next commit with exit
    code 143. Neither loses a step.

    A new group needs more than half of the processes of the one before, not counting those that
    have provably ended. A minority gets an error, because the others may have continued without it.

    Args:
        group: The communicator, or a `gradring.tensorflow.CustomCollectiveStrategy`.
        min_workers: With fewer processes, the group waits for others to join, also at first.
        max_workers: Number of workers at which no further process joins; no limit by default.
        timeout: Seconds for which processes wait for others to join; default 600.

    Returns:
        A decorator. The function takes the state as its first argument, and every process must call
        it. The elastic function raises the exceptions of the function, and the last two below.

    Raises:
        gradring.errors.ConfigError: ``min_workers`` is below 1, or above ``max_workers``, or
            ``timeout`` is not above 0, or there is no group.
        gradring.errors.RendezvousError: This process is in a minority, too few workers have joined,
            or no group lets this process join.
        gradring.errors.MismatchError: Ranks were given different numbers of workers, or this
            process wants to join with other arguments or another strategy than the job has.

    Examples:
        >>> state = gradring.elastic.State(weights=np.zeros(2), step=0)
        >>> @gradring.elastic.run(comm, min_workers=2, max_workers=4)
        ... def train(state):
        ...     while state.step < 20:
        ...         state.weights -= 0.5 * comm.all_reduce(np.array([rank, 1.0]), op="mean")
        ...         state.step += 1
        ...         state.commit()
        ...     return state.weights
        >>> train(state)
        array([ -5., -10.])
    """
    most = _WORKERS_MAX if max_workers is None else max_workers
    _communicator_of(group)
    for name, value in (("min_workers", min_workers), ("max_workers", most)):
        if not isinstance(value, int):
            raise ConfigError(f"elastic.run: {name}={value!r} is not a number of processes")
    timeout = parse.seconds(timeout, "elastic.run: timeout")
    if not 1 <= min_workers <= most:
        raise ConfigError(
            f"elastic.run: min_workers={min_workers!r} is not between 1 and max_workers={most!r}; "
            "correct them"
        )

    def elastic(train: _Train) -> _Train:
        @functools.wraps(train)
        def trained(state: State, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(state, State):
                raise ConfigError(
                    f"elastic.run: {getattr(train, '__name__', 'the function')}() got "
                    f"{type(state).__name__} for its state; give it a gradring.elastic.State"
                )
            with _Job(group, (min_workers, max_workers, timeout), state) as job:
                return job.run(lambda: train(state, *args, **kwargs))

        return cast(_Train, trained)

    return elastic


def _communicator_of(group: Communicator | Strategy) -> Communicator:
    """Returns the communicator of a group.

    Raises:
        ConfigError: The group has none.
    """
    communicator = group if isinstance(group, Communicator) else getattr(group, "communicator", 0)
    if not isinstance(communicator, Communicator):
        raise ConfigError(
            f"elastic.run: {type(group).__name__} has no group; give what gradring.init() returns, "
            "or a gradring.tensorflow.CustomCollectiveStrategy"
        )
    return communicator


class Regroup(BaseException):
    """Leaves the function at a commit, so that others can join or leave."""


class _Job:
    """One call of an elastic function, during which its process moves from group to group."""

    def __init__(
        self,
        group: Communicator | Strategy,
        workers: tuple[int, int | None, float],
        state: State,
    ) -> None:
        self._communicator = _communicator_of(group)
        if self._communicator._participant is not None:
            raise ConfigError(
                "elastic.run: an elastic function of this communicator is under way already; call "
                "them one after the other"
            )
        least, most, self._worker_timeout_s = workers
        self._workers = (least, _WORKERS_MAX if most is None else most)
        #: Settings that all ranks must have in common, by name.
        self._must_match = {"min_workers": str(least), "max_workers": str(most)}
        self._must_match |= must_match(self._communicator) | state._must_match()
        self._state = state
        #: Set while the function runs, which is expected to commit.
        self._waits = threading.Event()
        #: Receives SIGTERM, after which this process leaves at its next commit. It has no
        #: reference to the job, whose port is released with the last reference.
        self._leaves = Notices(self._waits.is_set)
        #: Set by the first group of this process, or when it begins to look for one to join.
        self._participant: _native.Participant
        #: Ranks of the group that are not on probation, while others are.
        self._of_job: list[int] = []
        #: Commits left until the end of the joiners' probation, and until the end of this
        #: process's own.
        self._trial = self._own_trial = 0
        self._losses = 0
        #: Time at which this process left its last group, for log lines about durations.
        self._left_s = time.monotonic()
        #: True once the function has been called in the current group.
        self._has_begun = False

    def __enter__(self) -> _Job:
        if threading.current_thread() is threading.main_thread():
            self._leaves.watch(signal.SIGTERM)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state._after_commit = self._state._group = None
        try:
            if isinstance(error, Exception):
                # The others receive the reason, instead of noticing the loss only.
                self._communicator.abort(f"its program raised {described(error)}")
                # Closing sends the reason before the goodbye.
                core_of(self._communicator).close()
            if self._communicator._participant is not None:
                # When the function has returned in all processes, nobody needs another group.
                self._communicator._participant.leave(tells=error is not None)
        finally:
            self._communicator._participant = None
            self._leaves.unwatch()

    def run(self, train: Callable[[], Any]) -> Any:
        """Calls the function in one group after the other, until it returns in all processes."""
        group, result = self._first_group(), None
        while group is not None:
            has_returned = newcomers_failed = False
            try:
                self._enter(*group)
                result = train()
                has_returned = True
                # A rank lost before this point makes all others go back and call the function
                # again.
                self._communicator.all_reduce(0, name="elastic/returned")
                self._tell_the_end()
                return result
            except Regroup as change:
                self._leave(str(change))
            except Exception as error:
                self._go_back(error, has_returned)
                newcomers_failed = not (self._has_begun or isinstance(error, _SURVIVABLE))
            finally:
                self._state._after_commit = self._state._group = None
                self._waits.clear()
            group = self._next_group(newcomers_failed)
        # All others have returned too: one rank knew of it before the group failed.
        return result

    def _first_group(self) -> _Group | None:
        """Forms the founders' group, waiting for joiners if they are too few, or joins one."""
        communicator = self._communicator
        seeds = open_groups.yet_to_join(communicator)
        if not seeds:
            # First, because it reports the problem of a group that has failed.
            require_equal(communicator, self._must_match, standing=_Standing.OF_JOB)
        participant = participant_of(communicator, seeds, self._workers, self._worker_timeout_s)
        self._participant = participant
        if seeds:
            return self._next_group()
        own_id, address = participant.peer
        received = all_gather_bytes(communicator, own_id + address.encode(), "elastic/members")
        peers = [(bytes(each[:_ID_BYTES]), each[_ID_BYTES:].decode()) for each in received]
        communicator.generation += 1
        participant.found(peers, communicator.generation)
        if len(peers) >= self._workers[0]:
            return core_of(communicator), communicator._rendezvous
        why = f"it has {len(peers)} workers, and min_workers is {self._workers[0]}"
        self._log_change("waits for others to join its first group", why)
        return self._next_group()

    def _next_group(self, newcomers_failed: bool = False) -> _Group | None:
        """Forms the next group with others; returns None if all processes have finished."""
        self._has_begun = False
        core = core_of(self._communicator)
        with (
            ends_with_the_job()
            if open_groups.yet_to_join(self._communicator)
            else contextlib.nullcontext()
        ):
            return self._participant.next_group(core, self, newcomers_failed)

    def left(self) -> None:
        """Called when the last group is closed, while others agree on the next one."""
        # Iterators of Keras are garbage that would stay for long. The older they are, the longer
        # TensorFlow waits for their threads at the end.
        gc.collect()
        self._log_time("let go of its last group")

    def agreed(self, joins_again: bool) -> None:
        """Called when the process has agreed on the next group, and begins to connect."""
        self._log_time("agreed on its next group")
        if joins_again:
            # Commits of this process belong to an abandoned history.
            self._log_change("joins again", "the others have gone on without it")

    def not_formed(self, error: Exception) -> None:
        """Called when the next group could not form."""
        self._go_back(error, has_returned=False)

    def _enter(self, native: _native.Communicator, rendezvous: str) -> None:
        """Compares settings in a new group, and brings the newest commit to all ranks."""
        communicator, participant = self._communicator, self._participant
        if native is not core_of(communicator):
            continue_as(communicator, native, rendezvous)
            self._of_job = require_equal(communicator, self._must_match, standing=self._standing)
            self._trial = _TRIAL_COMMITS * (len(self._of_job) < communicator.world_size)
            if communicator.rank in self._of_job:
                self._own_trial = 0
            elif not participant.has_state:
                self._own_trial = _TRIAL_COMMITS
        self._log_time("connected")
        self._state._sync(communicator, participant.has_state)
        participant.establish(native)
        self._log_time("got the values, and begins")
        self._has_begun = True
        self._waits.set()
        self._state._after_commit, self._state._group = self._at_commit, communicator

    def _leave(self, why: str) -> None:
        """Leaves the group at a commit; after SIGTERM, leaves the job as well."""
        self._log_change("leaves its group for a new one", why)
        self._left_s = time.monotonic()
        if self._leaves.received:
            self._participant.leave(tells=True)
            self._communicator.close()
            raise SystemExit(128 + signal.SIGTERM) from None

    def _go_back(self, error: Exception, has_returned: bool) -> None:
        """Goes back to the last commit if another group may succeed; raises otherwise."""
        self._left_s = time.monotonic()
        if not self._is_survivable(error):
            self._explain(error)
            raise error
        if not has_returned:
            self._state.restore()
        if self._leaves.received:
            raise SystemExit(128 + signal.SIGTERM) from None

    def _log_time(self, what: str) -> None:
        """Logs the time that re-forming the group has taken so far."""
        who = self._communicator
        seconds = time.monotonic() - self._left_s
        _log.debug("rank %d on %s has %s after %.3f s", who.rank, who.host, what, seconds)

    def _tell_the_end(self) -> None:
        """Waits until all know that all have finished, or informs them if the group fails."""
        try:
            self._communicator.all_reduce(0, name="elastic/ended")
        except GradringError:
            self._participant.finish()

    def _at_commit(self, has_committed: bool) -> None:
        """Regroups if a process joins or leaves; raises if a rank could not write files."""
        if has_committed:
            self._losses = 0
        communicator, reason = self._communicator, self._reason_to_regroup()
        changes = _UNSAVED if self._state._has_given_up else int(bool(reason))
        found = communicator.all_reduce(
            np.array([changes], np.uint8), "max", name="elastic/changes"
        )
        if has_committed:
            self._trial, self._own_trial = max(0, self._trial - 1), max(0, self._own_trial - 1)
        if found[0] == _UNSAVED:
            self._state._raise_failures()
        elif found[0]:
            found_reasons = all_gather_bytes(communicator, reason.encode(), "elastic/reasons")
            raise Regroup(
                "; ".join(
                    f"{named(communicator, rank)} {text.decode()}"
                    for rank, text in enumerate(found_reasons)
                    if text
                )
            )

    def _reason_to_regroup(self) -> str:
        """Returns why this process wants a new group; empty if it does not."""
        if self._leaves.received:
            return "has got SIGTERM, and leaves"
        joiners = self._participant.joiners
        if not joiners or self._communicator.world_size >= self._workers[1]:
            return ""
        more = f" and {len(joiners) - 1} more" if joiners[1:] else ""
        return f"says that {joiners[0]}{more} would join"

    def _is_survivable(self, error: Exception) -> bool:
        """Returns whether another group may succeed after this error, and logs the reason."""
        failure = error if isinstance(error, GradringError) else _behind(error)
        if failure is None or self._communicator not in open_groups:
            return False
        if self._has_begun:
            has_failed = core_of(self._communicator).has_failed
            survivable = isinstance(failure, _SURVIVABLE) and has_failed
            # A mismatch found in a comparison by ranks does not abort the group.
            survivable |= isinstance(failure, MismatchError) and self._is_others_fault(failure)
        else:
            # The fault is with the joiners: the other ranks agreed before.
            survivable = self._participant.has_state
            survivable |= isinstance(failure, (*_SURVIVABLE, RendezvousError))
        if not survivable:
            return False
        self._losses += 1
        if self._losses > _LOSSES_WITHOUT_COMMIT_MAX:
            return False
        why, who = failure.problem, self._participant.reconfigured_by
        if who and who not in why:
            why = f"{why} ({who})"
        self._log_change("goes back to its last commit, and forms a new group", why)
        return True

    def _log_change(self, what: str, why: str) -> None:
        """Logs why the group ends: a request for a new one, or the loss of a rank."""
        who = self._communicator
        _log.warning("rank %d on %s %s: %s", who.rank, who.host, what, why)

    @property
    def _standing(self) -> _Standing:
        if not self._participant.has_state:
            return _Standing.JOINS
        return _Standing.ON_TRIAL if self._own_trial else _Standing.OF_JOB

    def _is_others_fault(self, failure: GradringError) -> bool:
        """Returns whether a rank on probation, which ends by it, differed from the job."""
        own = self._communicator.rank
        is_other = failure.rank not in (None, own, *self._of_job)
        return self._trial > 0 and (own in self._of_job or is_other)

    def _explain(self, error: Exception) -> None:
        """Raises an error with advice if this joiner did something else than the other ranks.

        Raises:
            MismatchError: This process is on probation, and its calls differ from those of the
                others.
        """
        failure = error if isinstance(error, GradringError) else _behind(error)
        if self._own_trial and isinstance(failure, MismatchError):
            who = self._communicator
            raise MismatchError(
                f"rank {who.rank} on {who.host} has joined, and its first steps differ from those "
                f"of the others: {failure.problem}",
                advice="create lasting objects, such as the variables of a layer or an optimizer, "
                "before elastic.run's function begins, and give them to the State",
                rank=who.rank,
                host=who.host,
            ) from error


def _behind(error: Exception) -> GradringError | None:
    """Returns the gradring error behind an error of another framework, or None."""
    front_end = sys.modules.get("gradring.tensorflow")
    found = None if front_end is None else front_end.failure_of(error)
    return cast("GradringError | None", found)
