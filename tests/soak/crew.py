"""The processes of one part of the soak. One that was killed as planned is replaced."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gradring.machine.ports import free_ports
from soak.member import GO, STOP, Job, Message
from soak.plan import Part, Plan

SILENCE_LIMIT_S = 240.0
"""A process that says nothing for so long hangs. TensorFlow's import takes longest."""
DUMP_S = 1.0
"""How long a process that hangs may take to print where its threads are."""
LOG_LINES = 60
ROUNDS_MIN = 14
"""However little the time: fewer rounds tell nothing."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": f"{128 << 10}"}
"""Keeps glibc from raising the size from which it returns memory at once, as it does by itself:
what the processes hold would be hidden behind what the allocator keeps."""


@dataclass
class Life:
    """What one process has told, from its start to its end."""

    process: int
    messages: list[Message] = field(default_factory=list)


@dataclass
class Story:
    """What has become of a part."""

    part: Part
    lives: list[Life] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """How many groups have formed."""
        return max((m.round for life in self.lives for m in life.messages), default=0)

    def done(self) -> tuple[int, int]:
        """Collectives and training steps of the group, as its first process counted them."""
        messages = [m for life in self.lives if life.process == 0 for m in life.messages]
        return (messages[-1].collectives, messages[-1].steps) if messages else (0, 0)


class Crew:
    """Runs one part."""

    def __init__(
        self, part: Part, seed: str, seconds: float, logs: Path, leaky: bool = False
    ) -> None:
        """Prepares a crew that plays for ``seconds``, or some rounds; ``logs`` gets its stderr."""
        self.story = Story(part)
        self._seed, self._seconds, self._logs, self._leaky = seed, seconds, logs, leaky
        self._rendezvous = [f"127.0.0.1:{port}" for port in free_ports(part.world_size)]
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._heard_at: dict[int, float] = {}
        self._last_round = 0
        self._until = 0.0

    def run(self) -> Iterator[None]:
        """Runs the part; comes back once a second until it is over."""
        self._until = time.monotonic() + self._seconds
        threads = [
            threading.Thread(target=self._keep, args=(process,))
            for process in range(self.story.part.world_size)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                self._look_for_silence()
                yield
                time.sleep(1.0)
        finally:
            self._end()
            for thread in threads:
                thread.join()

    def finish(self) -> None:
        """Lets the part end after the rounds that have begun, whatever time is left."""
        self._until = 0.0

    def _keep(self, process: int) -> None:
        """Starts a process, and again whenever a plan has killed it."""
        first = 1
        while True:
            life = Life(process)
            with self._lock:
                if self.story.problems:
                    return
                self.story.lives.append(life)
                child = self._running[process] = self._start(process, first)
                self._heard_at[process] = time.monotonic()
            self._listen(child, life)
            exit_code = child.wait()
            with self._lock:
                del self._running[process]
                if exit_code == 0 or self.story.problems:
                    return
            last = life.messages[-1].round if life.messages else 0
            if exit_code == -signal.SIGKILL and last and self._plan(last).kills(process):
                first = last + 1
                continue
            self._fail(f"process {process} ended with {exit_code} in round {last}", process)
            return

    def _start(self, process: int, first: int) -> subprocess.Popen[str]:
        part = self.story.part
        job = Job(
            *(part, self._seed, process, first),
            *(self._rendezvous, self._token, self._leaky),
        )
        environ = {
            **os.environ,
            **MALLOC,
            "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path),
        }
        with open(self._log(process), "a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "soak.member", json.dumps(asdict(job))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
            )

    def _listen(self, child: subprocess.Popen[str], life: Life) -> None:
        assert child.stdout is not None and child.stdin is not None
        with child.stdin, child.stdout:
            for line in child.stdout:
                message = Message.parse(line)
                with self._lock:
                    life.messages.append(message)
                    self._heard_at[life.process] = time.monotonic()
                    answer = None if message.within else self._answer(message.round)
                if answer is not None:
                    print(answer, file=child.stdin, flush=True)

    def _answer(self, number: int) -> str:
        """A round that one process has begun, all have to play."""
        enough = (number > ROUNDS_MIN or self.story.part.trains) and time.monotonic() > self._until
        if enough and number > self._last_round:
            return STOP
        self._last_round = max(self._last_round, number)
        return GO

    def _plan(self, number: int) -> Plan:
        return Plan.of(self.story.part, self._seed, number)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        with self._lock:
            silent = [p for p in self._running if now - self._heard_at[p] > SILENCE_LIMIT_S]
            for process in silent:
                self._running[process].send_signal(signal.SIGUSR1)
        if silent:
            time.sleep(DUMP_S)
            self._fail(f"process {silent[0]} said nothing for {SILENCE_LIMIT_S:g} s", silent[0])

    def _fail(self, what: str, process: int) -> None:
        lines = self._log(process).read_text(errors="replace").splitlines()[-LOG_LINES:]
        with self._lock:
            self.story.problems.append("\n".join([f"{self.story.part.name}: {what}", *lines]))
        self._end()

    def _end(self) -> None:
        """Ends what still runs; nothing does after a part that went well."""
        with self._lock:
            for child in self._running.values():
                child.kill()

    def _log(self, process: int) -> Path:
        return self._logs / f"{self.story.part.name.replace(' ', '-')}-{process}.txt"
