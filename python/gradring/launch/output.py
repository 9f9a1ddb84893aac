"""Whole, prefixed lines: what many ranks print at once stays readable.

A line is passed on when its end has arrived. A progress bar redraws one line with carriage returns;
of these only the newest state is shown, at most every `PROGRESS_S` seconds. A log file has all.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path
from typing import IO, ClassVar

from gradring.machine.streams import print_error, write

#: A longer line is passed on in pieces, so that memory stays bounded.
MAX_LINE_BYTES = 64 * 1024
PROGRESS_S = 2.0
#: A line without an end that nothing has been added to for so long is a prompt.
PROMPT_S = 0.1
READ_BYTES = 64 * 1024
#: Of a terminal, without red and what is hard to read.
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
#: Begins a line that is not the rank's: the far end of ssh relays what ended the rank.
FAILURE_MARK = b"\x1egradring failure "
#: Lines of each stream that are kept for the report of a failure.
TAIL_LINES = 400
#: Begins what Python prints of an error.
TRACEBACK = b"Traceback (most recent call last):"


class LineBuffer:
    """Cuts a stream of bytes into lines; they are returned without their line ends.

    Attributes:
        passed: The bytes that the last call has passed on or left out, as they came: each has a
            line, or states of one that is redrawn.
    """

    def __init__(self) -> None:
        """Makes an empty buffer."""
        self.passed: list[bytes] = []
        self._pending = b""
        self._drawn: bytes | None = None
        self._drawn_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that ``data`` completes, at time ``now`` in seconds.

        A redrawn line that stays incomplete is returned as well, if it has changed and the last one
        is long enough ago.
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
        """The beginning of a line, unless it is one that is redrawn."""
        return b"" if self._drawn is not None or b"\r" in self._pending else self._pending

    def flush(self) -> list[bytes]:
        """The last line, when it has no end."""
        raw, self._pending = self._pending, b""
        self.passed = [raw + b"\n"] if raw else []
        line = self._finish(raw) if raw else None
        return [] if line is None else [line]

    def _finish(self, raw: bytes) -> bytes | None:
        """The visible text of a finished line; None when it has just been shown as progress."""
        line, shown, self._drawn = _newest(raw), self._drawn, None
        return None if shown is not None and line == shown else line


class Log:
    """The file of what a process prints; a line of one of its streams stays apart from the other's.

    Attributes:
        path: Its name.
    """

    def __init__(self, file: IO[bytes]) -> None:
        """Writes to an unbuffered file."""
        self.path: str = file.name
        self._file = file
        self._unfinished: object = None

    @property
    def closed(self) -> bool:
        """Whether nothing more is written."""
        return self._file.closed

    def write(self, data: bytes, stream: object) -> None:
        """Adds what has come from a stream, perhaps the beginning of a line.

        Raises:
            OSError: It cannot be written.
        """
        if data:
            between = b"" if self._unfinished in (None, stream) else b"\n"
            self._unfinished = None if data.endswith(b"\n") else stream
            self._file.write(between + data)

    def close(self) -> None:
        """Ends it."""
        self._file.close()


class Logs(contextlib.ExitStack):
    """The files for what processes print, ``rank-0.log`` and so on in one directory."""

    def __init__(self, directory: Path | None, *, anew: bool) -> None:
        """Opens none yet; without ``anew``, lines are added to what an earlier attempt wrote."""
        super().__init__()
        self._directory = directory
        self._anew = anew
        self._files: dict[str, Log | None] = {}

    def path(self, title: str) -> Path | None:
        """The file of a process; None if there is no directory."""
        return self._directory and self._directory / f"{title.replace(' ', '-')}.log"

    def open(self, title: str) -> Log | None:
        """The open file of a process, if there is to be one and it can be written.

        Raises:
            OSError: Not even the first can be written.
        """
        path = self.path(title)
        if path is None or title in self._files:
            return self._files.get(title)
        file: Log | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = "wb" if self._anew else "ab"
            file = Log(self.enter_context(open(path, mode, buffering=0)))  # noqa: SIM115
        except OSError as error:
            if self._anew and not self._files:
                raise
            # A job that runs does not end for want of a log.
            say(f"{title} has no log: {error.filename}: {error.strerror}")
        self._files[title] = file
        return file


class Tracebacks:
    """The tracebacks of ranks that are all interrupted at once: the first is enough.

    Attributes:
        one: Whether only the first is shown from now on, and of any other stream nothing after it
            has begun one.
        hidden: The streams that began another one, and how many lines of each were not shown.
    """

    def __init__(self) -> None:
        """Shows all."""
        self.one = False
        self.hidden: dict[RankOutput, int] = {}
        self._first: RankOutput | None = None

    def shown(self, output: RankOutput, lines: list[bytes]) -> list[bytes]:
        """Those of a stream's next lines that are shown."""
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
    """One of a rank's two streams: its pipe, where its lines go, and its last lines.

    Attributes:
        asking: The stream whose prompt is the last that stands on the terminal, if any.
        lines_shown: The number of lines of all streams that have been shown.
        shown_at: What it was when the last line of this stream had been shown; 0: none was.
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
        """Prepares to copy.

        Args:
            rank: Whose stream it is; it has a colour of its own on a terminal.
            pipe: The read end of the stream.
            target: Where the prefixed lines go.
            log: The file for all that comes, without prefix, if any.
            name: What stands in brackets before every line.
            failure: Where what a rank on another host has left goes; None for one on this.
            tracebacks: Says which of them are shown; None: all.
            is_shown: Whether lines go to ``target`` at all.
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
        """Copies what has arrived; returns False when the stream has ended."""
        data = os.read(self.pipe.fileno(), READ_BYTES)
        self._arrived_at = now
        self._emit(self._buffer.feed(data, now) if data else self._buffer.flush())
        return bool(data)

    def has_prompt(self) -> bool:
        """Whether there is the beginning of a line that is not shown yet, on a terminal."""
        shown = self._prompt if RankOutput.asking is self else b""
        return self._buffer.unfinished not in (b"", shown) and self._target.isatty()

    def show_prompt(self, now: float) -> None:
        """Shows the beginning of a line to which nothing is added any more: somebody is asked."""
        if self._is_shown and self.has_prompt() and now >= self._arrived_at + PROMPT_S:
            text = self._buffer.unfinished
            self._write(self._continued(text))
            RankOutput.asking, self._prompt = self, text

    def finish(self) -> None:
        """Passes on an unfinished last line and closes the pipe."""
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
        """A line, or what follows the prompt that is its beginning."""
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
        """Writes to the log of both streams; ends it, and says so once, if that fails."""
        try:
            log.write(data, self)
        except OSError as error:
            log.close()
            say(f"{log.path} cannot be written any more ({error.strerror})")

    def _without_failure(self, lines: list[bytes], file: Path) -> list[bytes]:
        """The rank's own lines, of which the last may have no end."""
        kept = []
        for line in lines:
            own, mark, failure = line.partition(FAILURE_MARK)
            if mark:
                with contextlib.suppress(OSError):  # what the rank has printed counts then
                    file.write_bytes(failure)
            if own or not mark:
                kept.append(own)
        return kept


def _without_mark(passed: bytes) -> bytes:
    """What the rank itself has printed of a line."""
    own, mark, _ = passed.partition(FAILURE_MARK)
    return own + b"\n" if own and mark else own


def say(sentence: str) -> None:
    """Prints a sentence of the launcher's own."""
    begin = "" if RankOutput.asking is None else "\n"
    RankOutput.asking = None
    print_error(f"{begin}gradring run: {sentence}")


def _prefix(rank: int, name: str, target: IO[bytes]) -> bytes:
    """The name in brackets; on a terminal in the rank's own colour, unless NO_COLOR is set."""
    prefix = f"[{name}]"
    if os.environ.get("NO_COLOR") or not target.isatty():
        return f"{prefix} ".encode()
    return f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m ".encode()


def _newest(raw: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns in it."""
    return raw.rstrip(b"\r").rpartition(b"\r")[2]
