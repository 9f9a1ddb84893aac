"""The exceptions carry facts, and keep them when they are pickled."""

import pickle

import pytest

from gradring import errors

BUILTINS = {
    errors.ConfigError: ValueError,
    errors.RendezvousError: ConnectionError,
    errors.AuthenticationError: PermissionError,
    errors.MismatchError: ValueError,
    errors.PeerLostError: ConnectionError,
    errors.CollectiveTimeoutError: TimeoutError,
    errors.AbortedError: RuntimeError,
    errors.ProtocolError: RuntimeError,
    errors.RestoreError: OSError,
    errors.SaveError: OSError,
}


@pytest.mark.parametrize("kind", BUILTINS)
def test_each_exception_is_also_a_builtin(kind: type[errors.GradringError]) -> None:
    assert issubclass(kind, errors.GradringError) and issubclass(kind, BUILTINS[kind])


@pytest.mark.parametrize("kind", [errors.GradringError, *BUILTINS])
def test_facts_default_to_none_and_survive_pickling(kind: type[errors.GradringError]) -> None:
    facts = ("rank", "host", "collective", "sequence", "elapsed_s")
    plain = {"problem": "it broke", "advice": "", **dict.fromkeys(facts)}
    assert vars(kind("it broke")) == plain
    given = {"rank": 2, "host": "b", "collective": "barrier", "sequence": 7, "elapsed_s": 1.5}
    advised = kind("it broke", advice="mend it", **given)  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(advised))
    assert type(copy) is kind and str(copy) == "it broke; mend it"
    assert vars(copy) == {"problem": "it broke", "advice": "mend it", **given}
