"""Training that goes on when processes are lost, leave or join."""

from __future__ import annotations

import enum
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from gradring import _native
from gradring.elastic.state import State
from gradring.errors import (
    AbortedError,
    CollectiveTimeoutError,
    ConfigError,
    GradringError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
)
from gradring.group.collectives import all_gather_bytes, named
from gradring.group.communicator import (
    Agreement,
    Communicator,
    core_of,
    form_again,
    open_groups,
    participant_of,
)
from gradring.group.latecomer import ends_with_the_job
from gradring.group.require_equal import must_match, require_equal
from gradring.group.steps import described

_log = logging.getLogger("gradring")

#: How a group can fail so that another one may succeed.
_SURVIVABLE = (AbortedError, CollectiveTimeoutError, PeerLostError, ProtocolError)
#: After so many losses without a commit in between, it is the program that fails.
_LOSSES_WITHOUT_COMMIT_MAX = 10
#: A process that has joined is on trial until it has come to so many commits: the first may be the
#: first thing that the function does.
_TRIAL_COMMITS = 2
#: The most workers of a group, if nobody says.
_WORKERS_MAX = 2048
_ID_BYTES = 16
#: What a rank says at a commit, if not 1 for a new group, and 0 for none.
_UNSAVED = 2


class _Standing(enum.IntEnum):
    """Of a rank: those that have the highest say what has to be the same."""

    JOINS = 0
    #: It has the job's values, and has yet to show that it does the same with them.
    ON_TRIAL = 1
    OF_JOB = 2


class Strategy(Protocol):
    """What `run` needs of `gradring.tensorflow.CustomCollectiveStrategy`."""

    communicator: Communicator


_Train = TypeVar("_Train", bound=Callable[..., Any])


