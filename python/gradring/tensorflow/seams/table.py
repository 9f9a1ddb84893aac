"""Seams: private names of TensorFlow and Keras on which gradring relies.

Each seam is a row of a table: the name's place, its versions, gradring's use of it, and the
consequence if it is missing. A whole table is looked up before anything is replaced. So a newer
version either trains as the tested ones do, or is refused by one error that names the missing
seams. A version is never guessed from the absence of a name.
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
from gradring.tensorflow.seams.tracebacks import without_own_frames
from gradring.tensorflow.seams.tried_versions import TRIED

_log = logging.getLogger("gradring")

#: Version of a package as numbers, such as (3, 15, 1).
Version = tuple[int, ...]
#: Packages' names in messages.
TITLES = {"keras": "Keras", "tensorflow": "TensorFlow", "tf_keras": "tf_keras"}
#: Number of seams that an error names; it counts the others.
_SHOWN = 4


@dataclass(frozen=True)
class Seam:
    """One private name of another package.

    Attributes:
        owner: Module or class that has the name, such as ``keras.src.trainers.trainer:Trainer``.
            Spaces separate several places, that of the newest version first.
        name: The name in its owner.
        does: Gradring's use of the name, and the reason; for people who search the cause of an
            error.
        takes: First parameters that a function must have, without `self`. None checks no
            parameters: the seam is no function, or its stand-in takes any arguments.
        since: First version with the name. Empty if all tested versions have it.
        until: First version without the name. Empty if the newest one has it.
        without: Consequence for a user if the name is missing. Empty if gradring then refuses to
            train.
        is_attribute: True if only instances have the name; the code of the class must mention it.
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
        """The short name, such as ``Trainer.fit``, or ``trainer.Trainer`` for a class."""
        return re.sub(r".*[.:]", "", self.owner.split()[0]) + f".{self.name}"

    @property
    def package(self) -> str:
        """The package that has the name, such as ``keras``."""
        return self.owner.partition(".")[0].partition(":")[0]

    def of(self, owner: Any, *default: Any) -> Any:
        """Returns an object's attribute of this name, or else the default."""
        return getattr(owner, self.name, *default)

    def set(self, owner: Any, value: Any) -> None:
        """Sets an object's attribute of this name."""
        setattr(owner, self.name, value)

    def there(self) -> Any:
        """Returns the value of this name at its place in the installed version.

        Raises:
            AttributeError: The installed version has no such name.
        """
        owner, why = _owner_of(self)
        if why is not None:
            raise AttributeError(f"{self} {why}")
        return getattr(owner, self.name)

    def is_in(self, version: Version) -> bool:
        """Returns whether the table says that this version of the package has the name."""
        return parsed(self.since) <= version and not (self.until and parsed(self.until) <= version)


@dataclass
class Found:
    """Result of a search for the seams of a package.

    Attributes:
        package: Name of the package.
        version: Installed version of the package.
        owners: Owner of each seam that was found.
        missing: Faults of the seams that training needs, by seam.
        absent: Faults of the seams that training can do without, by seam.
    """

    package: str
    version: str
    owners: dict[Seam, Any] = field(default_factory=dict)
    missing: dict[Seam, str] = field(default_factory=dict)
    absent: dict[Seam, str] = field(default_factory=dict)

    def __str__(self) -> str:
        name = TITLES[self.package]
        found = len(self.owners)
        return f"{name} {self.version} has {found} of the {self.total} names that gradring needs"

    @property
    def total(self) -> int:
        """The number of names that this version should have."""
        return len(self.owners) + len(self.missing) + len(self.absent)

    def value(self, seam: Seam) -> Any:
        """Returns the current value of a seam; None if it was not found."""
        owner = self.owners.get(seam)
        return None if owner is None else getattr(owner, seam.name)

    def check(self) -> None:
        """Refuses a version without a seam that training needs.

        Raises:
            gradring.errors.ConfigError: A needed seam is missing, or has other parameters.
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
    """Returns a warning if a version is above the tested ones, else None."""
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
    """Returns the first three numbers of a version: (3, 16, 0) for 3.16.0.dev2026102704."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def version_of(package: str) -> str:
    """Returns the version of an imported package."""
    return str(sys.modules[package].__version__)


