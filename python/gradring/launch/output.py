"""Output of many ranks as whole lines with prefixes, so that it stays readable.

A line is printed when its end has arrived. A progress bar redraws one line with carriage returns:
only its newest state is shown, at most every `PROGRESS_S` seconds. A log file gets all bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from pathlib import Path
from typing import IO, ClassVar

from gradring.machine.streams import print_error, write

#: A longer line is printed in pieces, so that memory stays bounded.
MAX_LINE_BYTES = 64 * 1024
PROGRESS_S = 2.0
#: An unfinished line counts as a prompt if it has not grown for this time.
PROMPT_S = 0.1
READ_BYTES = 64 * 1024
#: Terminal colour codes, without red and without colours that are hard to read.
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
#: Mark before the failure file of a remote rank, which `remote_rank` sends in standard error.
FAILURE_MARK = b"\x1egradring failure "
#: Capacity of each stream's last lines, which the report of a failure uses.
TAIL_LINES = 400
#: First line of a Python traceback.
TRACEBACK = b"Traceback (most recent call last):"


class LineBuffer:
    """Cuts a stream of bytes into lines; they are returned without their line ends.

    Attributes:
        passed: Raw bytes of the lines that the last call returned or skipped; an element is a line,
            or earlier states of a redrawn line.
    """

    def __init__(self) -> None:
        """Makes an empty buffer."""
        self.passed: list[bytes] = []
        self._pending = b""
        self._drawn: bytes | None = None
        self._drawn_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Returns the lines that ``data`` completes; ``now`` is the time in seconds.

        An unfinished redrawn line is returned too if it has changed, at most every `PROGRESS_S`.
        """
        *complete, self._pending = (self._pending + data).split(b"\n")
        lines = [line for raw in complete if (line := self._finish(raw)) is not None]
        self.passed = [raw + b"\n" for raw in complete]
        redrawn = b"\r" in self._pending
        if redrawn:
            newest = _newest(self._pending) + b"\r" * self._pending.endswith(b"\r")
            if earlier := self._pending[: len(self._pending) - len(newest)]:
                self.passed.append(earlier)
            self._pending = newest
        while len(self._pending) > MAX_LINE_BYTES:
            lines.append(self._pending[:MAX_LINE_BYTES])
            self.passed.append(lines[-1])
            self._pending = self._pending[MAX_LINE_BYTES:]
        if redrawn and now - self._drawn_at >= PROGRESS_S:
            newest = _newest(self._pending)
            if newest and newest != self._drawn:
                self._drawn, self._drawn_at = newest, now
                lines.append(newest)
        return lines

    @property
    def unfinished(self) -> bytes:
        """The beginning of a line; empty if the line is redrawn."""
        return b"" if self._drawn is not None or b"\r" in self._pending else self._pending

    def flush(self) -> list[bytes]:
        """Returns the last line if it has no end."""
        raw, self._pending = self._pending, b""
        self.passed = [raw + b"\n"] if raw else []
        line = self._finish(raw) if raw else None
        return [] if line is None else [line]

    def _finish(self, raw: bytes) -> bytes | None:
        """Returns the visible text of a finished line; None if it was just shown as progress."""
        line, shown, self._drawn = _newest(raw), self._drawn, None
        return None if shown is not None and line == shown else line


