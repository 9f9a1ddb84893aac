"""The state of a running or stuck job, and the ranks for which the others wait.

Every rank answers at its port, from a thread that does not need the interpreter. Each rank has a
request of its own, so a rank without an answer does not hide the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gradring import _native
from gradring.config.values import TlsFiles
from gradring.config.words import agreed, ranks
from gradring.errors import AuthenticationError, GradringError
from gradring.records.records import Statement

#: Time limit of one rank's answer.
LIMIT_S = 5.0
#: Shortest wait in a collective that is reported.
WAITS_LONG_S = 1.0
ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class Entered:
    """A collective, and the time since it was entered or ended."""

    sequence: int
    call: str
    age_s: float

    def __str__(self) -> str:
        """Returns text such as ``#4 all_reduce(sum) 'w' float32[98]``."""
        return f"#{self.sequence} {self.call}"


@dataclass(frozen=True)
class RankState:
    """The answer of one rank.

    Attributes:
        rank: The rank.
        host: Its host.
        process_id: Its process id on that host.
        entered: The collective that it is in, for ``age_s``.
        awaited: The ranks for which it waits in that collective.
        ended: The collective that it left last, ``age_s`` ago.
        failed: The reason why its group has failed, or None.
        beside: The ``send`` or ``recv`` that blocks it, for ``age_s``.
    """

    rank: int
    host: str
    process_id: int
    entered: Entered | None
    awaited: tuple[int, ...]
    ended: Entered | None
    failed: str | None
    beside: Entered | None = None

    @property
    def reached(self) -> int:
        """Sequence of the last collective that it entered; 0 for none."""
        return max(e.sequence if e else 0 for e in (self.entered, self.ended))

    @property
    def waits(self) -> bool:
        """True if it has been in a collective for at least `WAITS_LONG_S`."""
        return self.entered is not None and self.entered.age_s >= WAITS_LONG_S

    def statement(self) -> Statement:
        """Converts the state for `_native.diagnose`; ranks compare their calls themselves."""
        known: list[tuple[int, str | None, int, bool]] = []
        if self.ended is not None:
            known.append((self.ended.sequence, None, 0, True))
        if self.entered is not None:
            known.append((self.entered.sequence, None, 0, not self.waits))
        waits_in = self.entered or self.beside
        idle_s = waits_in.age_s if waits_in else 0.0
        return self.rank, known, list(self.awaited), idle_s

    def __str__(self) -> str:
        """Returns one line of the report."""
        doing = "is in no collective"
        if self.entered is not None:
            doing = f"is in {self.entered} since {self.entered.age_s:.1f} s"
            if self.awaited:
                doing += f", waits for {ranks(self.awaited)}"
        elif self.beside is not None:
            doing = f"is in {self.beside.call} since {self.beside.age_s:.1f} s"
        elif self.ended is not None:
            doing += f"; left {self.ended} {self.ended.age_s:.1f} s ago"
        return f"rank {self.rank} on {self.host} (process {self.process_id}) {doing}"


