"""Seams: names of TensorFlow and Keras that are not public, and on which gradring relies.

Each is a row of a table: where the name is, in which versions, what gradring does with it, and what
follows if it is missing. A table is looked up as a whole before anything is replaced, so a newer
version either trains as the tried ones do, or is refused by one error that says what is missing. A
version is never guessed from the absence of a name.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradring.errors import ConfigError
from gradring.tensorflow.seams.tried_versions import TRIED

_log = logging.getLogger("gradring")

#: Of a package's version, such as (3, 15, 1).
Version = tuple[int, ...]
#: What people call the packages.
TITLES = {"keras": "Keras", "tensorflow": "TensorFlow", "tf_keras": "tf_keras"}
#: Names in an error; the others are counted.
_SHOWN = 4


@dataclass(frozen=True)
class Seam:
    """One name.

    Attributes:
        owner: Where it is, such as ``keras.src.trainers.trainer:Trainer``. Several places are
            separated by spaces, that of the newest version first.
        name: The name there.
        does: What gradring does with it, and why, for people who look for the cause of an error.
        takes: The first parameters that a function must have, without `self`; None: it is no
            function, or is called as any function of this name.
        since: The first version that has it; empty: all tried ones have it.
        until: The first version that has it no longer; empty: it is still there.
        without: What a user must know where it is missing. Empty: gradring refuses to train.
        is_attribute: Instances have it, so code of the class must name it.
    """

    owner: str
    name: str
    does: str
    takes: str | None = None
    since: str = ""
    until: str = ""
    without: str = ""
    is_attribute: bool = False

    def __str__(self) -> str:
        return f"{self.owner.split()[0].replace(':', '.')}.{self.name}"

    @property
    def key(self) -> str:
        """A short name, such as ``Trainer.fit``, or ``trainer.Trainer`` of the class itself."""
        return re.sub(r".*[.:]", "", self.owner.split()[0]) + f".{self.name}"

    @property
    def package(self) -> str:
        """The package that has the name, such as ``keras``."""
        return self.owner.partition(".")[0].partition(":")[0]

    def of(self, owner: Any, *default: Any) -> Any:
        """The value that an object has under this name, or else the default."""
        return getattr(owner, self.name, *default)

    def set(self, owner: Any, value: Any) -> None:
        """Gives an object a value under this name."""
        setattr(owner, self.name, value)

    def there(self) -> Any:
        """The value under this name, where the installed version has it."""
        owner, why = _look(self)
        if why is not None:
            raise AttributeError(f"{self} {why}")
        return getattr(owner, self.name)

    def is_in(self, version: Version) -> bool:
        """Whether this version of the package is one that is known to have the name."""
        return parsed(self.since) <= version and not (self.until and parsed(self.until) <= version)


@dataclass
class Found:
    """What a look at the seams of a package has found.

    Attributes:
        owners: The owner of each seam that is there.
        missing: The seams without which gradring refuses to train, and what is wrong with each.
        absent: The seams without which it trains.
    """

    package: str
    version: str
    owners: dict[Seam, Any] = field(default_factory=dict)
    missing: dict[Seam, str] = field(default_factory=dict)
    absent: dict[Seam, str] = field(default_factory=dict)

    def __str__(self) -> str:
        name = TITLES[self.package]
        return f"{name} {self.version}: {len(self.owners)} of {self.total} seams"

    @property
    def total(self) -> int:
        """The number of names that this version should have."""
        return len(self.owners) + len(self.missing) + len(self.absent)

    def value(self, seam: Seam) -> Any:
        """The value that the package has by this name now; None where gradring goes without."""
        owner = self.owners.get(seam)
        return None if owner is None else getattr(owner, seam.name)

    def check(self) -> None:
        """Refuses a version without a seam that training needs.

        Raises:
            gradring.errors.ConfigError: One is missing, or has other parameters.
        """
        if not self.missing:
            return
        lowest, highest = TRIED[self.package]
        name = f"{TITLES[self.package]} {self.version}"
        wrong = [f"{seam} {why}" for seam, why in self.missing.items()]
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(
            f"{name} differs from the versions that gradring was tried with, {lowest} to "
            f"{highest}: {'; '.join(wrong[:_SHOWN])}{more}. Nothing in it was replaced. Install "
            f'one of those: pip install "{self.package}<={highest}"; or a newer gradring'
        )


def newer(found: Found) -> str | None:
    """A sentence where a version is above those that gradring was tried with."""
    lowest, highest = TRIED[found.package]
    if parsed(found.version) <= parsed(highest):
        return None
    absent = "".join(f"; {seam} {why}: {seam.without}" for seam, why in found.absent.items())
    return (
        f"{TITLES[found.package]} {found.version} is newer than the versions that gradring was "
        f"tried with ({lowest} to {highest}); it has {len(found.owners)} of {found.total} names "
        f"that gradring needs{absent}"
    )


def parsed(version: str) -> Version:
    """The numbers of a version: (3, 16, 0) of 3.16.0.dev2026102704."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def version_of(package: str) -> str:
    """The version of a package that has been imported."""
    return str(sys.modules[package].__version__)


