"""The policy of a job with tf.data service beside its ranks: a dispatcher and input workers.

The dispatcher has number -1, and workers have -2, -3, ... The dispatcher starts first. The ranks,
which have a policy of their own, start when the dispatcher has reported its port; they get its
address in a variable. A worker that ends is restarted at the same port, so that the ranks find it
again. If the dispatcher ends, its state is lost, and the job ends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from gradring.config.parse import joined_address
from gradring.config.values import Settings
from gradring.errors import ConfigError
from gradring.launch.hosts import THIS_HOST, Host, name_of_this_machine
from gradring.launch.output import say
from gradring.launch.processes import RankProcess
from gradring.launch.program import Program
from gradring.launch.report import Blame, port_left
from gradring.launch.slots import HOST_FAILURES, LIVED_S, pause_s
from gradring.launch.supervisor import Policy, Supervisor
from gradring_start import STAND_INS

DISPATCHER = -1
SERVER = "gradring.launch.input_server"
UNPROTECTED = "--input-unprotected"


class InputWorkers(Policy):
    """Ranks with a policy of their own, and tf.data service."""

    def __init__(self, job: Policy, workers: int, hosts: Sequence[Host]) -> None:
        """Places the dispatcher on the first host, and the workers on all hosts in turn.

        Args:
            job: The policy of the ranks.
            workers: Number of workers, at least 1.
            hosts: The hosts of the job; empty: this machine.
        """
        self._ranks = job
        self._hosts = hosts or [THIS_HOST]
        self.ranks, self.servers, self.restarts = job.ranks, job.servers, job.restarts
        self.helpers = [self._hosts[0], *islice(cycle(self._hosts), workers)]
        self._reset()

    def _reset(self) -> None:
        self._address: str | None = None
        self._has_failed = False
        #: Last port, last start, early failures in a row, and time of the next start of each
        #: process, by its number.
        self._ports: dict[int, int] = {}
        self._started_at: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        self._due: dict[int, float] = {}

    def check(self, environ: Mapping[str, str], *, unprotected: bool) -> None:
        """Refuses a service that other machines could use, unless the user allows it.

        Args:
            environ: The variables; ``GRADRING_REQUIRE_AUTH`` can require authentication.
            unprotected: True if the user allows it.

        Raises:
            ConfigError: There are other hosts, or ``GRADRING_REQUIRE_AUTH`` is set.
        """
        if unprotected:
            return
        if Settings.from_environ(environ).require_auth:
            why = "GRADRING_REQUIRE_AUTH asks for authentication"
        elif not self.is_local:
            why = "there may be processes on other hosts"
        else:
            return
        raise ConfigError(
            f"--input-workers: {why}, and TensorFlow's tf.data service has neither authentication "
            "nor encryption. Anybody who reaches its ports can run datasets in its workers, and "
            f"so read and write files there; give {UNPROTECTED} in a network that only you can "
            "reach"
        )

    @property
    def is_local(self) -> bool:
        """True if no process can run on another host."""
        return self._ranks.is_local and super().is_local

    @property
    def pending(self) -> bool:
        """True until the ranks are started."""
        return not self._has_failed and (self._address is None or self._ranks.pending)

    def name(self, number: int) -> str:
        """Returns the name of a process in messages."""
        return super().name(number) if number < 0 else self._ranks.name(number)

    def begin(self, job: Supervisor, environ: Mapping[str, str]) -> None:
        """Starts the dispatcher."""
        super().begin(job, environ)
        self._reset()
        self._environ = environ
        self._start(DISPATCHER, time.monotonic())

    def act(self, now: float) -> None:
        """Starts workers and ranks once the dispatcher listens, and restarts due workers."""
        if self._has_failed:
            return
        if self._address is None:
            port = port_left(self._job.failure_of(DISPATCHER))
            if port is None:
                return
            self._address = joined_address(self._name_of(DISPATCHER), port)
            for index in range(1, len(self.helpers)):
                self._start(DISPATCHER - index, now)
            variables = {"GRADRING_INPUT_SERVICE": f"grpc://{self._address}"}
            self._ranks.begin(self._job, {**self._environ, **variables})
        for number, at in list(self._due.items()):
            if now >= at and not self._job.processes.helpers[number].group_is_alive:
                del self._due[number]
                self._start(number, now)
        self._ranks.act(now)

    def ended(self, ended: Sequence[RankProcess], now: float) -> list[RankProcess]:
        """Restarts a lost worker; a lost dispatcher, or too many early failures, end the job."""
        ranks = [process for process in ended if process.rank >= 0]
        if self._has_failed:
            return [process for process in ranks if process.exit_code != 0]
        failed = self._ranks.ended(ranks, now) if ranks else []
        is_over = bool(failed) or not (self._job.processes.running() or self.pending)
        for process in ended:
            if process.rank < 0 and not is_over and not self._starts_again(process, now):
                self._has_failed = True
                failed = [process, *failed]
        return failed

    def outcome(self) -> tuple[int, str | None]:
        """Returns the outcome of the ranks' policy."""
        return self._ranks.outcome()

    def culprit(self, blames: Mapping[int, Blame | None]) -> tuple[int, str]:
        """Returns a failed process of the service, or else the rank that failed first."""
        own = next((number for number in blames if number < 0), None)
        return self._ranks.culprit(blames) if own is None else (own, "")

    def close(self) -> None:
        """Closes the ranks' policy."""
        self._ranks.close()

    def _start(self, number: int, now: float) -> None:
        words = [SERVER, self._name_of(number), str(self._ports.get(number, 0))]
        words += [] if self._address is None else [self._address]
        environ = {each: value for each, value in self._environ.items() if each not in STAND_INS}
        self._started_at[number] = now
        self._job.start(number, environ, Program(words, module=True))

    def _starts_again(self, process: RankProcess, now: float) -> bool:
        number = process.rank
        if number == DISPATCHER:
            return False
        port = port_left(self._job.failure_of(number))
        if port is not None:
            self._ports[number] = port
        lived = port is not None and now >= self._started_at[number] + LIVED_S
        failures = self._failures[number] = 1 if lived else self._failures.get(number, 0) + 1
        if failures >= HOST_FAILURES:
            return False
        pause = pause_s(failures - 1)
        self._due[number] = now + pause
        say(
            f"{self.name(number)} on {process.host} failed ({process.ending}); it is started again "
            f"in {pause:g} s, and the elements that it was reading are missing in this epoch"
        )
        return True

    def _name_of(self, number: int) -> str:
        host = self.helpers[-1 - number]
        if not host.is_local:
            return host.name
        return name_of_this_machine(self._hosts, self._environ, alone=self.is_local)
