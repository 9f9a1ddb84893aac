"""The comparison of two recorded trainings, step by step and variable by variable.

A difference of weights is relative to the weights' change since the start of the training: rounding
causes some millionths of it. For weights that have hardly changed, it is relative to their own
size. Some gradients are only rounding errors, such as the gradient of a bias in front of a
normalisation. Adam turns them into full steps, which differ in every training. Variables that no
optimizer updates, such as moving statistics, are compared between the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradring.records.trainings import Sketch, State, Step, Training

#: Largest difference caused by rounding, relative to the weights' change, by the layers' dtype.
TOLERANCES = {"float32": 1e-3, "float64": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
#: Relative rounding error of float32 weights in each step.
_ROUNDING = 1e-6
#: A gradient counts as rounding below this times the tolerance times the step's largest gradient.
_NO_GRADIENT = 1e-3
#: Relative error up to which an update counts as a multiple of another one.
_PROPORTIONAL = 0.02


@dataclass(frozen=True)
class Difference:
    """A variable that differs between two trainings in a step.

    Attributes:
        index: Index of the step among the steps of all optimizers, from 0.
        step: The step of the first training.
        variable: The variable's name.
        size: Size of the difference, relative to the variable's change; if `before`, relative to
            the variable.
        factor: The other training's update in this step as a multiple of the first's; None if it is
            not a multiple.
        before: True if the variable differed before the step, but not in the previous step.
    """

    index: int
    step: Step
    variable: str
    size: float
    factor: float | None
    before: bool


@dataclass(frozen=True)
class OtherDifference:
    """A variable without an optimizer that differs between two trainings.

    Attributes:
        steps: Number of steps of optimizers before the comparison.
        variable: The variable's name.
        size: As in `Difference`.
    """

    steps: int
    variable: str
    size: float


@dataclass
class Comparison:
    """The result of a comparison of two trainings.

    Attributes:
        steps: Number of common steps.
        variables: Number of compared variables.
        largest: The largest difference that counts as rounding.
        differences: Larger differences, of the first step that has any, the largest first.
        noise: Names of variables that differ only because their gradient is rounding.
        mismatch: The reason why the trainings cannot be compared further, or None.
        others: Number of compared variables without an optimizer that have changed.
        other_differences: Differences of variables without an optimizer, before any weights differ;
            of the first batch that has any, the largest first.
    """

    steps: int = 0
    variables: int = 0
    largest: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    noise: set[str] = field(default_factory=set)
    mismatch: str | None = None
    others: int = 0
    other_differences: list[OtherDifference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """True if no difference was found."""
        return not (self.differences or self.mismatch or self.other_differences)


def tolerance(training: Training) -> float:
    """Returns the largest difference that counts as rounding in a training."""
    found = [TOLERANCES.get(dtype, 0.0) for dtype in training.facts.compute]
    return max([TOLERANCES["float32"], *found])


def compare(one: Training, other: Training, limit: float) -> Comparison:
    """Compares two trainings up to the first step in which they differ.

    Args:
        one: The expected training.
        other: The training to check.
        limit: Largest difference that counts as rounding; see `tolerance`.
    """
    found = Comparison()
    begun: dict[tuple[int, int], Sketch] = {}
    for index, (step, its) in enumerate(zip(one.steps, other.steps, strict=False)):
        found.mismatch = _mismatch(step, its)
        if found.mismatch is not None:
            break
        found.steps += 1
        for place, before in enumerate(step.before):
            begun.setdefault((step.optimizer, place), before)
        starts = [begun[step.optimizer, place] for place in range(len(step.before))]
        found.differences = sorted(
            _differences(index, step, its, starts, limit, found),
            key=lambda it: (not it.before, -it.size),
        )
        if found.differences:
            break
    found.variables = len(begun)
    _compare_states(one.states, other.states, limit, found)
    return found


def _compare_states(
    one: Sequence[State], other: Sequence[State], limit: float, found: Comparison
) -> None:
    """Compares variables without an optimizer, up to the first different step."""
    begun: dict[str, Sketch] = {}
    changed: set[str] = set()
    # Before the first step nobody knows which variables an optimizer updates.
    others = set(one[-1].variables) if len(one) > 1 else set()
    for state, its in zip(one, other, strict=False):
        if state.steps != its.steps or state.steps > found.steps - bool(found.differences):
            break
        values = dict(zip(its.variables, its.values, strict=True))
        for name, value in zip(state.variables, state.values, strict=True):
            start = begun.setdefault(name, value)
            if name not in others or name not in values or values[name].size != value.size:
                continue
            if (value != start).any():
                changed.add(name)
            size = _relative(value, values[name], start, limit)
            if size <= limit:
                continue
            # A moving mean depends on the bias in front of it, whose gradient is rounding.
            if found.noise:
                found.noise.add(name)
            else:
                found.other_differences.append(OtherDifference(state.steps, name, size))
        if found.other_differences:
            break
    found.others = len(changed)
    found.other_differences.sort(key=lambda it: -it.size)


def _mismatch(step: Step, its: Step) -> str | None:
    if (step.optimizer, step.number) != (its.optimizer, its.number):
        return (
            f"step {step.number + 1} of optimizer {step.optimizer + 1} ({step.name}) in one, and "
            f"step {its.number + 1} of optimizer {its.optimizer + 1} ({its.name}) in the other"
        )
    sizes, others = ([array.size for array in each.after] for each in (step, its))
    if sizes != others:
        return f"{len(sizes)} variables in one, and {len(others)} or of other shapes in the other"
    return None


def _differences(
    index: int,
    step: Step,
    its: Step,
    starts: Sequence[Sketch],
    limit: float,
    found: Comparison,
) -> Iterator[Difference]:
    most = max(step.gradients, default=0.0)
    for place, name in enumerate(step.variables):
        before = _relative(step.before[place], its.before[place], starts[place], limit)
        after = _relative(step.after[place], its.after[place], starts[place], limit)
        size = max(before, after)
        if not np.isfinite(size) or size > limit:
            if 0 <= step.gradients[place] <= _NO_GRADIENT * limit * most or name in found.noise:
                found.noise.add(name)
                continue
            factor = _factor(
                step.after[place] - step.before[place], its.after[place] - its.before[place]
            )
            is_before = not before <= limit
            if is_before:
                size = _norm(step.before[place] - its.before[place]) / _norm(step.before[place])
            yield Difference(index, step, name, size, factor, is_before)
        elif name not in found.noise:
            found.largest = max(found.largest, size)


def _relative(one: Sketch, other: Sketch, start: Sketch, limit: float) -> float:
    difference = float(np.linalg.norm(one - other))
    return difference / max(_norm(one - start), _norm(one) * _ROUNDING / limit)


def _norm(array: Sketch) -> float:
    """Returns the norm, but at least a tiny number, as a safe divisor."""
    return max(float(np.linalg.norm(array)), 1e-30)


def _factor(update: Sketch, its: Sketch) -> float | None:
    """Returns the factor by which `its` is a multiple of `update`, or None."""
    square = float(update @ update)
    if not (square > 0 and np.isfinite(square) and np.isfinite(its).all()):
        return None
    factor = float(update @ its) / square
    rest = float(np.linalg.norm(its - factor * update))
    return factor if rest <= _PROPORTIONAL * float(np.linalg.norm(its)) else None
