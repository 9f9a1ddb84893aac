"""The main demo: three trainings one after the other, and their comparison."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from gradring.config.words import agreed, listed
from gradring.errors import ConfigError, GradringError
from gradring.machine import packages
from gradring.machine.resources import Usage, share_of_others
from gradring.tools.demo import report as texts
from gradring.tools.demo.results import (
    GRADRING,
    MIRRORED,
    SINGLE,
    WORKERS,
    RankResult,
    Results,
    Variant,
    checks,
    exit_code,
    read_ranks,
)

#: Time limit of one training, which takes about ten seconds; ends a strategy that hangs.
DEADLINE_S = 180.0
#: Time for the launcher to end its ranks after SIGTERM; its own grace period is shorter.
CLOSING_S = 20.0
LAST_LINES = 25
#: Interval of lines that cannot be rewritten, such as in the log of a CI job.
PLAIN_S = 2.0
EPOCHS = 20
#: Packages of the extra ``demo``, by the name of their module.
NEEDED = {"tensorflow": "TensorFlow", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
INTRODUCTION = """\
Two workers train a small convolutional network on scikit-learn's handwritten digits;
then TensorFlow's own strategy and a single process run the same script:
{script}
  + import gradring.tensorflow
  - strategy = tf.distribute.MultiWorkerMirroredStrategy()
  + strategy = gradring.tensorflow.CustomCollectiveStrategy()
"""


def demo(report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Runs the three trainings, shows their results and writes the report.

    Args:
        report: Directory for the page, the picture and the trainings' logs; made if missing.
        stream: Output.

    Returns:
        0; or 1 if the ranks' weights differ, the accuracy is too low, or the single process has
        other weights.

    Raises:
        ConfigError: A package is missing.
        TrainingError: A training failed; failures of TensorFlow's own strategy are only reported.
        OSError: The report cannot be written.
    """
    require_packages()
    start_s = time.monotonic()
    report.mkdir(parents=True, exist_ok=True)
    say(stream, INTRODUCTION.format(script=Path(__file__).with_name("train.py")))
    others: dict[str, float] = {}
    why_no_mirrored = None
    with tempfile.TemporaryDirectory(prefix="gradring-demo-") as temporary:
        outputs = Path(temporary)

        def run(variant: Variant) -> tuple[RankResult, ...]:
            """Runs one training at a time, so that none slows another down."""
            log = report / f"{variant.strategy}.log"
            ranks, others[variant.title] = _run(variant, outputs, log, stream)
            return ranks

        gradring = run(GRADRING)
        try:
            mirrored = run(MIRRORED)
        except TrainingError as error:
            mirrored, why_no_mirrored = (), str(error).partition(" The end of it:")[0]
        (single,) = run(SINGLE)
    results = Results(gradring, mirrored, single, len(os.sched_getaffinity(0)), others)
    checked = checks(results)
    say(stream, f"\n{texts.rank_table(gradring)}")
    say(stream, f"\n{texts.comparison(results, why_no_mirrored)}")
    say(stream, f"\n{texts.verdict(checked)}")
    picture, written = texts.draw(results, report), report / "report.html"
    written.write_text(texts.page(results, checked, why_no_mirrored), encoding="utf-8")
    elapsed_s = time.monotonic() - start_s
    say(stream, f"\nReport: {written}   picture: {picture}   ({elapsed_s:.0f} s in all)")
    return exit_code(checked)


def _run(
    variant: Variant, outputs: Path, log: Path, stream: TextIO
) -> tuple[tuple[RankResult, ...], float]:
    """Trains; returns the ranks' results and the processor share of other programs."""
    live = LiveLine(variant.title, stream)
    before = Usage.now()
    try:
        train(variant, outputs / variant.strategy, log, EPOCHS, live)
        ranks = read_ranks(outputs / variant.strategy, variant.world_size)
    except BaseException:
        live.show("failed", last=True)
        raise
    after = Usage.now()
    live.show(
        f"{ranks[0].steps} steps, loss {ranks[0].losses[-1]:.4f}, test accuracy "
        f"{ranks[0].accuracies[-1]:.3f}, {after.moment_s - before.moment_s:.1f} s with start-up",
        last=True,
    )
    return ranks, share_of_others(before, after, os.cpu_count() or 1)


class TrainingError(GradringError, RuntimeError):
    """A training failed; the message ends with its last lines of output."""


