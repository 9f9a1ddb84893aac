"""The results as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise

from gradring.demo.results import HASH_DIGITS, RankResult, Results, mean_step_ms
from gradring.demo.variants import GRADRING, MIRRORED, SINGLE
from gradring.demo.verdict import Check

WIDTH = 100
BAR_WIDTH = 50
UNICODE_BARS = "█▒░"
ASCII_BARS = "#=."

COLUMNS = (
    ("step ms", "duration of a step, from asking for the batch to having the loss"),
    ("compute", "all of it in which the step does not stand still for a collective"),
    ("communication", "time in which it stands still while bytes move and are summed"),
    ("waiting", "time in which it stands still because the other rank has not arrived yet"),
    ("samples/s", "this rank's images per step, divided by the duration of a step"),
    ("SHA-256", f"first {HASH_DIGITS} hex digits of the hash of all weights' bytes"),
)
BUSY_SHARE = 0.1
"""Other programs that use more than this of the processors make times hard to compare."""
HOW_AVERAGED = (
    "Times are averages over the middle half of the steps by duration, without the first epoch, "
    "which builds the graphs."
)


def rank_table(ranks: Sequence[RankResult]) -> str:
    """One row per rank, and under the table what each column means."""
    width = max(len("host"), *(len(rank.host) for rank in ranks))
    lines = [
        f"rank  {'host':<{width}}  steps  samples/s  step ms = compute + communication + waiting  "
        "SHA-256 of the weights"
    ]
    for rank in ranks:
        split = rank.split
        lines.append(
            f"{rank.rank:>4}  {rank.host:<{width}}  {rank.steps:>5}  {rank.samples_per_s:>9,.0f}  "
            f"{split.step_ms:>7.2f}   {split.compute_ms:>7.2f}   {split.communication_ms:>13.2f}"
            f"   {split.waiting_ms:>7.2f}  {rank.weights_hash}"
        )
    lines.append("")
    lines += [f"  {name:<14} {meaning}" for name, meaning in COLUMNS]
    lines += _wrapped(HOW_AVERAGED)
    return "\n".join(lines)


def verdict(checked: Sequence[Check]) -> str:
    """One line per check."""
    return "\n".join(
        line
        for check in checked
        for line in textwrap.wrap(
            f"{'passed' if check.passed else 'FAILED'}  {check.sentence}",
            WIDTH,
            subsequent_indent=" " * 8,
        )
    )


def bars(results: Results, unicode: bool) -> str:
    """The duration of a step, split, for every process."""
    characters = UNICODE_BARS if unicode else ASCII_BARS
    rows = [
        (f"{GRADRING.title} rank {rank.rank}", parts_of(rank, "gradring"))
        for rank in results.gradring
    ]
    rows += [
        (f"{MIRRORED.title} rank {rank.rank}", parts_of(rank, "mirrored"))
        for rank in results.mirrored
    ]
    rows.append((SINGLE.title, parts_of(results.single, "single")))
    longest = max(sum(parts) for _, parts in rows)
    lines = [
        "Duration of a step:  "
        f"{characters[0]} compute  {characters[1]} communication  {characters[2]} waiting"
    ]
    for name, parts in rows:
        bar = "".join(
            character * length
            for character, length in zip(characters, _lengths(parts, longest), strict=True)
        )
        lines.append(f"  {name:<27} {sum(parts):>6.2f} ms  {bar}")
    if results.mirrored:
        lines += _wrapped(
            f"{MIRRORED.title} measures nothing itself. Its {characters[0]} is the same step "
            f"without a strategy, in the same processes, and {characters[1]} is the rest: "
            "communication, waiting, and the strategy's own work."
        )
    return "\n".join(lines)


def parts_of(rank: RankResult, kind: str) -> tuple[float, float, float]:
    """Compute, communication and waiting in ms.

    For TensorFlow's own strategy (``mirrored``), which measures nothing, the second is what the
    strategy adds to the local step, waiting included, and the third is 0.
    """
    if kind != "mirrored":
        return rank.split.compute_ms, rank.split.communication_ms, rank.split.waiting_ms
    local_ms = min(rank.local_ms, rank.split.step_ms)
    return local_ms, rank.split.step_ms - local_ms, 0.0


def comparison(results: Results, why_no_mirrored: str | None) -> str:
    """What the numbers say, and what they do not."""
    sentences = [*statements(results, why_no_mirrored), *warnings(results)]
    return "\n".join(line for sentence in sentences for line in _wrapped(sentence, indent=0))


def statements(results: Results, why_no_mirrored: str | None) -> list[str]:
    """What the numbers say, one paragraph each."""
    sentences = []
    if results.mirrored:
        sentences += [_against_mirrored(results), _hashes(results)]
    elif why_no_mirrored is not None:
        sentences.append(f"There is no comparison with {MIRRORED.title}Strategy: {why_no_mirrored}")
    return [*sentences, _against_single(results), _percentiles(results)]


def warnings(results: Results) -> list[str]:
    """Why the times may be wrong, if there is a reason to think so."""
    if max(results.others.values()) <= BUSY_SHARE:
        return []
    listed = ", ".join(f"{title} {share:.0%}" for title, share in results.others.items())
    return [
        "Compare these times with care: other programs used this machine at the same time. Their "
        f"share of its processors during each training: {listed}."
    ]


def _against_mirrored(results: Results) -> str:
    ours_ms, theirs_ms = mean_step_ms(results.gradring), mean_step_ms(results.mirrored)
    ours, theirs = _added_share(results.gradring), _added_share(results.mirrored)
    return (
        f"{MIRRORED.title}Strategy takes {theirs_ms:.2f} ms per step of the same script, gradring "
        f"{ours_ms:.2f} ms: a ratio of {theirs_ms / ours_ms:.1f}. In the same processes, the same "
        f"step takes {_local_ms(results.mirrored):.2f} and {_local_ms(results.gradring):.2f} ms "
        f"without a strategy, so the strategies add {theirs:.0%} and {ours:.0%} of their steps: "
        "communication, waiting, and their own work."
    )


def _hashes(results: Results) -> str:
    ours = {rank.weights_hash for rank in results.gradring}
    theirs = {rank.weights_hash for rank in results.mirrored}
    listed = " and ".join(sorted(theirs))
    if ours == theirs:
        return f"Its weights have the same hash, {listed}: adding two numbers has only one order."
    return f"Its weights have the hash {listed}."


def _against_single(results: Results) -> str:
    workers = len(results.gradring)
    total = sum(rank.samples_per_s for rank in results.gradring)
    single = results.single.samples_per_s
    cores = f"{results.cores} core{'s' if results.cores > 1 else ''}"
    if results.cores <= workers:
        share = f"The {workers} workers share this machine's {cores} with each other"
    else:
        share = f"Both kinds may use {workers} threads in all on this machine's {cores}"
    return (
        f"The single process, with {workers} threads, trains {single:,.0f} samples/s; the "
        f"{workers} workers, with one each, {total:,.0f} together. {share}, so this ratio of "
        f"{total / single:.2f} shows overhead, not scaling."
    )


def _percentiles(results: Results) -> str:
    """Of the first rank of each training: ranks step together."""
    trainings = [(GRADRING.title, results.gradring), (SINGLE.title, (results.single,))]
    if results.mirrored:
        trainings.insert(1, (MIRRORED.title, results.mirrored))
    listed = ", ".join(
        f"{title} {' / '.join(f'{ms:.2f}' for ms in ranks[0].percentiles_ms)}"
        for title, ranks in trainings
    )
    return f"p50 / p90 / p99 of all steps after the first epoch, in ms: {listed}."


def _added_share(ranks: Sequence[RankResult]) -> float:
    return sum(rank.added_share for rank in ranks) / len(ranks)


def _local_ms(ranks: Sequence[RankResult]) -> float:
    return sum(rank.local_ms for rank in ranks) / len(ranks)


def _lengths(parts: Sequence[float], longest: float) -> list[int]:
    """Characters for each part; what is there at all is seen, and their sum is right."""
    ends, total = [0], 0.0
    for part in parts:
        total += part
        ends.append(max(round(BAR_WIDTH * total / longest), ends[-1] + (part > 0)))
    return [end - start for start, end in pairwise(ends)]


def _wrapped(text: str, indent: int = 2) -> list[str]:
    space = " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=space, subsequent_indent=space)
