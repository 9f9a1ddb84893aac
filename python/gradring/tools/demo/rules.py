"""``gradring demo --update RULE``: the training with another update rule."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import TextIO

from gradring import updates
from gradring.tools.demo.launched import EPOCHS, require_packages, run_script, say

WORKERS = 3
REQUIRED_ACCURACY = 0.96
#: Update rules by their name on the command line.
RULES: dict[str, updates.Rule] = {
    "all-reduce": updates.AllReduce(),
    "sync-every-4": updates.AllReduce(sync_every=4),
    "int8": updates.AllReduce(compression=updates.Int8()),
    "bits16": updates.AllReduce(compression=updates.Bits16()),
    "top-k": updates.AllReduce(compression=updates.TopK(0.05)),
    "power-sgd": updates.AllReduce(compression=updates.PowerSGD(rank=4)),
    "primary": updates.Primary(),
    "sharded": updates.Sharded(),
    "local-sgd": updates.LocalSGD(every=16),
    "diloco": updates.LocalSGD(every=16, outer=updates.Nesterov()),
    "parameter-server": updates.ParameterServer(),
    "backup-workers": updates.ParameterServer(backup=1),
    "bounded-staleness": updates.ParameterServer(staleness=2),
    "asynchronous": updates.ParameterServer(staleness=None),
    "aggregation-queue": updates.ParameterServer(staleness=None, aggregate=2),
}
_REACHED = re.compile(r"test accuracy ([\d.]+), .* sent")


def show_rule(name: str, report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains with three workers, and shows accuracy and bytes sent.

    Args:
        name: One of ``RULES``.
        report: Directory for the logs.
        stream: Output.

    Returns:
        0 if the training reached `REQUIRED_ACCURACY`, else 1.

    Raises:
        ConfigError: A package is missing.
    """
    require_packages()
    say(stream, f"{WORKERS} workers train on scikit-learn's handwritten digits with the one line")
    say(stream, f"  CustomCollectiveStrategy(update=updates.{RULES[name]})\n")
    launch = ["--ps", "1"] if isinstance(RULES[name], updates.ParameterServer) else []
    options = ["--update", name, "--epochs", str(EPOCHS)]
    exit_code, lines = run_script(WORKERS, report, options, partial(say, stream, end=""), launch)
    accuracies = [float(found[1]) for _, line in lines if (found := _REACHED.search(line))]
    if exit_code != 0 or accuracies[-1:] < [REQUIRED_ACCURACY]:
        say(stream, f"\nThe training did not end, or not with an accuracy of {REQUIRED_ACCURACY}.")
        return 1
    say(stream, "\n`gradring demo --update all-reduce` does the same with the default.")
    return 0
