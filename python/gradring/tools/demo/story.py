"""The main demo: three trainings one after the other, and their comparison."""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TextIO

from gradring.errors import GradringError
from gradring.machine import resources
from gradring.tools.demo import launched, report
from gradring.tools.demo.launched import EPOCHS, WORKERS, require_packages, run_script, say
from gradring.tools.demo.report import GRADRING, MIRRORED, SINGLE, RankResult, Results

LAST_LINES = 25
INTRODUCTION = """\
Two workers train a small convolutional network on scikit-learn's handwritten digits;
then TensorFlow's own strategy and a single process run the same script:
{script}
  + import gradring.tensorflow
  - strategy = tf.distribute.MultiWorkerMirroredStrategy()
  + strategy = gradring.tensorflow.CustomCollectiveStrategy()
"""


class TrainingError(GradringError, RuntimeError):
    """A training failed; the message ends with its last lines of output."""


def demo(directory: Path, *, stream: TextIO = sys.stdout) -> int:
    """Runs the three trainings, shows their results and draws the picture.

    Args:
        directory: For the picture and the trainings' logs; made if missing.
        stream: Output.

    Returns:
        0; or 1 if the ranks' weights differ, the accuracy is too low, or the single process has
        other weights.

    Raises:
        ConfigError: A package is missing.
        TrainingError: A training failed; failures of TensorFlow's own strategy are only reported.
        OSError: The picture cannot be written.
    """
    require_packages()
    start_s = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    say(stream, INTRODUCTION.format(script=Path(__file__).with_name("train.py")))
    say(
        stream, f"# {resources.date()}, {resources.machine()}, load {resources.load()} at the start"
    )
    # One training at a time, so that none slows another down.
    ours = train(GRADRING, WORKERS, directory, stream)
    mirrored, why_no_mirrored = [], None
    try:
        mirrored = train(MIRRORED, WORKERS, directory, stream)
    except TrainingError as error:
        why_no_mirrored = str(error).partition(" The end of it:")[0]
    (single,) = train(SINGLE, 1, directory, stream)
    results = Results(ours, mirrored, single)
    checked = list(report.checks(results))
    say(stream, f"\n{report.table(results)}")
    say(stream, f"\n{report.comparison(results, why_no_mirrored)}\n")
    for passed, sentence in checked:
        line = f"{'passed' if passed else 'FAILED'}  {sentence}"
        say(stream, textwrap.fill(line, report.WIDTH, subsequent_indent=" " * 8))
    picture, elapsed_s = report.draw(results, directory), time.monotonic() - start_s
    say(stream, f"\nPicture: {picture}   ({elapsed_s:.0f} s in all)")
    return 0 if all(passed for passed, _ in checked) else 1


def train(training: str, world_size: int, directory: Path, stream: TextIO) -> list[RankResult]:
    """Trains, shows rank 0's progress, and returns the ranks' results.

    Raises:
        TrainingError: The launcher reports a failure, or the training takes too long.
    """

    def show(line: str) -> None:
        if line.startswith("[0] epoch "):
            say(stream, f"{training:<21}  {line.removeprefix('[0] ')}", end="")

    logs = directory / training
    with tempfile.TemporaryDirectory() as output:
        options = ["--strategy", training, "--epochs", str(EPOCHS), "--output", output]
        code, lines = run_script(world_size, logs, options, show)
        if code == 0:
            return report.read_ranks(Path(output), world_size)
    reason = f"no end within {launched.DEADLINE_S:g} s" if code is None else f"exit code {code}"
    raise TrainingError(
        f"the training with {training} failed ({reason}); {logs} holds all that its ranks printed. "
        f"The end of it:\n{''.join(line for _, line in lines[-LAST_LINES:])}"
    )
