"""Start hook: stand-ins for modules that programs import without knowing of gradring.

Every interpreter with gradring among its packages reads ``gradring_start.pth``. If one of these
variables is set, that file calls `install` before the program starts. Nothing else of gradring is
imported until the program imports ``horovod`` or ``tensorflow``, so the program can still choose
how numpy and TensorFlow start.

==========================  ====================================================================
variable                    what it does
==========================  ====================================================================
``GRADRING_AS_HOROVOD``     ``horovod`` and its modules are those of `gradring.horovod`
``GRADRING_AS_MWMS``        a ``MultiWorkerMirroredStrategy`` is gradring's strategy
``GRADRING_WITH_STRATEGY``  models of Keras belong to gradring's strategy, without a scope
``GRADRING_SERVERS``        a worker that would wait for a chief of TensorFlow's raises an error
``GRADRING_VERIFY``         each optimizer step is recorded, for `gradring verify`
==========================  ====================================================================
"""

import importlib
import os
import site
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

AS_HOROVOD, AS_MWMS = "GRADRING_AS_HOROVOD", "GRADRING_AS_MWMS"
WITH_STRATEGY, SERVERS = "GRADRING_WITH_STRATEGY", "GRADRING_SERVERS"
VERIFY = "GRADRING_VERIFY"
#: Variables by which gradring stands in for another package.
STAND_INS = (AS_HOROVOD, AS_MWMS, WITH_STRATEGY)
#: Module for models of Keras without a strategy.
_GIVEN = "gradring.tensorflow.stand_ins.given_strategy"
#: Module that records the steps of optimizers.
_RECORDING = "gradring.tensorflow.stand_ins.recording"
#: Name of the file among the installed packages that calls `install`.
FILE = "gradring_start.pth"
#: Functions to call with a module after its import, as (module, name), by variable and by imported
#: module. A name of None imports the function's module only.
_AFTER: dict[str, dict[str, tuple[str, str | None]]] = {
    "numpy": dict.fromkeys((VERIFY, WITH_STRATEGY), ("gradring_start.chance", "seed_numpy")),
    "tensorflow": {
        VERIFY: (_RECORDING, "install"),
        AS_MWMS: ("gradring.tensorflow.stand_ins.in_place_of_mwms", "install"),
        WITH_STRATEGY: (_GIVEN, None),
        SERVERS: ("gradring_start.no_chief", "install"),
    },
    "keras.src.layers.layer": {WITH_STRATEGY: (_GIVEN, "wait_for_layer")},
    "keras.src.backend.tensorflow.distribution_lib": {
        WITH_STRATEGY: (_GIVEN, "take_place_of_initialize")
    },
    "keras": {VERIFY: (_RECORDING, "record_keras")},
    "tf_keras": {VERIFY: (_RECORDING, "record_tf_keras")},
    "tf_keras.src.engine.base_layer": {WITH_STRATEGY: (_GIVEN, "wait_for_layer")},
}
_OFF = ("", "0", "false", "no", "off")


def is_set(variable: str) -> bool:
    """Returns whether a variable is set; `gradring.init` refuses values besides 0 and 1."""
    return os.environ.get(variable, "").strip().lower() not in _OFF


def advice_to_install() -> str | None:
    """Returns advice if this interpreter has no `FILE` among its packages, or else None."""
    directories = [*site.getsitepackages(), site.getusersitepackages()]
    if any(Path(directory, FILE).is_file() for directory in directories):
        return None
    return (
        f"{sys.executable} has no {FILE} among its packages, so no program there would find "
        "gradring in the place of another package; install gradring by pip"
    )


def after_import(module: str, call: str, function: str) -> None:
    """Calls a function with a module once it has been imported, which may be now.

    The program must be able to do without the function. If the call fails, for example with an
    unknown version of TensorFlow, a debug line of the log says so.

    Args:
        module: Name of a module that sets ``callbacks`` last, such as ``keras``.
        call: Module of gradring with the function.
        function: Name of the function.
    """
    imported = sys.modules.get(module)
    if imported is not None and hasattr(imported, "callbacks"):
        _call_what_was_asked(imported, [(call, function)])
        return
    asked = _asked.setdefault(module, [])
    if (call, function) not in asked:
        asked.append((call, function))
    install()


def watch_for_training_alone() -> None:
    """Watches optimizers of Keras from its import on, because a group of ranks is open."""
    for package in ("keras", "tf_keras"):
        after_import(package, "gradring.tensorflow.keras.alone", "watch")


#: Functions that `after_import` registered, by module.
_asked: dict[str, list[tuple[str, str]]] = {}


def _call_what_was_asked(module: ModuleType, asked: Sequence[tuple[str, str]]) -> None:
    if "tensorflow" not in sys.modules:  # Keras may have another backend
        return
    for call, function in asked:
        try:
            getattr(importlib.import_module(call), function)(module)
        except Exception:
            logging = importlib.import_module("logging")
            logging.getLogger("gradring").debug("%s.%s failed", call, function, exc_info=True)


def install() -> None:
    """Inserts the stand-ins before all other finders of modules, once."""
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, cast(Any, _StandIns()))
        is_recorded, is_shared = is_set(VERIFY), is_set(WITH_STRATEGY)
        if is_recorded or is_shared:
            chance = importlib.import_module("gradring_start.chance")
            chance.begin(is_recorded=is_recorded, is_shared=is_shared)


class _StandIns:
    """Finder of the modules that gradring stands in for, while their variables are set."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # `from horovod import keras` looks below the module's own name.
        theirs = fullname.removeprefix("gradring.")
        is_asked = theirs.partition(".")[0] == "horovod" and is_set(AS_HOROVOD)
        if is_asked and (theirs == fullname or _is_theirs_only(theirs)):
            names = importlib.import_module("gradring.horovod.names")
            return cast("ModuleSpec | None", names.spec_of(theirs))
        after = _AFTER.get(fullname, {})
        called = list(dict.fromkeys(what for name, what in after.items() if is_set(name)))
        asked = _asked.get(fullname, [])
        spec = PathFinder.find_spec(fullname, path, target) if called or asked else None
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, called, asked)
        return spec


def _is_theirs_only(name: str) -> bool:
    # Absent while that module, or a package above it, is being imported.
    names = sys.modules.get("gradring.horovod.names")
    return names is not None and names.is_theirs_only(name)


def _call_after(
    loader: Any, called: Sequence[tuple[str, str | None]], asked: Sequence[tuple[str, str]]
) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        is_keras = module.__name__.partition(".")[0] in ("keras", "tf_keras")
        if is_keras and "tensorflow" not in sys.modules:  # it may have another backend
            return
        for name, function in called:
            stand_in = importlib.import_module(name)
            if function is not None:
                getattr(stand_in, function)(module)
        _call_what_was_asked(module, asked)

    loader.exec_module = exec_module
