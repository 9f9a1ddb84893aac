"""Decisions of ``init()`` before it connects."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gradring import bootstrap as init_module
from gradring.bootstrap import init, resolve
from gradring.clusters import Cluster
from gradring.clusters.claims import CLAIMS
from gradring.config.settings import GROUP
from gradring.config.values import DEFAULTS, Settings
from gradring.errors import ConfigError, RendezvousError
from gradring.group.communicator import Communicator

OURS = {
    "GRADRING_RANK": "1",
    "GRADRING_WORLD_SIZE": "2",
    "GRADRING_RENDEZVOUS": "127.0.0.1:29500",
}


JOIN = "def join(): init(rendezvous='10.0.0.5:1', job_id='mine')"


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What init() made its communicator of."""
    arguments: dict[str, Any] = {}
    others = ("token", "tls", "interface", "require_auth")

    def for_core(self: Settings, **given: Any) -> Settings:
        names = [*others, *(setting.name for setting in GROUP)]
        arguments.update({name: getattr(self, name) for name in names}, ports=self.port, **given)
        return self

    class Connected:
        def __init__(self, _: Settings, rank: int, size: int, meet: str, addresses: Any) -> None:
            arguments.update(rank=rank, world_size=size, rendezvous=meet, addresses=addresses)
            self._around_close: list[Any] = []

    monkeypatch.setattr(Settings, "for_core", for_core)
    monkeypatch.setattr(init_module, "formed", Connected)
    monkeypatch.setenv(CLAIMS, "")
    for name, text in OURS.items():
        monkeypatch.setenv(name, text)
    return arguments


