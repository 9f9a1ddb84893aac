"""The verdict on recorded trainings, in plain words, and the likely cause of a difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradring.config.words import PAGES, counted, listed
from gradring.records.trainings import Training
from gradring.tools.verify.comparison import (
    Comparison,
    Difference,
    OtherDifference,
    compare,
    tolerance,
)

PAGE = f"{PAGES}/verify.md says more"
#: Relative error up to which a factor counts as a given number.
_NEAR = 0.03
#: Layer whose training depends on the samples of a rank, unless it is synchronized.
_OF_A_BATCH = "BatchNormalization"
_MASKS = ("Masking",)
_HALF = ("float16", "bfloat16")
#: Parts of gradring's warnings, with the causes that they indicate.
_WARNED = {
    "neither a mean nor a sum over samples": (
        "a loss of several samples together, such as of all pairs of a batch or of a queue: each "
        "rank computes it from its part of the batch, and has fewer pairs"
    ),
    "adds a sum over samples to what is no sum": (
        "a loss adds a sum over samples to a mean or a penalty, so no weight of a rank's part is "
        "right for both: divide the sum by the number of samples"
    ),
    "is divided by a sum over data": (
        "a loss is divided by a sum over data, such as the elements of a mask: each rank has the "
        "sum over its part of the batch"
    ),
    "is no linear function of a mean": (
        "a loss is a nonlinear function of means over the batch, such as a root or a product: the "
        "mean of the ranks' losses is another number"
    ),
    "parts of different batches": (
        "the ranks have different data, so their parts of a batch are parts of different batches: "
        "draw and shuffle them with a seed"
    ),
    "is no loss of Keras": (
        "a mean of the program's own, which is added up over the ranks: divide it by the number of "
        "replicas"
    ),
}
#: Part of the warning about a custom loop, which `fit` does not divide.
_OWN_LOOP = "does all of this work by itself"


def verdict(one: Training, ranks: Sequence[Training]) -> tuple[bool | None, list[str]]:
    """Compares the training of all ranks with that of one process.

    Args:
        one: The training on one process.
        ranks: The training of each rank.

    Returns:
        True if they are equal, False if not, None if nothing can be compared; and sentences.
    """
    size = len(ranks)
    if not one.steps:
        return None, [
            "no optimizer has updated weights in the run on one process, so there is nothing to "
            "compare: gradring verify sees optimizers of Keras, tf_keras and tf.compat.v1.train"
        ]
    if idle := [rank for rank, each in enumerate(ranks) if not each.steps]:
        return None, [
            f"no optimizer has updated weights on {_ranks(idle)}, so there is nothing to compare"
        ]
    if all((a == b).all() for it in one.steps for a, b in zip(it.before, it.after, strict=True)):
        return None, ["no step of the one process has changed a weight: is a learning rate 0?"]
    limit = max(map(tolerance, [one, *ranks]))
    comparison = compare(one, ranks[0], limit)
    among = [compare(ranks[0], each, limit) for each in ranks[1:]]
    apart = [rank for rank, it in enumerate(among, 1) if not it.is_equal]
    alone = _is_alone(ranks)
    counts = [len(each.steps) for each in [one, *ranks]]
    is_equal = comparison.is_equal and not apart and len(set(counts)) == 1
    notes = list(_notes(one, comparison))
    if is_equal and not alone:
        largest = max([comparison.largest, *(it.largest for it in among)])
        return True, [
            f"{_amount(comparison)}: equal within {largest:.1g} (one process and "
            f"{counted(size, 'rank')})",
            *notes,
        ]
    sentences = ["not trained together" if is_equal else "not equal"]
    if comparison.differences or comparison.other_differences:
        sentences.append(_where(comparison, f"rank 0 of {size}"))
    elif comparison.mismatch:
        sentences.append(f"one process and rank 0 did other steps: {comparison.mismatch}")
    else:
        sentences.append(
            f"{_amount(comparison)} are equal within {comparison.largest:.1g} on one process and "
            "on rank 0"
        )
    if apart:
        first = among[apart[0] - 1]
        sentences.append(f"{_ranks(apart)} and rank 0 differ among themselves")
        if first.differences or first.other_differences:
            sentences.append(_where(first, f"rank {apart[0]}", "rank 0"))
    if len(set(counts)) > 1:
        sentences.append(
            f"one process did {counted(counts[0], 'step')}, and the ranks did "
            f"{listed(map(str, counts[1:]))}"
        )
    sentences += [
        f"likely cause: {cause}" for cause in _causes(one, ranks, comparison, apart, alone)
    ][:1]
    return False, [*sentences, *notes, PAGE]


def _amount(comparison: Comparison) -> str:
    return f"{counted(comparison.steps, 'step')}, {counted(comparison.variables, 'variable')}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(map(str, ranks))}"


def _where(comparison: Comparison, who: str, of: str = "one process") -> str:
    if not comparison.differences:
        return _where_others(comparison.other_differences, who, of)
    worst, others = comparison.differences[0], len(comparison.differences) - 1
    more = f", and in {counted(others, 'variable')} more" if others else ""
    step = f"step {worst.index + 1} ({worst.step.name}, its step {worst.step.number + 1})"
    if worst.before:
        return (
            f"{who} differs from {of} before {step} already, in {worst.variable}{more}: by "
            f"{worst.size:.2g} of its size"
        )
    sentence = (
        f"{who} differs from {of} first in {step}, in {worst.variable}{more}: by {worst.size:.2g} "
        "of what it has changed since the beginning"
    )
    if worst.factor is None:
        return sentence
    return f"{sentence}; the update of this step is {worst.factor:.3g} times as large"


def _where_others(differences: Sequence[OtherDifference], who: str, of: str) -> str:
    worst, others = differences[0], len(differences) - 1
    more = f", and {counted(others, 'variable')} more" if others else ""
    when = f"after {counted(worst.steps, 'step')}" if worst.steps else "before the first step"
    return (
        f"{who} differs from {of} {when} in {worst.variable}{more}, which no optimizer updates: by "
        f"{worst.size:.2g} of what it has changed since the beginning"
    )


def _is_alone(ranks: Sequence[Training]) -> bool:
    """Returns True if the ranks sent nothing to each other between the first and the last step."""
    if any(len(each.steps) < 2 for each in ranks):
        return False
    sent = [(each.steps[0].sent, each.steps[-1].sent) for each in ranks]
    return all(first == last for first, last in sent)


def _causes(
    one: Training,
    ranks: Sequence[Training],
    comparison: Comparison,
    apart: Sequence[int],
    alone: bool,
) -> Iterator[str]:
    """Yields likely causes of a difference, the most certain first."""
    size, layers = len(ranks), {*one.facts.layers, *ranks[0].facts.layers}
    warnings = [text for each in ranks for text in each.facts.warnings]
    if alone and any(_OWN_LOOP in text for text in warnings):
        yield (
            "a custom loop, which nobody divides: each rank does all of its work; "
            "train in fit or train_on_batch, or reduce its gradients by GradientReducer"
        )
    if alone and all(each.steps[0].sent is None for each in ranks):
        yield (
            "the ranks are in no group of gradring, so each of them trains for itself: make a "
            "gradring.tensorflow.CustomCollectiveStrategy, or start by --with-strategy, --as-mwms "
            "or --as-horovod"
        )
    if alone:
        yield (
            "the ranks sent each other nothing between the first step and the last, so each of "
            "them trains for itself: make the model in strategy.scope(), or reduce its gradients"
        )
    worst = comparison.differences[0] if comparison.differences else None
    if worst is not None and worst.index == 0 and worst.before:
        yield (
            "the weights differ before the first step: the program makes them otherwise on "
            "several ranks, or a rank did not get those of rank 0"
        )
    batches, of_ranks = one.facts.batches, ranks[0].facts.batches
    if (
        of_ranks
        and of_ranks != batches
        and set(of_ranks) <= {*batches, *(size * b for b in batches)}
    ):
        yield (
            f"the program makes batches {size} times as large on {size} ranks "
            f"({max(of_ranks)} samples): give it one size of the whole batch to compare"
        )
    if (
        of_ranks
        and of_ranks == batches
        and size in set(ranks[0].facts.shards) - {*one.facts.shards}
    ):
        yield (
            f"the program divides its data by Dataset.shard({size}, ...), and each rank has "
            f"batches of its own: in a step, {size} ranks train on {size} times the samples of one "
            f"process. To compare, divide the batch size by {size} too"
        )
    for said, cause in _WARNED.items():
        if any(said in text for text in warnings):
            yield cause
    if comparison.other_differences and _OF_A_BATCH not in layers:
        yield (
            "a variable that a layer or a step assigns from its part of a batch, without combining "
            "the ranks' values"
        )
    if apart and (worst is None or not _is_near(worst.factor, size, 1 / size, 1)):
        yield (
            "the ranks do not apply the same gradients: a variable of each rank alone, such as a "
            "tf.Variable outside of the scope, an update rule such as LocalSGD, or first weights "
            "that were not broadcast"
        )
    yield from _causes_by_factor(worst, size)
    if comparison.mismatch is None and len(one.steps) != len(ranks[0].steps) and worst is None:
        yield (
            "an epoch has another number of batches on ranks: the batch, or the data, are divided "
            "by the number of ranks, and not the other"
        )
    if _OF_A_BATCH in layers:
        yield (
            "BatchNormalization: each rank takes mean and variance of its part of a batch; "
            "synchronized=True takes those of the whole batch"
        )
    if ranks[1:] and len({each.facts.numbers for each in ranks}) > 1:
        yield (
            "random numbers of numpy differ among the ranks, as the program sets no seed: data "
            "that it draws or shuffles by them do, too"
        )
    if any(it in layers for it in _MASKS) or any("Mask" in it for it in layers):
        yield "a mask: the parts of a batch have other numbers of steps that count"
    yield (
        "a part of the step depends on how a batch is divided: a sum in add_loss, a mean of the "
        "program's own, a norm of each rank's part of the gradients, other samples, or another "
        "order of them"
    )


def _is_near(factor: float | None, *numbers: float) -> bool:
    return factor is not None and any(abs(factor - each) <= _NEAR * each for each in numbers)


def _causes_by_factor(worst: Difference | None, size: int) -> Iterator[str]:
    if worst is None or worst.factor is None or worst.before:
        return
    if _is_near(worst.factor, size):
        yield (
            f"a mean of the program's own: each of {size} ranks divides by its part of the batch, "
            "and the parts are added up; divide by the number of replicas too "
            "(tf.nn.compute_average_loss, or a loss of Keras)"
        )
    elif _is_near(worst.factor, 1 / size):
        yield (
            f"a sum that is averaged: the gradient is divided by {size} although the loss is a "
            "sum, or twice although it is a mean; reduce a sum by op='sum', or divide it once"
        )
    elif not _is_near(worst.factor, 1):
        yield (
            "samples that each rank draws for itself, or a part of the step that ranks count "
            "otherwise: a penalty, a mean of your own, clipped gradients, or a variable that a "
            "layer assigns from its part of a batch"
        )


def _notes(one: Training, comparison: Comparison) -> Iterator[str]:
    layers = set(one.facts.layers)
    random = sorted(it for it in layers if "Dropout" in it or it.startswith(("Random", "Gaussian")))
    if random:
        yield f"random layers were switched off in both: {listed(random)}"
    if comparison.others:
        yield f"compared too: {counted(comparison.others, 'variable')} that no optimizer updates"
    if comparison.noise:
        names = sorted(comparison.noise)
        shown = listed([*names[:2], *(["others"] if len(names) > 2 else [])])
        yield (f"not compared: {shown}, whose gradients are rounding errors")
    half = sorted(set(one.facts.compute) & set(_HALF))
    if half:
        yield f"layers compute in {listed(half)}, so larger differences count as rounding"
