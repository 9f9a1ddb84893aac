"""The results as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gradring.tools.demo.results import HASH_DIGITS, RankResult, Results, mean
from gradring.tools.demo.trainings import GRADRING, MIRRORED, SINGLE
from gradring.tools.demo.verdict import Check

WIDTH = 100
COLUMNS = (
    ("step ms", "duration of a step, from asking for the batch to having the loss"),
    ("compute", "all of it in which the step does not stand still for a collective"),
    ("communication", "time in which it stands still while bytes move and are summed"),
    ("waiting", "time in which it stands still because the other rank has not arrived yet"),
    ("samples/s", "this rank's images per step, divided by the duration of a step"),
    ("SHA-256", f"first {HASH_DIGITS} hex digits of the hash of all weights' bytes"),
)
HOW_AVERAGED = "Times are averages of all steps but the first, which builds the graphs."
#: Other programs that use more than this of the processors make times hard to compare.
BUSY_SHARE = 0.1


def rank_table(ranks: Sequence[RankResult]) -> str:
    """One row per rank, and under the table what each column means."""
    width = max(len("host"), *(len(rank.host) for rank in ranks))
    lines = [
        f"rank  {'host':<{width}}  steps  samples/s  step ms = compute + communication + waiting  "
        "SHA-256 of the weights"
    ]
    for rank in ranks:
        compute, communication, waiting = rank.parts_ms
        lines.append(
            f"{rank.rank:>4}  {rank.host:<{width}}  {rank.steps:>5}  {rank.samples_per_s:>9,.0f}  "
            f"{rank.step_ms:>7.2f}   {compute:>7.2f}   {communication:>13.2f}   {waiting:>7.2f}  "
            f"{rank.weights_hash}"
        )
    lines += ["", *(f"  {name:<14} {meaning}" for name, meaning in COLUMNS), f"  {HOW_AVERAGED}"]
    return "\n".join(lines)


def verdict(checked: Sequence[Check]) -> str:
    """One paragraph per check."""
    return "\n".join(
        textwrap.fill(
            f"{'passed' if check.passed else 'FAILED'}  {check.sentence}",
            WIDTH,
            subsequent_indent=" " * 8,
        )
        for check in checked
    )


def comparison(results: Results, why_no_mirrored: str | None) -> str:
    """What the numbers say, and what they do not; one paragraph each."""
    sentences = [_against_single(results), _percentiles(results)]
    if results.mirrored:
        sentences = [_against_mirrored(results), _hashes(results), *sentences]
    elif why_no_mirrored is not None:
        why = f"There is no comparison with {MIRRORED.title}Strategy: {why_no_mirrored}"
        sentences.insert(0, why)
    if max(results.others.values()) > BUSY_SHARE:
        listed = ", ".join(f"{title} {share:.0%}" for title, share in results.others.items())
        sentences.append(
            "Compare these times with care: other programs used this machine at the same time. "
            f"Their share of its processors during each training: {listed}."
        )
    return "\n".join(textwrap.fill(sentence, WIDTH) for sentence in sentences)


def _against_mirrored(results: Results) -> str:
    def facts(ranks: Sequence[RankResult]) -> tuple[float, float, float]:
        step_ms, local_ms = mean(ranks, "step_ms"), mean(ranks, "local_ms")
        return step_ms, local_ms, 1 - local_ms / step_ms

    (ours_ms, our_local_ms, ours), (theirs_ms, their_local_ms, theirs) = map(
        facts, (results.gradring, results.mirrored)
    )
    return (
        f"{MIRRORED.title}Strategy takes {theirs_ms:.2f} ms per step of the same script, gradring "
        f"{ours_ms:.2f} ms: a ratio of {theirs_ms / ours_ms:.1f}. In the same processes, the same "
        f"step takes {their_local_ms:.2f} and {our_local_ms:.2f} ms without a strategy, so the "
        f"strategies add {theirs:.0%} and {ours:.0%} of their steps: communication, waiting, and "
        "their own work."
    )


def _hashes(results: Results) -> str:
    ours, theirs = (
        {r.weights_hash for r in ranks} for ranks in (results.gradring, results.mirrored)
    )
    listed = " and ".join(sorted(theirs))
    if ours == theirs:
        return f"Its weights have the same hash, {listed}: adding two numbers has only one order."
    return f"Its weights have the hash {listed}."


def _against_single(results: Results) -> str:
    workers = len(results.gradring)
    total = sum(rank.samples_per_s for rank in results.gradring)
    single = results.single.samples_per_s
    cores = f"{results.cores} core{'s' if results.cores > 1 else ''}"
    share = f"Both kinds may use {workers} threads in all on this machine's {cores}"
    if results.cores <= workers:
        share = f"The {workers} workers share this machine's {cores} with each other"
    return (
        f"The single process, with {workers} threads, trains {single:,.0f} samples/s; the "
        f"{workers} workers, with one each, {total:,.0f} together. {share}, so this ratio of "
        f"{total / single:.2f} shows overhead, not scaling."
    )


def _percentiles(results: Results) -> str:
    """Of the first rank of each training: ranks step together."""
    trainings = (
        (GRADRING.title, results.gradring),
        (MIRRORED.title, results.mirrored),
        (SINGLE.title, (results.single,)),
    )
    listed = ", ".join(
        f"{title} {' / '.join(f'{ms:.2f}' for ms in ranks[0].percentiles_ms)}"
        for title, ranks in trainings
        if ranks
    )
    return f"p50 / p90 / p99 of all steps but the first, in ms: {listed}."