def find(package: str, seams: Iterable[Seam]) -> Found:
    """Searches each seam that the installed version of a package should have."""
    version = version_of(package)
    found = Found(package, version)
    for seam in seams:
        if not seam.is_in(parsed(version)):
            continue
        owner, why = _owner_of(seam)
        if why is None:
            found.owners[seam] = owner
        else:
            (found.absent if seam.without else found.missing)[seam] = why
    return found


def _owner_of(seam: Seam) -> tuple[Any, str | None]:
    """Returns the owner of a seam, or None and the reason."""
    why = "is missing"
    for place in seam.owner.split():
        owner = _owner(place)
        if owner is None:
            continue
        if seam.is_attribute:
            if _names(owner, seam.name):
                return owner, None
            continue
        # `getattr` would also find the `__init__` and `__call__` that every Python class has.
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
    """Returns the module or class at a place, or None if there is none."""
    module, _, path = place.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        return functools.reduce(getattr, filter(None, path.split(".")), owner)
    except (ImportError, AttributeError):
        return None


def _names(owner: Any, attribute: str) -> bool:
    """Returns whether the code of a module or class, or of its bases, mentions an attribute."""
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
    """Returns the function in a descriptor or behind decorators."""
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    return inspect.unwrap(found) if callable(found) else found


def _wrong_parameters(found: Any, takes: str | None) -> str | None:
    """Returns the fault in the parameters of a function, or None."""
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
        stand_in: Takes the original, and then the arguments of the original.
        applies: Takes the first positional argument of the original, if there is one. If it
            returns False, the original runs.
        wrap: Wraps the function that replaces the original.
    """

    seam: Seam
    stand_in: Callable[..., Any]
    applies: Callable[..., bool]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def put(self, owner: Any) -> Callable[[], None]:
        """Installs the stand-in; returns a function that restores the original.

        The stand-in is installed in the class that defines the method, because other classes may
        inherit the method from that class only.
        """
        name, stand_in, applies = self.seam.name, self.stand_in, self.applies
        place = next(it for it in getattr(owner, "__mro__", [owner]) if name in vars(it))
        before, original = vars(place)[name], getattr(place, name)

        # `wraps` keeps the signature, because Keras reads that of layers' `call`.
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            try:
                if applies(*args[:1]):
                    return stand_in(original, *args, **kwargs)
                return original(*args, **kwargs)
            except BaseException as error:
                error.__traceback__ = without_own_frames(error)
                raise

        setattr(place, name, self.wrap(method))
        return lambda: setattr(place, name, before)


def replace(found: Sequence[Found], replacements: Iterable[Replacement]) -> None:
    """Installs the stand-ins of all seams that were found, or none.

    Raises:
        gradring.errors.ConfigError: A seam that training needs is missing, or passes arguments
            that its stand-in does not take.
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


#: The largest table used for replacements, by package.
_in_use: dict[str, Found] = {}


def warn_of_newer(rank: int) -> None:
    """Warns on rank 0, once, of packages that are newer than the tested versions."""
    global _has_warned
    sentences = [sentence for found in _in_use.values() if (sentence := newer(found))]
    if sentences and rank == 0 and not _has_warned:
        _has_warned = True
        _log.warning("%s", "; ".join(sentences))


_has_warned = False


def _wrong_stand_ins(found: Found, replacements: Iterable[Replacement]) -> dict[Seam, str]:
    """Returns the seams that may get arguments that their stand-ins do not take."""
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
    """Checks, as a class decorator, that private methods still override those of the parent.

    If `tf.distribute` renamed a private method, or passed other arguments, ours would never run.

    Args:
        parent: A class of TensorFlow.
        *names: All private names that class and parent have in common.

    Returns:
        A decorator that raises `gradring.errors.ConfigError` if the parent lacks a name or passes
        other arguments, and `TypeError` if a common name is not listed.
    """

    def check(kind: type) -> type:
        shared = {
            name
            for name in vars(kind)
            if re.match("_[^_]", name)
            and name != "_abc_impl"  # of every class whose metaclass is ABCMeta
            and any(name in vars(base) for base in parent.__mro__)
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


#: Results of `overrides`, one for each decorated class.
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
    """Returns whether a function accepts every call with these parameters.

    A caller may pass them by position or by name, and may leave out those with defaults.
    """
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