class Log:
    """The log file of a process; lines of its two streams are not mixed.

    Attributes:
        path: The file's name.
    """

    def __init__(self, file: IO[bytes]) -> None:
        """Wraps an unbuffered file."""
        self.path: str = file.name
        self._file = file
        self._unfinished: object = None

    @property
    def closed(self) -> bool:
        """True once the file is closed; writing must stop."""
        return self._file.closed

    def write(self, data: bytes, stream: object) -> None:
        """Appends bytes of a stream, which can end inside a line.

        Raises:
            OSError: The file cannot be written.
        """
        if data:
            between = b"" if self._unfinished in (None, stream) else b"\n"
            self._unfinished = None if data.endswith(b"\n") else stream
            self._file.write(between + data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Logs(contextlib.ExitStack):
    """The log files of all processes, ``rank-0.log`` and so on in one directory."""

    def __init__(self, directory: Path | None, *, replace: bool) -> None:
        """Opens no file yet; ``replace`` empties files of an earlier attempt first."""
        super().__init__()
        self._directory = directory
        self._replace = replace
        self._files: dict[str, Log | None] = {}

    def path(self, title: str) -> Path | None:
        """Returns the log file of a process; None if there is no directory."""
        return self._directory and self._directory / f"{title.replace(' ', '-')}.log"

    def open(self, title: str) -> Log | None:
        """Returns the open log of a process; None without a directory or if it cannot be written.

        Raises:
            OSError: The very first file cannot be written.
        """
        path = self.path(title)
        if path is None or title in self._files:
            return self._files.get(title)
        file: Log | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = "wb" if self._replace else "ab"
            file = Log(self.enter_context(open(path, mode, buffering=0)))  # noqa: SIM115
        except OSError as error:
            if self._replace and not self._files:
                raise
            # A missing log must not end a running job.
            say(f"{title} has no log: {error.filename}: {error.strerror}")
        self._files[title] = file
        return file


class Tracebacks:
    """A filter that shows one traceback when a signal interrupts all ranks at once.

    Attributes:
        one: True to show only the first traceback from now on. Any other stream is hidden from the
            start of its traceback on.
        hidden: Hidden lines of each stream that began another traceback.
    """

    def __init__(self) -> None:
        """Shows all tracebacks until `one` is set."""
        self.one = False
        self.hidden: dict[RankOutput, int] = {}
        self._first: RankOutput | None = None

    def shown(self, output: RankOutput, lines: list[bytes]) -> list[bytes]:
        """Returns the lines to show among a stream's next lines."""
        if not self.one or output is self._first:
            return lines
        begins = 0
        if output not in self.hidden:
            begun = (number for number, line in enumerate(lines) if TRACEBACK in line)
            begins = next(begun, len(lines))
        if begins < len(lines):
            if self._first is None:
                self._first = output
                return lines
            self.hidden[output] = self.hidden.get(output, 0) + len(lines) - begins
        return lines[:begins]


class RankOutput:
    """One of a rank's two output streams: its pipe, its targets and its last lines.

    Attributes:
        asking: The stream whose prompt is the last text on the terminal, if any.
        lines_shown: Number of lines shown so far, of all streams.
        shown_at: Value of ``lines_shown`` after this stream's last shown line; 0 if it has shown
            none.
    """

    asking: ClassVar[RankOutput | None] = None
    lines_shown: ClassVar[int] = 0

    def __init__(
        self,
        rank: int,
        pipe: IO[bytes],
        target: IO[bytes],
        log: Log | None,
        *,
        name: str,
        failure: Path | None = None,
        tracebacks: Tracebacks | None = None,
        is_shown: bool = True,
    ) -> None:
        """Copies nothing yet.

        Args:
            rank: The rank, which has a colour of its own on a terminal.
            pipe: The read end of the stream.
            target: Output for the prefixed lines.
            log: File for all output without prefix, if any.
            name: Name for the prefix of every line.
            failure: File for the relayed failure of a rank on another host; None for a local rank.
            tracebacks: Filter of tracebacks; None: all are shown.
            is_shown: False if lines go to ``log`` only.
        """
        self.pipe = pipe
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.prefix = _prefix(rank, name, target)
        self._target = target
        self._log = log
        self._failure = failure
        self._tracebacks = tracebacks
        self._is_shown = is_shown
        self._buffer = LineBuffer()
        self._arrived_at = float("-inf")
        self._prompt = b""
        self.shown_at = 0

    def copy(self, now: float) -> bool:
        """Copies the bytes that have arrived; returns False at the end of the stream."""
        data = os.read(self.pipe.fileno(), READ_BYTES)
        self._arrived_at = now
        self._emit(self._buffer.feed(data, now) if data else self._buffer.flush())
        return bool(data)

    def has_prompt(self) -> bool:
        """Returns True if an unfinished line is not shown yet and the output is a terminal."""
        shown = self._prompt if RankOutput.asking is self else b""
        return self._buffer.unfinished not in (b"", shown) and self._target.isatty()

    def show_prompt(self, now: float) -> None:
        """Shows an unfinished line that has stopped growing, probably a question to the user."""
        if self._is_shown and self.has_prompt() and now >= self._arrived_at + PROMPT_S:
            text = self._buffer.unfinished
            self._write(self._continued(text))
            RankOutput.asking, self._prompt = self, text

    def finish(self) -> None:
        """Prints an unfinished last line and closes the pipe."""
        self._emit(self._buffer.flush())
        self.pipe.close()

    def _emit(self, lines: list[bytes]) -> None:
        passed = self._buffer.passed
        if self._failure is not None:
            lines = self._without_failure(lines, self._failure)
            passed = [_without_mark(each) for each in passed]
        if self._log is not None and not self._log.closed:
            self._write_log(self._log, b"".join(passed))
        if not lines:
            return
        self.tail.extend(lines)
        if self._is_shown:
            shown = self._tracebacks.shown(self, lines) if self._tracebacks else lines
            self._write(b"".join(self._continued(line) + b"\n" for line in shown))
            if shown:
                RankOutput.lines_shown += len(shown)
                self.shown_at = RankOutput.lines_shown

    def _continued(self, text: bytes) -> bytes:
        """Returns the line with its prefix, or the rest of a line whose prompt is already shown."""
        asking, RankOutput.asking = RankOutput.asking, None
        if asking is self and text.startswith(self._prompt):
            return text[len(self._prompt) :]
        return b"\n" * (asking is not None and self._target.isatty()) + self.prefix + text

    def _write(self, data: bytes) -> None:
        try:
            write(self._target, data)
        except BrokenPipeError:
            raise
        except OSError:  # a full disk loses lines; it must not end the ranks
            pass

    def _write_log(self, log: Log, data: bytes) -> None:
        """Writes to the log of both streams; on failure closes it and prints one message."""
        try:
            log.write(data, self)
        except OSError as error:
            log.close()
            path = f"{log.path} on {socket.gethostname()}"
            say(f"{path} cannot be written any more ({error.strerror})")

    def _without_failure(self, lines: list[bytes], file: Path) -> list[bytes]:
        """Returns the rank's own lines; writes a relayed failure to its file."""
        kept = []
        for line in lines:
            own, mark, failure = line.partition(FAILURE_MARK)
            if mark:
                with contextlib.suppress(OSError):  # the report then uses the rank's output
                    file.write_bytes(failure)
            if own or not mark:
                kept.append(own)
        return kept


def _without_mark(passed: bytes) -> bytes:
    """Returns the rank's own part of a line, without a relayed failure."""
    own, mark, _ = passed.partition(FAILURE_MARK)
    return own + b"\n" if own and mark else own


def say(sentence: str) -> None:
    """Prints a message of the launcher."""
    begin = "" if RankOutput.asking is None else "\n"
    RankOutput.asking = None
    print_error(f"{begin}gradring run: {sentence}")


def _prefix(rank: int, name: str, target: IO[bytes]) -> bytes:
    """Returns the name in brackets, in the rank's colour on a terminal unless NO_COLOR is set."""
    prefix = f"[{name}]"
    if os.environ.get("NO_COLOR") or not target.isatty():
        return f"{prefix} ".encode()
    return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m ".encode()


def _newest(raw: bytes) -> bytes:
    """Returns the text that a terminal shows of a line with carriage returns."""
    return raw.rstrip(b"\r").rpartition(b"\r")[2]
