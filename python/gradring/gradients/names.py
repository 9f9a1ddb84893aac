"""Names of collectives: in messages, and in the comparison between ranks.

A bucket of gradients is called after its variables, so that a message can say which gradients two
ranks have paired wrongly. The names that Keras makes up contain counters of the process: on a rank
that has built one more layer before, `dense_1/kernel` is called `dense_2/kernel`. Both train
correctly together, so counters are compared by their order and not by their value: of
`dense_4/kernel` and `dense_7/kernel` in one list, the first is number 0 and the second number 1.
Ranks that pass the same variables in another order still differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Bound on the names shown for a bucket, in characters; messages contain two of them.
SHOWN_CHARACTERS = 200

_COUNTER = re.compile(r"^(.*\D)_(\d+)$")


@dataclass(frozen=True)
class Label:
    """What one collective is called."""

    #: In messages; may differ between ranks.
    shown: str
    #: Compared between ranks.
    compared: str

    @classmethod
    def of(cls, name: str) -> Label:
        """A name that is compared as it is shown."""
        return cls(name, name)

    def part(self, name: str) -> Label:
        """What a part or a companion of this collective is called."""
        return Label(f"{self.shown}/{name}", f"{self.compared}/{name}")

    def of_dtype(self, name: str) -> Label:
        """The same, which also tells the dtype of what travels as another one."""
        return Label(f"{self.shown} of {name}", f"{self.compared} of {name}")


@dataclass(frozen=True)
class Names:
    """The names of all tensors of one reduction.

    Attributes:
        label: Name of the reduction.
        shown: What each tensor is called in messages; may be empty.
        compared: The same for comparing.
    """

    label: str
    shown: Sequence[str]
    compared: Sequence[str]

    @classmethod
    def of_variables(
        cls,
        label: str,
        tensors: Sequence[Any],
        variables: Sequence[Any] | None,
        among: Sequence[Any] = (),
    ) -> Names:
        """Tensors are called after their variables, as far as those are known.

        Args:
            label: Name of the reduction; compared between ranks.
            tensors: What is reduced.
            variables: One for each tensor: a variable, or a name.
            among: More variables, by whose counters those of `variables` are ordered: otherwise
                ranks that lack different ones would call what they have the same.

        Raises:
            ValueError: There are more or fewer variables than tensors.
        """
        if variables is None:
            return cls(label, [""] * len(tensors), [""] * len(tensors))
        if len(variables) != len(tensors):
            raise ValueError(
                f"{label}: {len(variables)} variables cannot name {len(tensors)} tensors; "
                "pass one variable for each tensor"
            )
        shown = [name_of(variable) for variable in variables]
        return cls(label, shown, without_counters([*shown, *map(name_of, among)])[: len(shown)])

    def of(self, positions: Sequence[int], bucket: int | None = None) -> Label:
        """What the bucket of the tensors at these positions is called.

        Args:
            positions: In the list of tensors.
            bucket: The bucket's number, if there are several.
        """
        label = self.label if bucket is None else f"{self.label}/{bucket}"
        names = [self.shown[position] for position in positions if self.shown[position]]
        compared = [self.compared[position] for position in positions]
        digest = hashlib.blake2b("\n".join(compared).encode(), digest_size=16).hexdigest()
        return Label(
            f"{label}: {_joined(names)}" if names else label,
            f"{label} {digest}" if any(compared) else label,
        )

    def each(self, positions: Sequence[int]) -> list[str]:
        """What the tensors at these positions are called; their places where they have no names."""
        return [self.shown[position] or f"{self.label}[{position}]" for position in positions]


def with_gaps(label: str, gradients: Sequence[object]) -> str:
    """The name of a reduction of those that are not None, and which of them are.

    Without it, a rank's gradients could meet those of other variables, where these have no names,
    or names that differ in their counters only.

    >>> with_gaps("gradients", [1.0, None, 2.0, None])
    'gradients without 1, 3'
    """
    lacking = [str(place) for place, gradient in enumerate(gradients) if gradient is None]
    return f"{label} without {', '.join(lacking)}" if lacking else label


def name_of(variable: Any) -> str:
    """A variable's full name: Keras' path, or TensorFlow's name without the output number."""
    if isinstance(variable, str):
        return variable
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return str(name).removesuffix(":0")


def without_counters(names: Sequence[str]) -> list[str]:
    """The names with each counter replaced by its order among those of the same base.

    >>> without_counters(["dense_4/kernel", "dense_7/kernel"])
    ['dense#0/kernel', 'dense#1/kernel']
    """
    split = [[_counted(part) for part in name.split("/")] for name in names]
    counters: dict[str, set[int]] = {}
    for parts in split:
        for base, counter in parts:
            counters.setdefault(base, set()).add(counter)
    order = {base: sorted(found) for base, found in counters.items()}

    def ordered(base: str, counter: int) -> str:
        return f"{base}#{order[base].index(counter)}" if len(order[base]) > 1 else base

    return ["/".join(ordered(*part) for part in parts) for parts in split]


def initial_value_of(name: str | None) -> Label:
    """What the broadcast of a variable's initial value is called.

    Variables are made one by one, so there is nothing to order counters by: they are left out. The
    optimizer's are called after the model's, with counters in the middle.
    """
    shown = f"initial value of {name or 'a variable'}"
    return Label(shown, re.sub(r"_\d+(?=[/_:]|$)", "", shown))


def _counted(part: str) -> tuple[str, int]:
    """A part of a path as base and counter: Keras calls its first layer `dense`, then `dense_1`."""
    found = _COUNTER.match(part)
    return (found[1], int(found[2])) if found else (part, 0)


def _joined(names: Sequence[str]) -> str:
    """As many names as fit; at least one."""
    shown = list(names[:1])
    for name in names[1:]:
        if sum(map(len, shown)) + 2 * len(shown) + len(name) > SHOWN_CHARACTERS:
            return f"{', '.join(shown)}, ... (+{len(names) - len(shown)} more)"
        shown.append(name)
    return ", ".join(shown)
