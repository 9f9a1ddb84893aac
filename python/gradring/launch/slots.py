"""Slots of an elastic job: decides when and on which host each worker starts.

This module has no processes and no clock: callers report events with their times and poll for
decisions. The processes themselves agree on the members and ranks of the next group. Here, a worker
is only a slot: a permanent number, and a host and a port that stay the same as long as the host is
available. Users see the slot's number as the worker's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from signal import SIGTERM

from gradring.config.words import agreed, listed
from gradring.launch.hosts import Host

#: Pause before the first restart, its longest value, and the limit of doublings.
FIRST_PAUSE_S, LONGEST_PAUSE_S, DOUBLINGS = 1.0, 60.0, 6
#: A failure within this time after a start counts as early, and perhaps the host is faulty.
LIVED_S = 60.0
#: Number of early failures in a row after which a host is given up.
HOST_FAILURES = 3
#: Exit codes of a process that was asked to leave: the signal, or a shell's code for it.
LEFT = (-SIGTERM, 128 + SIGTERM)


def pause_s(failures: int) -> float:
    """Returns the pause before the next attempt, after `failures` earlier ones in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures, DOUBLINGS), LONGEST_PAUSE_S)


@dataclass(frozen=True)
class Limits:
    """The user's limits.

    Attributes:
        founders: Number of ranks of the first group.
        least: Minimum number of ranks of the first group.
        most: Maximum number of ranks that run at the same time.
        start_s: Time limit for hosts of the first group to become available.
        restarts: Maximum number of restarts of single ranks in the whole job; None: no limit.
        host_failures: Number of early failures of one rank in a row after which its host is given
            up; 0: never.
        cooldown_s: Time for which a host is given up; doubles each time. None: for ever.
    """

    founders: int
    least: int
    most: int
    start_s: float
    restarts: int | None = None
    host_failures: int = HOST_FAILURES
    cooldown_s: float | None = None


@dataclass(frozen=True)
class Start:
    """An order to start a rank.

    Attributes:
        slot: The slot's number.
        host: The host to start it on.
        port: The port at which it listens.
        attempt: Number of earlier starts of the slot.
    """

    slot: int
    host: Host
    port: int
    attempt: int


@dataclass
class _Known:
    """A host in the current list."""

    host: Host
    ask_at: float
    ports: list[int] = field(default_factory=list)
    asked: bool = False
    failures: int = 0
    given_up: bool = False
    #: Time at which a given-up host can have ranks again, and how often it was given up.
    back_at: float = 0.0
    times: int = 0

    @property
    def lacks(self) -> int:
        return self.host.slots - len(self.ports)


@dataclass
class _Slot:
    """A worker that runs, or starts at ``due_at`` on a free place, or never again (None)."""

    number: int
    due_at: float | None
    place: tuple[Host, int] | None = None
    attempts: int = 0
    running: bool = False
    leaves: bool = False
    started_at: float = 0.0
    failures: int = 0

    def is_on(self, name: str) -> bool:
        return self.place is not None and self.place[0].name == name


