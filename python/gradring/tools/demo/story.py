"""The whole demo: three trainings, and what they show."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from gradring.errors import ConfigError
from gradring.machine.resources import Usage, share_of_others
from gradring.tools.demo import tables, verdict
from gradring.tools.demo.results import RankResult, Results, read_ranks
from gradring.tools.demo.trainings import (
    GRADRING,
    MIRRORED,
    SINGLE,
    LiveLine,
    TrainingError,
    Variant,
    train,
)

EPOCHS = 20
#: By the name that is imported: what the extra ``demo`` brings.
NEEDED = {"tensorflow": "TensorFlow", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
INTRODUCTION = """\
Two workers train a small convolutional network on scikit-learn's handwritten digits;
then TensorFlow's own strategy and a single process run the same script:
{script}
  - strategy = tf.distribute.MultiWorkerMirroredStrategy()
  + strategy = gradring.tensorflow.CustomCollectiveStrategy()
"""


def demo(report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains with two workers and shows what came of it.

    Args:
        report: Directory for the page, the picture and what the trainings printed; made if missing.
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
    say(stream, INTRODUCTION.format(script=Path(__file__).with_name("train.py")))
    others: dict[str, float] = {}
    why_no_mirrored = None
    with tempfile.TemporaryDirectory(prefix="gradring-demo-") as temporary:
        outputs = Path(temporary)

        def run(variant: Variant) -> tuple[RankResult, ...]:
            """One after the other, so that none slows another down."""
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
    checked = verdict.checks(results)
    say(stream, f"\n{tables.rank_table(gradring)}")
    say(stream, f"\n{tables.comparison(results, why_no_mirrored)}")
    say(stream, f"\n{tables.verdict(checked)}")

    from gradring.tools.demo.page import page  # matplotlib takes a second to start
    from gradring.tools.demo.picture import draw

    picture, written = draw(results, report), report / "report.html"
    written.write_text(page(results, checked, why_no_mirrored), encoding="utf-8")
    elapsed_s = time.monotonic() - start_s
    say(stream, f"\nReport: {written}   picture: {picture}   ({elapsed_s:.0f} s in all)")
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


def say(stream: TextIO, text: str) -> None:
    """Prints at once."""
    print(text, file=stream, flush=True)


def _run(
    variant: Variant, outputs: Path, log: Path, stream: TextIO
) -> tuple[tuple[RankResult, ...], float]:
    """Trains; what the ranks left, and the share of the processors that other programs used."""
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