def find(package: str, seams: Iterable[Seam]) -> Found:
    """Looks for each of the seams of a package that its version should have."""
    version = version_of(package)
    found = Found(package, version)
    for seam in seams:
        if not seam.is_in(parsed(version)):
            continue
        owner, why = _look(seam)
        if why is None:
            found.owners[seam] = owner
        else:
            (found.absent if seam.without else found.missing)[seam] = why
    return found


def _look(seam: Seam) -> tuple[Any, str | None]:
    """The owner of a seam; or None, and the reason."""
    why = "is missing"
    for place in seam.owner.split():
        owner = _owner(place)
        if owner is None:
            continue
        if seam.is_attribute:
            if _names(owner, seam.name):
                return owner, None
            continue
        # Not by `getattr`: every class has an `__init__` and a `__call__` of Python's own.
        kinds = [each for each in getattr(owner, "__mro__", [owner]) if each is not object]
        kind = next((each for each in kinds if seam.name in vars(each)), None)
        if kind is None:
            continue
        found = vars(kind)[seam.name]
        if (wrong := _wrong_parameters(found, seam.takes)) is None:
            return owner, None
        why = wrong
    return None, why


def _owner(place: str) -> Any:
    """The module or the class at a place, or None if there is none."""
    module, _, path = place.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        return functools.reduce(getattr, filter(None, path.split(".")), owner)
    except (ImportError, AttributeError):
        return None


def _names(owner: Any, attribute: str) -> bool:
    """Whether the code of a module or a class, or of one that it inherits from, names this."""
    for base in getattr(owner, "__mro__", [owner]):
        if attribute in vars(base) or attribute in vars(base).get("__annotations__", ()):
            return True
        for code in (code for it in vars(base).values() for code in _codes(_function(it))):
            if attribute in code.co_names or attribute in code.co_consts:
                return True
    return False


def _codes(function: Any) -> Iterator[Any]:
    ahead = [getattr(function, "__code__", None)]
    while ahead:
        code = ahead.pop()
        if code is not None:
            yield code
            ahead += [it for it in code.co_consts if hasattr(it, "co_names")]


def _function(found: Any) -> Any:
    """The function in a descriptor or behind decorators."""
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    return inspect.unwrap(found) if callable(found) else found


def _wrong_parameters(found: Any, takes: str | None) -> str | None:
    """The fault in the parameters of a function, or None."""
    if takes is None:
        return None
    wanted, own = takes.split(), [it.name for it in _parameters(found)]
    has = [name for name in own if name != "self"][: len(wanted)]
    return None if has == wanted else f"takes ({', '.join(has)}), not ({', '.join(wanted)})"


def _parameters(found: Any) -> Sequence[inspect.Parameter]:
    try:
        return list(inspect.signature(_function(found)).parameters.values())
    except (TypeError, ValueError):
        return []


@dataclass(frozen=True)
class Replacement:
    """A function of another package, and its stand-in.

    Attributes:
        seam: The function.
        stand_in: Gets the original as its first argument, and then what the original gets.
        applies: Takes the first argument of the original, if it has one by position; where it
            returns False, the original runs.
        wrap: Makes the function that is put in place of the original.
    """

    seam: Seam
    stand_in: Callable[..., Any]
    applies: Callable[..., bool]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def put(self, owner: Any) -> Callable[[], None]:
        """Puts the stand-in in place; returns what takes it away again.

        Its place is the class that defines the method: others may inherit from that one alone.
        """
        name, stand_in, applies = self.seam.name, self.stand_in, self.applies
        place = next(it for it in getattr(owner, "__mro__", [owner]) if name in vars(it))
        before, original = vars(place)[name], getattr(place, name)

        # Keras reads the signature of layers' `call`.
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if applies(*args[:1]):
                return stand_in(original, *args, **kwargs)
            return original(*args, **kwargs)

        setattr(place, name, self.wrap(method))
        return lambda: setattr(place, name, before)