@dataclass(frozen=True)
class JobState:
    """The answers of all ranks.

    Attributes:
        world_size: Number of ranks; 0 if the process that answered has no group.
        states: The answers by rank.
        silent: The reason for a missing answer, by rank.
        missing: The ranks that have not joined, while the group forms; None once it has formed.
        joins: True if the process that answered waits to join an elastic job.
    """

    world_size: int
    states: dict[int, RankState]
    silent: dict[int, str]
    missing: tuple[int, ...] | None = None
    joins: bool = False

    def verdict(self) -> tuple[bool, list[str]]:
        """Returns True if there is no problem, and sentences that name the rank to blame."""
        if self.joins:
            return False, [
                "this process waits to join an elastic job, and knows nothing of it; ask one that "
                "is in it, and look at its log if it lasts"
            ]
        if self.world_size == 0:
            return False, [
                "this process of an elastic job is between two groups: the remaining processes "
                "agree on the next one; ask again, and look at its log if it lasts"
            ]
        if self.missing is not None:
            if not self.missing:
                return True, ["the group is about to form: all ranks have joined"]
            return False, [
                f"the group is still forming: {ranks(self.missing)} of {self.world_size} "
                f"{agreed(len(self.missing), 'has', 'have')} not joined"
            ]
        failed = next((state.failed for state in self.states.values() if state.failed), None)
        if failed is not None:
            return False, [f"the group has failed: {failed}"]
        silent = [
            f"rank {rank} does not answer ({why}): it has ended, is stopped, or its host cannot be "
            "reached"
            for rank, why in self.silent.items()
        ]
        sentences = silent + self._diagnosis() + self._waits_beside()
        return not sentences, sentences or [self._well()]

    def _waits_beside(self) -> list[str]:
        """Returns sentences on ranks that wait for one other rank in ``send`` or ``recv``."""
        return [
            f"rank {state.rank} on {state.host} waits in {state.beside.call} since "
            f"{state.beside.age_s:.1f} s: {ranks(state.awaited)} "
            f"{agreed(len(state.awaited), 'takes', 'take')} no part in it"
            for state in self.states.values()
            if state.beside is not None and state.beside.age_s >= WAITS_LONG_S
        ]

    def _diagnosis(self) -> list[str]:
        """Returns the diagnosis of the group's failure monitor in words."""
        found = _native.diagnose(self.world_size, [s.statement() for s in self.states.values()])
        if found is None:
            return []
        # Ranks that wait in other collectives depend on the same late ranks.
        waiting = [state for state in self.states.values() if state.waits]
        there = next(s for s in waiting if s.entered and s.entered.sequence == found["sequence"])
        if found["problem"] == "late":
            return [_blame(self.states[rank], there, waiting) for rank in found["late"]]
        if found["problem"] == "silent":
            return []
        blamed = found["blamed"]
        stuck = "" if blamed is None else f"; the others wait for rank {blamed}"
        return [
            f"{ranks([s.rank for s in waiting])} {agreed(len(waiting), 'waits', 'wait')} in "
            f"{there.entered}, which all ranks have entered: it is long, or the network "
            "between the waiting ranks is stuck"
            f"{stuck}"
        ]

    def _well(self) -> str:
        reached = max((state.reached for state in self.states.values()), default=0)
        if not reached:
            return "all ranks answer; no collective has been called yet"
        return (
            f"all ranks answer and none has waited for more than {WAITS_LONG_S:g} s; the last "
            f"collective is #{reached}"
        )


def ask_job(rendezvous: str, token: bytes | None, tls: TlsFiles | None = None) -> JobState:
    """Queries rank 0 at ``host:port``, and then every rank at its own address.

    Raises:
        AuthenticationError: The token is not the job's, or a certificate is not accepted.
        GradringError: Rank 0 does not answer, or has another version.
    """
    first = _native.inquire(rendezvous, token or b"", tls, LIMIT_S)
    world_size = first["world_size"]
    if not first["formed"]:
        if first["missing"] is None:
            return JobState(0, {}, {}, joins=not first["runs"])
        return JobState(world_size, {}, {}, tuple(first["missing"]))
    states, silent = {first["rank"]: _state(first)}, {}
    others = {r: address for r, (address, _) in enumerate(first["members"]) if r != first["rank"]}

    def ask(address: str) -> dict[str, Any] | GradringError:
        try:
            return _native.inquire(address, token or b"", tls, LIMIT_S)
        except GradringError as error:
            return error

    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        for (rank, address), answer in zip(
            others.items(), threads.map(ask, others.values()), strict=True
        ):
            if isinstance(answer, AuthenticationError):
                raise answer
            if isinstance(answer, GradringError):
                silent[rank] = f"{first['members'][rank][1]}, {address}: {answer}"
            elif answer["formed"] and (answer["group"], answer["rank"]) == (first["group"], rank):
                states[rank] = _state(answer)
            else:
                silent[rank] = f"a process of another group, or another rank, answers at {address}"
    return JobState(world_size, dict(sorted(states.items())), silent)


def _blame(late: RankState, there: RankState, waiting: Sequence[RankState]) -> str:
    assert there.entered is not None
    wait = agreed(len(waiting), "waits", "wait")
    left = f"it left {late.ended} {late.ended.age_s:.1f} s ago and" if late.ended else "it"
    busy = f"is in {late.beside.call}" if late.beside else "is busy elsewhere in its program"
    return (
        f"rank {late.rank} on {late.host} keeps the others waiting: it has not entered "
        f"{there.entered}, in which {ranks([state.rank for state in waiting])} {wait} since "
        f"{there.entered.age_s:.1f} s; {left} {busy} "
        f"(py-spy dump --pid {late.process_id} on {late.host} shows where)"
    )


def _state(answer: dict[str, Any]) -> RankState:
    def entered(name: str) -> Entered | None:
        return None if answer[name] is None else Entered(*answer[name])

    return RankState(
        answer["rank"],
        answer["host"],
        answer["process_id"],
        entered("entered"),
        tuple(answer["awaited"]),
        entered("ended"),
        answer["failed"],
        entered("beside"),
    )
