"""Names of collectives, for messages and for the comparison between ranks.

A bucket of gradients is named after its variables, so that an error can name the gradients that two
ranks have paired wrongly. Names made by Keras contain counters of the process: on a rank that has
built one more layer before, `dense_1/kernel` is called `dense_2/kernel`. Both ranks train correctly
together.

So counters are compared by their order and not by their value: in a list of `dense_4/kernel` and
`dense_7/kernel`, the first gets number 0 and the second number 1. Ranks that pass the
same variables in another order still differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Limit of the names shown for a bucket, in characters; messages contain two of them.
SHOWN_CHARACTERS = 200

_COUNTER = re.compile(r"^(.*\D)_(\d+)$")


@dataclass(frozen=True)
class Label:
    """Name of one collective."""

    #: Name in messages; may differ between ranks.
    shown: str
    #: Name that is compared between ranks.
    compared: str

    @classmethod
    def of(cls, name: str) -> Label:
        """Returns a label that is compared as it is shown."""
        return cls(name, name)

    def part(self, name: str) -> Label:
        """Returns the label of a part or companion of this collective."""
        return Label(f"{self.shown}/{name}", f"{self.compared}/{name}")

    def of_dtype(self, name: str) -> Label:
        """Returns this label with the name of a dtype added, because another dtype travels."""
        return Label(f"{self.shown} of {name}", f"{self.compared} of {name}")


@dataclass(frozen=True)
class Names:
    """The names of all tensors of one reduction.

    Attributes:
        label: Name of the reduction.
        shown: Name of each tensor in messages; may be empty.
        compared: Name of each tensor for the comparison between ranks; may be empty.
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
        """Names tensors after their variables, as far as those are known.

        Args:
            label: Name of the reduction; compared between ranks.
            tensors: Tensors to reduce.
            variables: A variable or a name for each tensor.
            among: Further variables whose counters are ordered together with those of `variables`.
                Without them, two ranks that lack different variables would give different tensors
                one name.

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
        """Returns the label of the bucket of the tensors at these positions.

        Args:
            positions: Positions in the list of tensors.
            bucket: Number of the bucket, if there are several.
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
        """Returns the names of the tensors at these positions, with indices for unnamed ones."""
        return [self.shown[position] or f"{self.label}[{position}]" for position in positions]


def with_gaps(label: str, gradients: Sequence[object]) -> str:
    """Returns the name of a reduction of gradients with the positions of those that are None.

    Without the positions, ranks that lack different gradients could pair those of different
    variables, if the variables have no names, or names that differ only in their counters.

    >>> with_gaps("gradients", [1.0, None, 2.0, None])
    'gradients without 1, 3'
    """
    lacking = [str(place) for place, gradient in enumerate(gradients) if gradient is None]
    return f"{label} without {', '.join(lacking)}" if lacking else label


def name_of(variable: Any) -> str:
    """Returns a variable's full name: Keras' path, or TensorFlow's name without its output."""
    if isinstance(variable, str):
        return variable
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return str(name).removesuffix(":0")


def without_counters(names: Sequence[str]) -> list[str]:
    """Returns the names with each counter replaced by its order among those of the same base.

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
    """Returns the label of the broadcast of a variable's initial value.

    The label has no counters, because variables are made one by one, and no list gives an order.
    Variables of an optimizer are named after the model's, with counters in the middle.
    """
    shown = f"initial value of {name or 'a variable'}"
    return Label(shown, re.sub(r"_\d+(?=[/_:]|$)", "", shown))


def _counted(part: str) -> tuple[str, int]:
    """Splits a part of a path: Keras calls its first layer `dense`, and the second `dense_1`."""
    found = _COUNTER.match(part)
    return (found[1], int(found[2])) if found else (part, 0)


def _joined(names: Sequence[str]) -> str:
    """Joins as many names as fit into SHOWN_CHARACTERS, and at least one."""
    shown = list(names[:1])
    for name in names[1:]:
        if sum(map(len, shown)) + 2 * len(shown) + len(name) > SHOWN_CHARACTERS:
            return f"{', '.join(shown)}, ... (+{len(names) - len(shown)} more)"
        shown.append(name)
    return ", ".join(shown)