class Slots:
    """The hosts and slots of one job."""

    def __init__(self, limits: Limits, hosts: Sequence[Host], now: float, *, discovers: bool):
        """Starts with hosts, but without slots.

        Args:
            limits: The user's limits.
            hosts: Hosts known from the start.
            now: The time in seconds, on any clock.
            discovers: True if `offer` can add hosts later.
        """
        self._limits = limits
        self._discovers = discovers
        self._start_until = now + limits.start_s
        self._hosts: dict[str, _Known] = {}
        self._slots: list[_Slot] = []
        self._restarts = 0
        self.founded = False
        #: True once a rank has ended with success; then no rank is started any more.
        self.completed = False
        #: The reason why the job cannot begin, if any.
        self.problem: str | None = None
        self.offer(hosts, now)

    @property
    def over(self) -> bool:
        """True if no rank runs and none will be started."""
        runs = any(slot.running for slot in self._slots)
        return self.problem is not None or (self.founded and not runs)

    @property
    def leaving(self) -> set[int]:
        """The running slots that were asked to leave."""
        return {slot.number for slot in self._slots if slot.leaves}

    def offer(self, hosts: Sequence[Host], now: float) -> list[int]:
        """Replaces the list of hosts; returns the running slots that must leave their host."""
        if self.completed:
            return []
        # A host is never asked for more ports than the job can use.
        most = self._limits.most
        listed = {host.name: replace(host, slots=min(host.slots, most)) for host in hosts}
        self._hosts = {
            name: self._hosts.get(name) or _Known(host, ask_at=now) for name, host in listed.items()
        }
        for name, known in self._hosts.items():
            known.host = listed[name]
        leaving = []
        for slot in self._beyond(listed):
            if slot.running:
                slot.leaves = True
                leaving.append(slot.number)
            else:
                slot.place = None
        return leaving

    def to_ask(self, now: float) -> list[Host]:
        """Returns the hosts to ask for free ports now; their slots are the numbers of ports."""
        asked = []
        for known in self._hosts.values():
            known.given_up &= now < known.back_at
            idle = not (known.asked or known.given_up or self.completed)
            if idle and known.lacks > 0 and now >= known.ask_at:
                known.asked = True
                asked.append(replace(known.host, slots=known.lacks))
        return asked

    def answered(self, host: Host, ports: Sequence[int]) -> None:
        """Records a host's answer: its free ports."""
        if (known := self._hosts.get(host.name)) is not None:
            known.asked, known.failures = False, 0
            known.ports = list(dict.fromkeys([*known.ports, *ports]))

    def unanswered(self, host: Host, now: float) -> str:
        """Records that a host cannot be used; returns words for the consequence."""
        if (known := self._hosts.get(host.name)) is None:
            return "it is no longer listed"
        known.asked = False
        known.failures += 1
        if known.failures >= self._limits.host_failures > 0:
            known.failures, known.ask_at = 0, now
            return f"it is given up{self._give_up(host.name, now)}"
        pause = pause_s(known.failures - 1)
        known.ask_at = now + pause
        return f"it is asked again in {pause:g} s"

    def to_start(self, now: float, busy: Collection[int] = ()) -> list[Start]:
        """Returns the ranks to start now; the first group starts all at once.

        Args:
            now: The time.
            busy: Slots that cannot start yet, because children of their last process still run.
        """
        if self.completed or self.over:
            return []
        if not self.founded:
            return self._found(now)
        starts = []
        for slot in self._slots:
            due = not slot.running and slot.due_at is not None and now >= slot.due_at
            if due and slot.number not in busy:
                slot.place = slot.place or next(self._free(), None)
                starts += self._begin(slot, now)
        for place in self._free(self._limits.most - len(self._slots)):
            starts += self._begin(self._new_slot(place), now)
        return starts

    def ended(
        self, exits: Mapping[int, int], now: float, *, without_group: Collection[int] = ()
    ) -> dict[int, str]:
        """Records ended ranks; returns words for each one's consequence while the job continues.

        Args:
            exits: Exit codes by slot, as `RankProcess` has them.
            now: The time.
            without_group: Those of the ranks that did not find the group.
        """
        left = {number for number in exits if self._slots[number].leaves}
        for number in exits:
            self._slots[number].running = self._slots[number].leaves = False
        self.completed |= any(code == 0 and slot not in left for slot, code in exits.items())
        if self.completed or self.over:
            return {}
        return {
            number: self._after_leaving(self._slots[number], now)
            if number in left
            else self._after(self._slots[number], code, number in without_group, now)
            for number, code in exits.items()
        }

    def _after_leaving(self, slot: _Slot, now: float) -> str:
        slot.place, slot.due_at, slot.failures = None, now, 0
        return "it is started again where there is room"

    def _after(self, slot: _Slot, exit_code: int, without_group: bool, now: float) -> str:
        assert slot.place is not None
        host = slot.place[0]
        if exit_code in LEFT:
            pass  # somebody has stopped the rank; its host is not the reason
        elif without_group or now < slot.started_at + LIVED_S:
            slot.failures += 1
        else:
            slot.failures = 0
        if self._limits.restarts is not None and self._restarts >= self._limits.restarts:
            return f"it is not started again (--max-restarts {self._limits.restarts})"
        self._restarts += 1
        pause = pause_s(max(0, slot.failures - 1))
        slot.due_at = now + pause
        if slot.failures >= self._limits.host_failures > 0:
            for_so_long = self._give_up(host.name, now)
            slot.failures = 0
            return (
                f"{host.name} is given up{for_so_long} after {self._limits.host_failures} failures "
                "in a row, and the worker is started again where there is room"
            )
        if self._hosts[host.name].given_up:
            slot.place = None
            return "it is started again where there is room"
        return f"it is started again in {pause:g} s, to join the others"

    def _give_up(self, name: str, now: float) -> str:
        """Starts no more ranks on a host; running ones continue. Returns words for the time."""
        for slot in self._slots:
            if slot.is_on(name) and not slot.running:
                slot.place = None
        known = self._hosts[name]
        known.given_up, known.times = True, known.times + 1
        if self._limits.cooldown_s is None:
            known.back_at = math.inf
            return ""
        pause = self._limits.cooldown_s * 2.0 ** min(known.times - 1, DOUBLINGS)
        known.back_at = now + pause
        return f" for {pause:g} s"

    def _found(self, now: float) -> list[Start]:
        """Returns the ranks of the first group once all hosts have answered or the time is over."""
        hosts = [known for known in self._hosts.values() if not known.given_up]
        if self._hosts and all(known.back_at == math.inf for known in self._hosts.values()):
            self.problem = (
                f"no host is left: {listed(self._hosts)} could not be used and "
                f"{agreed(len(self._hosts), 'was', 'were')} given up; correct the errors above, or "
                "give other hosts"
            )
            return []
        late = now >= self._start_until
        if not late and any(known.lacks > 0 and not known.failures for known in hosts):
            return []
        places = list(self._free(self._limits.founders))
        retried = any(known.lacks > 0 for known in hosts)
        if len(places) < self._limits.founders and retried and not late:
            return []
        if len(places) < self._limits.least:
            if late or not self._discovers:
                self.problem = (
                    f"there is room for {len(places)} workers, and the job needs "
                    f"{self._limits.least}; give more hosts, or a smaller --min-np"
                )
            return []
        self.founded = True
        return [start for place in places for start in self._begin(self._new_slot(place), now)]

    def _new_slot(self, place: tuple[Host, int]) -> _Slot:
        slot = _Slot(len(self._slots), due_at=None, place=place)
        self._slots.append(slot)
        return slot

    def _begin(self, slot: _Slot, now: float) -> list[Start]:
        if slot.place is None:
            return []
        slot.running, slot.started_at, slot.due_at = True, now, None
        slot.attempts += 1
        return [Start(slot.number, *slot.place, slot.attempts - 1)]

    def _free(self, most: int = 1) -> Iterator[tuple[Host, int]]:
        """Yields at most ``most`` free places, host by host."""
        found = 0
        for name, known in self._hosts.items():
            if known.given_up:
                continue
            there = [slot for slot in self._slots if slot.is_on(name)]
            taken = {slot.place[1] for slot in there if slot.place is not None}
            room = known.host.slots - len(there)
            for port in [port for port in known.ports if port not in taken][: max(0, room)]:
                if found >= most:
                    return
                found += 1
                yield known.host, port

    def _beyond(self, listed: Mapping[str, Host]) -> list[_Slot]:
        """Returns the slots beyond their host's capacity; the oldest slots stay."""
        beyond = []
        for name in {slot.place[0].name for slot in self._slots if slot.place is not None}:
            there = [slot for slot in self._slots if slot.is_on(name) and not slot.leaves]
            beyond += there[listed[name].slots if name in listed else 0 :]
        return sorted(beyond, key=lambda slot: slot.number)
