"""The whole demo: three trainings, and what they show."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from gradring.demo import tables, verdict
from gradring.demo.machine import Usage, share_of_others
from gradring.demo.progress import Progress
from gradring.demo.results import RankResult, Results, read_ranks
from gradring.demo.variants import GRADRING, MIRRORED, SINGLE, TrainingError, Variant, train
from gradring.errors import ConfigError

EPOCHS = 20
NEEDED = {"tensorflow": "TensorFlow", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
"""By the name that is imported: what the extra ``demo`` brings."""


def demo(report: Path, *, epochs: int = EPOCHS, stream: TextIO = sys.stdout) -> int:
    """Trains with two workers and shows what came of it.

    Args:
        report: Directory for the page, the picture and what the trainings printed; made if missing.
        epochs: Epochs of each training, at least 2: times leave out the first.
        stream: Where to write.

    Returns:
        0; or 1 if the ranks' weights differ, the accuracy is too low, or the single process
        arrives elsewhere.

    Raises:
        ConfigError: A package is missing.
        TrainingError: A training failed, other than that with TensorFlow's own strategy.
        OSError: The report cannot be written.
    """
    require_packages()
    start_s = time.monotonic()
    report.mkdir(parents=True, exist_ok=True)
    unicode = _can_show_blocks(stream)
    _say(stream, _introduction())
    why_no_mirrored = None
    with tempfile.TemporaryDirectory(prefix="gradring-demo-") as temporary:
        trainings = _Trainings(Path(temporary), report, epochs, stream, unicode)
        gradring = trainings.run(GRADRING)
        try:
            mirrored = trainings.run(MIRRORED)
        except TrainingError as error:
            mirrored, why_no_mirrored = (), str(error).partition(" The end of it:")[0]
        (single,) = trainings.run(SINGLE)
    cores = len(os.sched_getaffinity(0))
    results = Results(gradring, mirrored, single, cores, trainings.others)
    checked = verdict.checks(results)
    _say(stream, f"\n{tables.rank_table(gradring)}")
    _say(stream, f"\n{tables.bars(results, unicode)}")
    _say(stream, f"\n{tables.comparison(results, why_no_mirrored)}")
    _say(stream, f"\n{tables.verdict(checked)}")

    from gradring.demo import page  # matplotlib takes a second to start
    from gradring.demo.picture import draw

    picture = draw(results, report)
    written = page.write(report, results, checked, why_no_mirrored)
    elapsed_s = time.monotonic() - start_s
    _say(stream, f"\nReport: {written}   picture: {picture}   ({elapsed_s:.0f} s in all)")
    return verdict.exit_code(checked)


def require_packages() -> None:
    """Checks that what the demo imports is installed, without importing it.

    Raises:
        ConfigError: Something is missing; says how to install it.
    """
    missing = [title for name, title in NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        # The extra would install `tensorflow` over a `tensorflow-cpu` that is there.
        what = "'gradring[demo]'" if NEEDED["tensorflow"] in missing else " ".join(missing)
        raise ConfigError(
            f"{' and '.join(missing)} {verb} missing; install what the demo needs with: "
            f"pip install {what}"
        )


class _Trainings:
    """Runs variants one after the other, so that none slows another down."""

    def __init__(
        self, outputs: Path, report: Path, epochs: int, stream: TextIO, unicode: bool
    ) -> None:
        self._outputs = outputs
        self._report = report
        self._epochs = epochs
        self._stream = stream
        self._unicode = unicode
        self.others: dict[str, float] = {}

    def run(self, variant: Variant) -> tuple[RankResult, ...]:
        progress = Progress(variant.title, variant.world_size, self._stream, self._unicode)
        before = Usage.now()
        output = self._outputs / variant.strategy
        try:
            train(variant, output, self._report / f"{variant.strategy}.log", self._epochs, progress)
            ranks = read_ranks(output, variant.world_size)
        except BaseException:
            progress.finish("failed")
            raise
        after = Usage.now()
        self.others[variant.title] = share_of_others(before, after, os.cpu_count() or 1)
        elapsed_s = after.moment_s - before.moment_s
        progress.finish(
            f"{ranks[0].steps} steps, loss {ranks[0].losses[-1]:.4f}, "
            f"test accuracy {ranks[0].accuracies[-1]:.3f}, {elapsed_s:.1f} s with start-up"
        )
        return ranks


def _introduction() -> str:
    script = Path(__file__).with_name("train.py")
    return (
        "Two workers train a small convolutional network on scikit-learn's handwritten digits;\n"
        "then TensorFlow's own strategy and a single process run the same script:\n"
        f"{script}\n"
        "  - strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "  + strategy = gradring.tensorflow.CustomCollectiveStrategy()\n"
    )


def _can_show_blocks(stream: TextIO) -> bool:
    try:
        tables.UNICODE_BARS.encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _say(stream: TextIO, text: str) -> None:
    print(text, file=stream, flush=True)