def test_the_detected_cluster_and_the_settings_reach_the_communicator(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADRING_TOKEN", "secret")
    init(timeout=5, algorithm="ring")
    # A setting of which nothing is said below has the default of its table.
    expected = {setting.name: getattr(DEFAULTS, setting.name) for setting in GROUP}
    assert connected == expected | {
        "rank": 1,
        "world_size": 2,
        "rendezvous": "127.0.0.1:29500",
        "listen": None,
        "ports": None,
        "interface": None,
        "token": b"secret",
        "tls": None,
        "transport": "auto",
        "timeout": 5.0,
        "algorithm": "ring",
        "reproducible": False,
        "wire_dtype": None,
        "rack": None,
        "streams": 1,
        "checksum": False,
        "announce": None,
        "addresses": (),
        "stall_timeout": 1800.0,
        "stall_warning": 30.0,
        "require_auth": False,
        "job_id": None,
    }


def test_the_variables_of_sums_reach_the_communicator(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADRING_ALGORITHM", "direct:1MiB,ring")
    monkeypatch.setenv("GRADRING_REPRODUCIBLE", "1")
    monkeypatch.setenv("GRADRING_WIRE_DTYPE", "bfloat16")
    init()
    names = ("algorithm", "reproducible", "wire_dtype")
    assert [connected[name] for name in names] == ["direct:1MiB,ring", True, "bfloat16"]
    init(algorithm="ring", reproducible=False, wire_dtype="float16")
    assert [connected[name] for name in names] == ["ring", False, "float16"]


@pytest.mark.parametrize(("text", "level"), [("ERROR", 40), ("warn", 30), ("15", 15), ("", 7)])
def test_the_variable_sets_the_level_of_the_log(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, text: str, level: int
) -> None:
    logger = logging.getLogger("gradring")
    monkeypatch.setattr(logger, "level", 7)  # what the program wants stays without the variable
    monkeypatch.setenv("GRADRING_LOG", text)
    init()
    assert connected and logger.level == level


def test_the_port_is_an_argument_or_a_variable(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADRING_PORT", "29500")
    init()
    assert connected["ports"] == (29500, 29500)
    init(port="7000-7003")
    assert connected["ports"] == (7000, 7003)
    with pytest.raises(ConfigError, match="port=0 is neither"):
        init(port=0)


def test_a_batch_script_that_trains_alone_is_warned(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OURS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.warns(UserWarning, match="trains alone: SLURM_NTASKS=4, but .* srun would") as seen:
        init()
    assert seen[0].filename == __file__ and connected["world_size"] == 1


def test_a_misspelt_variable_is_named_with_what_was_meant(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADRING_REQIRE_AUTH", "1")
    monkeypatch.setenv("GRADRING_OF_ANOTHER_PROGRAM", "1")
    with pytest.warns(
        UserWarning, match="GRADRING_REQIRE_AUTH .* mean GRADRING_REQUIRE_AUTH"
    ) as seen:
        init()
    assert [warning.filename for warning in seen] == [__file__] and connected


def test_arguments_beat_every_environment() -> None:
    found = resolve(OURS, rank=0, world_size=3, rendezvous="node-a:1")
    assert found == Cluster(0, 3, "node-a:1", None, "arguments", found.reason)


def test_a_rendezvous_alone_moves_the_detected_cluster() -> None:
    found = resolve(OURS, rendezvous="127.0.0.1:1")
    assert (found.rank, found.world_size, found.rendezvous) == (1, 2, "127.0.0.1:1")


def test_the_variable_completes_explicit_rank_and_world_size() -> None:
    assert resolve(OURS, rank=0, world_size=9).rendezvous == "127.0.0.1:29500"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rank": 0}, "has the argument rank but not world_size"),
        ({"world_size": 2}, "has the argument world_size but not rank"),
        ({"rank": 2, "world_size": 2}, "rank=2 is too large for world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"rank": "0", "world_size": 1}, "rank='0' is not a whole number of at least 0"),
        ({"rank": True, "world_size": 2}, "rank=True is not a whole number"),
        ({"rank": 0.0, "world_size": 1}, "rank=0.0 is not"),
        ({"rank": 0, "world_size": "9" * 5000}, r"world_size='9{79}\.\.\. is not"),
        ({"rank": 0, "world_size": 2**70}, "world_size=1180591620717411303424 is not a whole .* 1"),
        ({"rank": 0, "world_size": 10**5000}, "world_size=a number of more than 80 digits is not"),
        ({"rank": 0, "world_size": 2}, "no rendezvous"),
        ({"rendezvous": 12345}, "rendezvous=12345 is not host:port"),
        ({"rendezvous": "node-a"}, "rendezvous='node-a' is not host:port"),
        ({"rendezvous": "node-a:1"}, "nothing tells this process its rank"),
    ],
)
def test_incomplete_arguments_are_an_error(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve({}, **arguments)


def test_a_group_without_a_token_beyond_loopback_is_warned_about(connected: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="without a token") as caught:
        init(rendezvous="10.0.0.5:1", job_id="mine")
    assert caught[0].filename == __file__


def test_a_warning_names_the_line_of_the_program_also_through_a_strategy(
    connected: dict[str, Any],
) -> None:
    inside = str(Path(init_module.__file__).with_name("strategy.py"))
    scope: dict[str, Any] = {"init": init}
    exec(compile(JOIN, inside, "exec"), scope)
    with pytest.warns(UserWarning, match="without a token") as caught:
        scope["join"]()
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("ignore:.*without a token")
def test_a_group_beyond_loopback_needs_a_token_or_the_name_of_its_job(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 would meet .* 10.0.0.5:1 .*GRADRING_JOB_ID"):
        init(rendezvous="10.0.0.5:1")
    init(rendezvous="10.0.0.5:1", token="secret")
    init(rendezvous="10.0.0.5:1", job_id="mine")
    monkeypatch.setenv("GRADRING_JOB_ID", "mine")
    init(rendezvous="10.0.0.5:1")


@pytest.mark.filterwarnings("error")
def test_loopback_and_a_world_of_one_are_not_warned_about(connected: dict[str, Any]) -> None:
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        init(rendezvous=address)
    init(rank=0, world_size=1, rendezvous="10.0.0.5:1")


@pytest.mark.parametrize("join", [init, Communicator])
def test_a_required_token_that_is_missing_is_an_error(
    join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"rank": 1, "world_size": 2, "rendezvous": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"^require_auth .*rank 1 has no token"):
        join(**place, require_auth=True)
    monkeypatch.setenv("GRADRING_REQUIRE_AUTH", "1")
    with pytest.raises(ConfigError, match="rank 1 has no token"):
        join(**place)
    join(rank=0, world_size=1).close()
    for passes in ({"token": b"secret"}, {"require_auth": False}):
        with pytest.raises(RendezvousError):  # it starts: no process listens there
            join(**place, **passes, timeout=0.2)