def run(
    group: Communicator | Strategy,
    *,
    min_workers: int = 1,
    max_workers: int | None = None,
    timeout: float = 600.0,
) -> Callable[[_Train], _Train]:
    """Makes a function that trains go on when processes are lost, leave or join.

    ```python
    with gradring.init() as comm:
        state = gradring.elastic.State(weights=np.zeros(1000), step=0)

        @gradring.elastic.run(comm, min_workers=2, max_workers=4)
        def train(state):
            while state.step < 1000:
                state.weights -= 0.1 * comm.all_reduce(gradient(state.weights), op="mean")
                state.step += 1
                state.commit()

        train(state)
    ```

    Before each call of the function, every process gets the newest commit (`State.sync`). When the
    group fails, those that are left agree on a new one, without a restart, take their values back
    to the last commit, and call the function again; ``communicator.rank``, ``world_size`` and
    ``generation`` change only between two calls. Processes join at the next commit, and leave there
    when they have got SIGTERM, with exit code 143; nothing is lost then.

    A group may go on if it is more than half of the one before, not counting those that are proved
    to have ended; a minority gets an error, because the others may have gone on without it.

    Args:
        group: The communicator, or a `gradring.tensorflow.CustomCollectiveStrategy`.
        min_workers: With fewer, the others wait for processes that join, also at first.
        max_workers: With so many, nobody joins; by default there is no bound.
        timeout: Seconds for which they wait; default 600.

    Returns:
        What makes a function elastic. The function takes the state first; every process must call
        it.

    Raises:
        gradring.errors.ConfigError: ``min_workers`` is below 1, or above ``max_workers``, or
            ``timeout`` is not above 0, or there is no group. The elastic function raises what the
            function raises, and `gradring.errors.RendezvousError`: this process is in a minority,
            or there are too few workers, or nobody lets it join; and
            `gradring.errors.MismatchError`: the ranks were given different numbers of workers, or
            this process would join with others, or with another strategy, than the job has.
    """
    most = _WORKERS_MAX if max_workers is None else max_workers
    _communicator_of(group)
    for name, value in (("min_workers", min_workers), ("max_workers", most)):
        if not isinstance(value, int):
            raise ConfigError(f"elastic.run: {name}={value!r} is not a number of processes")
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ConfigError(f"elastic.run: timeout={timeout!r} is not a number of seconds above 0")
    if not 1 <= min_workers <= most:
        raise ConfigError(
            f"elastic.run: min_workers={min_workers!r} is not between 1 and max_workers={most!r}"
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
    """The group's.

    Raises:
        ConfigError: It has none.
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
    """One call of an elastic function."""

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
        least, most, self._patience_s = workers
        self._workers = (least, _WORKERS_MAX if most is None else most)
        #: What has to be the same on all ranks, by name.
        self._must_match = {"min_workers": str(least), "max_workers": str(most)}
        self._must_match |= must_match(self._communicator) | state._must_match()
        self._state = state
        self._leaves = _Terminated()
        self._participant: _native.Participant | None = None
        #: Whether this process has the state of the job.
        self._has_state = False
        #: The ranks of the group that are not on trial, while others are.
        self._of_job: list[int] = []
        #: How many commits are left to the end of that trial, and of this process's own.
        self._trial = self._own_trial = 0
        #: As what process it was in its last group; another one if it has been left out since.
        self._id = b""
        #: The generation of the group that was there before, if it was.
        self._founded: int | None = None
        self._losses = 0
        #: When it has left its last group, for the times of what follows.
        self._left_s = time.monotonic()
        self._has_formed = False
        #: Where the members of the last group listen.
        self._addresses: list[str] = []

    def __enter__(self) -> _Job:
        self._leaves.__enter__()
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
                # The others hear why, and not only that it is gone.
                self._communicator.abort(f"its program raised {described(error)}")
                # It is on its way then, before they hear the goodbye.
                core_of(self._communicator).close()
            if self._participant is not None:
                # When all have come to the end, nobody needs another group.
                self._participant.leave(tells=error is not None)
        finally:
            self._communicator._participant = None
            self._leaves.__exit__()

    def run(self, train: Callable[[], Any]) -> Any:
        """Calls the function in one group after the other, until it returns."""
        communicator, participant = self._communicator, self._take_part()
        result = None
        while True:
            agreement = self._agree(participant)
            if agreement is None:
                # It has returned like all others, of whom one knew it before the group failed.
                participant.finish()
                return result
            generation, _, addresses = agreement
            if generation == self._founded and len(addresses) < self._workers[0]:
                # Others have to join the first group before it begins.
                why = f"it has {len(addresses)} workers, and min_workers is {self._workers[0]}"
                self._log_change("waits for others to join its first group", why)
                core_of(communicator).close()
                participant.reform([])
                continue
            self._log_time("agreed on its next group")
            unreached: list[int] = []
            self._has_formed = has_returned = False
            try:
                self._enter(participant, agreement)
                self._has_formed = True
                self._addresses = addresses
                self._state._after_commit = self._at_commit
                self._state._group = communicator
                self._leaves.waits = True
                result = train()
                has_returned = True
                # Until all have come so far, one that is lost takes all back.
                communicator.all_reduce(0, name="elastic/returned")
                self._tell_the_end(participant)
                return result
            except Regroup as change:
                self._log_change("leaves its group for a new one", str(change))
                self._left_s = time.monotonic()
                if self._leaves.wanted:
                    participant.leave(tells=True)
                    communicator.close()
                    raise SystemExit(128 + signal.SIGTERM) from None
            except Exception as error:
                self._left_s = time.monotonic()
                if not self._is_survivable(error):
                    self._explain(error)
                    raise
                if not self._has_formed:
                    unreached = self._to_leave_out(error, agreement)
                if not has_returned:
                    self._state.restore()
                if self._leaves.wanted:
                    raise SystemExit(128 + signal.SIGTERM) from None
            finally:
                self._state._after_commit = self._state._group = None
                self._leaves.waits = False
            core_of(communicator).close()
            participant.reform(unreached)
            # While the others agree. Iterators of Keras are garbage that would stay for long, and
            # the older they are, the longer TensorFlow waits for their threads at the end.
            gc.collect()
            self._log_time("let go of its last group")

    def _take_part(self) -> _native.Participant:
        communicator = self._communicator
        seeds = open_groups.yet_to_join(communicator)
        if not seeds:
            self._has_state = True
            # First of all, because it says what is wrong with a group that has failed.
            require_equal(communicator, self._must_match, standing=_Standing.OF_JOB)
        participant = participant_of(communicator, seeds, self._patience_s)
        self._participant = participant
        if seeds:
            participant.join(list(seeds), *self._workers)
            return participant
        self._id, address = participant.peer
        told = all_gather_bytes(communicator, self._id + address.encode(), "elastic/members")
        peers = [(bytes(each[:_ID_BYTES]), each[_ID_BYTES:].decode()) for each in told]
        self._founded = communicator.generation + 1
        participant.found(peers, self._founded, *self._workers)
        return participant

    def _agree(self, participant: _native.Participant) -> Agreement | None:
        """Waits for the next group; None if all have come to the end."""
        if not open_groups.yet_to_join(self._communicator):
            return participant.agree()
        with ends_with_the_job():
            return participant.agree()

    def _enter(self, participant: _native.Participant, agreement: Agreement) -> None:
        """Connects the group, and gives the newest commit to all."""
        communicator = self._communicator
        generation, *_ = agreement
        own_id, _ = participant.peer
        if own_id != self._id:
            # The others have gone on without it, so its commits are of another history.
            if self._id:
                self._log_change("joins again", "the others have gone on without it")
            self._id, self._has_state = own_id, False
        if generation != self._founded:
            form_again(communicator, participant, agreement)
            self._of_job = require_equal(communicator, self._must_match, standing=self._standing)
            self._trial = _TRIAL_COMMITS * (len(self._of_job) < communicator.world_size)
            if communicator.rank in self._of_job:
                self._own_trial = 0
            elif not self._has_state:
                self._own_trial = _TRIAL_COMMITS
        communicator.generation = generation
        self._log_time("connected")
        self._state._sync(communicator, self._has_state)
        communicator.barrier()
        participant.connected(core_of(communicator))
        self._has_state = True
        self._log_time("got the values, and begins")

    def _log_time(self, what: str) -> None:
        """How long re-forming has taken so far."""
        who = self._communicator
        seconds = time.monotonic() - self._left_s
        _log.debug("rank %d on %s has %s after %.3f s", who.rank, who.host, what, seconds)

    def _tell_the_end(self, participant: _native.Participant) -> None:
        """Stays until all others know that all have come to the end, or tells them."""
        try:
            self._communicator.all_reduce(0, name="elastic/ended")
        except GradringError:
            participant.finish()

    def _at_commit(self, has_committed: bool) -> None:
        """Lets processes join and leave, and tells all what one could not write."""
        if has_committed:
            self._losses = 0
        communicator, participant = self._communicator, self._participant
        assert participant is not None
        wish = self._wish(participant)
        changes = _UNSAVED if self._state._has_given_up else int(bool(wish))
        found = communicator.all_reduce(
            np.array([changes], np.uint8), "max", name="elastic/changes"
        )
        if has_committed:
            self._trial, self._own_trial = max(0, self._trial - 1), max(0, self._own_trial - 1)
        if found[0] == _UNSAVED:
            self._state._raise_failures()
        elif found[0]:
            told = all_gather_bytes(communicator, wish.encode(), "elastic/wishes")
            wishes = [f"{named(communicator, r)} {w.decode()}" for r, w in enumerate(told) if w]
            raise Regroup("; ".join(wishes))

    def _wish(self, participant: _native.Participant) -> str:
        """Why this process wants a new group; empty if it does not."""
        if self._leaves.wanted:
            return "has got SIGTERM, and leaves"
        joiners = participant.joiners
        if not joiners or self._communicator.world_size >= self._workers[1]:
            return ""
        more = f" and {len(joiners) - 1} more" if joiners[1:] else ""
        return f"says that {joiners[0]}{more} would join"

    def _to_leave_out(self, error: Exception, agreement: Agreement) -> list[int]:
        """The ranks because of which a group has not formed."""
        if isinstance(error, _SURVIVABLE):
            return []
        if isinstance(error, RendezvousError) and error.rank is not None:
            return [error.rank]
        # Such as other settings: the members of the group before had the same.
        _, _, addresses = agreement
        return [r for r, address in enumerate(addresses) if address not in self._addresses]

    def _is_survivable(self, error: Exception) -> bool:
        """Whether the group has failed so that another one may do better."""
        failure = error if isinstance(error, GradringError) else _behind(error)
        if failure is None or self._communicator not in open_groups:
            return False
        if self._has_formed:
            has_failed = core_of(self._communicator).has_failed
            survivable = isinstance(failure, _SURVIVABLE) and has_failed
            # What ranks compare themselves is no failure of the group.
            survivable |= isinstance(failure, MismatchError) and self._is_others_fault(failure)
        else:
            # Whatever is wrong with those that join, the others were right together.
            survivable = self._has_state or isinstance(failure, (*_SURVIVABLE, RendezvousError))
        if not survivable:
            return False
        self._losses += 1
        if self._losses > _LOSSES_WITHOUT_COMMIT_MAX:
            return False
        why, call = _fact_of(failure), self._participant and self._participant.call
        if call and call not in why:
            why = f"{why} ({call})"
        self._log_change("goes back to its last commit, and forms a new group", why)
        return True

    def _log_change(self, what: str, why: str) -> None:
        """Says on every rank why its group ends: who asked for it, or who was lost and how."""
        who = self._communicator
        _log.warning("rank %d on %s %s: %s", who.rank, who.host, what, why)

    @property
    def _standing(self) -> _Standing:
        if not self._has_state:
            return _Standing.JOINS
        return _Standing.ON_TRIAL if self._own_trial else _Standing.OF_JOB

    def _is_others_fault(self, failure: GradringError) -> bool:
        """Whether one that is on trial has done something else than the job: it ends by that."""
        own = self._communicator.rank
        is_other = failure.rank not in (None, own, *self._of_job)
        return self._trial > 0 and (own in self._of_job or is_other)

    def _explain(self, error: Exception) -> None:
        """Says what to do where a process that has joined does something else than the others.

        Raises:
            MismatchError: That is what has happened.
        """
        failure = error if isinstance(error, GradringError) else _behind(error)
        if self._own_trial and isinstance(failure, MismatchError):
            who = self._communicator
            raise MismatchError(
                f"rank {who.rank} on {who.host} has joined, and its first steps are not those of "
                f"the others: {_fact_of(failure)}; what they have made once and keep, such as the "
                "variables of a layer or an optimizer, has to be in the State, and so be made "
                "before elastic.run's function begins",
                rank=who.rank,
                host=who.host,
            ) from error


def _fact_of(error: GradringError) -> str:
    """Without TensorFlow's trace, and without the advice for a job that would end by it."""
    return str(error).partition("\n")[0].rpartition("}} ")[2].partition("; ")[0]


class _Terminated:
    """Makes SIGTERM end the process at its next commit, where this is the main thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        #: Whether the signal has come.
        self.wanted = False
        #: Whether there will be a commit.
        self.waits = False
        self._before: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def __exit__(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            _native.end_by_sigterm()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A fork, as pools make them, has no commits to wait for.
            signal.signal(signum, self._before)
            os.kill(os.getpid(), signum)
            return
        self.wanted = True
        if callable(self._before):
            self._before(signum, frame)
        if not self.waits:
            raise SystemExit(128 + signum)


def _behind(error: Exception) -> GradringError | None:
    """The failure behind another framework's error."""
    front_end = sys.modules.get("gradring.tensorflow")
    found = None if front_end is None else front_end.failure_of(error)
    return cast("GradringError | None", found)