class LiveLine:
    """The progress of a training: a rewritten line on a terminal, else occasional lines."""

    def __init__(self, title: str, stream: TextIO) -> None:
        """Shows that TensorFlow starts.

        Args:
            title: Name of the training, at the start of each line.
            stream: Output.
        """
        self._title = title
        self._stream = stream
        self._terminal = stream.isatty()
        self._shown_s = time.monotonic()
        self.show("starting TensorFlow")

    def feed(self, line: str) -> None:
        """Handles a line of the launcher; only rank 0's lines about epochs are shown."""
        now_s = time.monotonic()
        if line.startswith("[0] epoch ") and (self._terminal or now_s - self._shown_s >= PLAIN_S):
            self._shown_s = now_s
            self.show(line.removeprefix("[0] ").rstrip())

    def show(self, text: str, *, last: bool = False) -> None:
        """Writes a line; on a terminal the next one replaces it, unless it is the last."""
        line = f"{self._title:<20} {text}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[2K{line[:width]}" + "\n" * last)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()


def train(variant: Variant, output: Path, log: Path, epochs: int, live: LiveLine) -> None:
    """Trains; the ranks write results to ``output``, and their printed lines to ``log``.

    Raises:
        TrainingError: The launcher reports a failure, or the training takes too long.
    """
    options = ["--strategy", variant.strategy, "--epochs", str(epochs), "--output", str(output)]
    lines: list[str] = []
    output.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:

        def on_line(line: str) -> None:
            file.write(line)
            lines.append(line)
            live.feed(line)

        code = run_script(variant.world_size, [], options, on_line)
    if code != 0:
        reason = f"no end within {DEADLINE_S:g} s" if code is None else f"exit code {code}"
        raise TrainingError(
            f"the training with {variant.title} failed ({reason}); {log} holds all that it "
            f"printed. The end of it:\n{''.join(lines[-LAST_LINES:])}"
        )


def show(
    world_size: int, launch: Sequence[str], options: Sequence[str], stream: TextIO
) -> tuple[int | None, list[tuple[float, str]]]:
    """Runs `run_script` and prints its lines; returns the exit code, and lines with times."""
    lines: list[tuple[float, str]] = []

    def on_line(line: str) -> None:
        lines.append((time.monotonic(), line))
        stream.write(line)
        stream.flush()

    code = run_script(world_size, launch, options, on_line)
    if code is None:
        say(stream, f"The training has not ended within {DEADLINE_S:g} s and is stopped.")
    return code, lines


def run_script(
    world_size: int,
    launch: Sequence[str],
    options: Sequence[str],
    on_line: Callable[[str], None],
) -> int | None:
    """Runs ``train`` on `world_size` ranks, which share the threads of all workers.

    Args:
        world_size: Number of ranks.
        launch: Further options of ``gradring run``.
        options: Options of the script.
        on_line: Called with each line of output.

    Returns:
        The launcher's exit code; None if it was ended after `DEADLINE_S`.
    """
    command = [sys.executable, "-m", "gradring", "run", "-np", str(world_size), *launch, "--"]
    command += [sys.executable, "-m", "gradring.tools.demo.train", *options]
    kinds = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    environ = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        **dict.fromkeys(kinds, str(max(1, WORKERS // world_size))),
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environ.pop("GRADRING_FLIGHT_DIR", None)
    deadline = time.monotonic() + DEADLINE_S
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as child:
        assert child.stdout is not None
        limit = threading.Timer(DEADLINE_S, _end, [child])
        limit.start()
        try:
            for line in child.stdout:
                on_line(line)
            child.wait()
        finally:
            limit.cancel()
            _end(child)
    return None if time.monotonic() >= deadline else child.returncode


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(timeout=CLOSING_S)
    except subprocess.TimeoutExpired:
        child.kill()


def require_packages() -> None:
    """Checks that the demo's packages are installed, without importing them.

    Raises:
        ConfigError: A package is missing; the message has the command to install it.
    """
    if missing := packages.missing(NEEDED):
        verb = agreed(len(missing), "is", "are")
        raise ConfigError(
            f"{listed([NEEDED[module] for module in missing])} {verb} missing; install what the "
            f"demo needs with: {packages.advice(missing)}"
        )


def say(stream: TextIO, text: str) -> None:
    """Prints and flushes."""
    print(text, file=stream, flush=True)