def replace(found: Sequence[Found], replacements: Iterable[Replacement]) -> None:
    """Puts all stand-ins in place whose seams are there, or none.

    Raises:
        gradring.errors.ConfigError: A seam is missing that training needs.
    """
    replacements = list(replacements)
    for each in found:
        each.check()
        dataclasses.replace(each, missing=_wrong_stand_ins(each, replacements)).check()
    owners = {seam: owner for each in found for seam, owner in each.owners.items()}
    undo: list[Callable[[], None]] = []
    try:
        for replacement in replacements:
            if replacement.seam in owners:
                undo.append(replacement.put(owners[replacement.seam]))
    except BaseException:
        for take_away in reversed(undo):
            take_away()
        raise
    for each in found:
        before = _in_use.get(each.package, each)
        _in_use[each.package] = max(before, each, key=lambda it: it.total)


#: By package, the largest table of which something was replaced.
_in_use: dict[str, Found] = {}


def warn_of_newer(rank: int) -> None:
    """Says on rank 0, once, which packages are newer than those that gradring was tried with."""
    global _has_warned
    sentences = [sentence for found in _in_use.values() if (sentence := newer(found))]
    if sentences and rank == 0 and not _has_warned:
        _has_warned = True
        _log.warning("%s", "; ".join(sentences))


_has_warned = False


def _wrong_stand_ins(found: Found, replacements: Iterable[Replacement]) -> dict[Seam, str]:
    """Seams whose functions may be given what their stand-ins do not take."""
    wrong = {}
    for it in replacements:
        if it.seam not in found.owners:
            continue
        _, *own = inspect.signature(it.stand_in).parameters.values()
        given = _parameters(getattr(found.owners[it.seam], it.seam.name))
        if not _can_be_called(inspect.Signature(own), given):
            taken, offered = (", ".join(each.name for each in those) for those in (own, given))
            wrong[it.seam] = f"takes ({offered}), not ({taken})"
    return wrong


def overrides(parent: type, *names: str) -> Callable[[type], type]:
    """A decorator for a class: its methods of these names stand in for its parent's.

    A private method that `tf.distribute` no longer has, or calls in another way, would leave ours
    as code that nobody calls.

    Args:
        parent: A class of TensorFlow.
        *names: All private names that class and parent have in common.

    Returns:
        A decorator that raises `gradring.errors.ConfigError` where the parent differs, and
        `TypeError` where a name of the class is not listed.
    """

    def check(kind: type) -> type:
        shared = {
            name
            for name in vars(kind)
            if re.match("_[^_]", name) and any(name in vars(base) for base in parent.__mro__)
        }
        if unlisted := shared - set(names):
            raise TypeError(f"{kind.__name__} overrides {sorted(unlisted)} and does not say so")
        package = parent.__module__.partition(".")[0]
        found = Found(package, version_of(package))
        for name in names:
            seam = Seam(f"{parent.__module__}:{parent.__qualname__}", name, "an override")
            why = _wrong_override(vars(kind)[name], parent, name)
            if why is None:
                found.owners[seam] = parent
            else:
                found.missing[seam] = why
        OVERRIDDEN.append(found)
        found.check()
        return kind

    return check


#: What each class that overrides private methods has found.
OVERRIDDEN: list[Found] = []


def _wrong_override(own: Any, parent: type, name: str) -> str | None:
    try:
        theirs = inspect.getattr_static(parent, name)
    except AttributeError:
        return "is missing"
    if isinstance(theirs, property) or not callable(_function(theirs)):
        return None
    takes, given = _parameters(own), _parameters(theirs)
    if _can_be_called(inspect.signature(_function(own)), given):
        return None
    theirs_, ours = (", ".join(it.name for it in each) for each in (given, takes))
    return f"takes ({theirs_}), not ({ours})"


def _can_be_called(own: inspect.Signature, given: Sequence[inspect.Parameter]) -> bool:
    """Whether a function takes what these parameters may be given: by position, or by name."""
    first = [it.name for it in given[:1]]
    named = [it for it in given[1:] if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)]
    by_position = [it.name for it in named if it.kind is not it.KEYWORD_ONLY]
    by_name = {it.name: it for it in named if it.kind is it.KEYWORD_ONLY}
    needed = {it.name: it for it in named if it.default is it.empty}
    try:
        own.bind(*first, *by_position, **by_name)
        own.bind(*first, **{it.name: it for it in named})
        own.bind(*first, **needed)
    except TypeError:
        return False
    return True
