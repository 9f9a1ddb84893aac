"""Settings: an argument beats a variable, and a value that cannot be used is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gradring
from gradring.config.values import DEFAULTS, Settings
from gradring.errors import ConfigError


def test_the_defaults_need_no_variables() -> None:
    assert Settings.from_environ({}) == Settings(
        token=None,
        require_auth=False,
        transport="auto",
        timeout=300.0,
        streams=1,
        stall_timeout=1800.0,
        stall_warning=30.0,
    )


def test_variables_are_read() -> None:
    environ = {
        "GRADRING_TOKEN": "secret",
        "GRADRING_REQUIRE_AUTH": "1",
        "GRADRING_TRANSPORT": "tcp",
        "GRADRING_TIMEOUT_S": "2.5",
        "GRADRING_STREAMS": "16",
        "GRADRING_STALL_TIMEOUT_S": "90",
        "GRADRING_STALL_WARNING_S": "1.5",
        "GRADRING_CHECKSUM": "1",
        "GRADRING_RACK": "row 7",
        "GRADRING_LOG": "info",
    }
    expected = Settings(
        token=b"secret",
        require_auth=True,
        transport="tcp",
        timeout=2.5,
        streams=16,
        stall_timeout=90.0,
        stall_warning=1.5,
        checksum=True,
        rack="row 7",
        log=20,
    )
    assert Settings.from_environ(environ) == expected


def test_a_port_for_metrics_is_a_port() -> None:
    settings = Settings.from_environ({"GRADRING_PROMETHEUS_PORT": "9400"})
    assert settings.prometheus_port == 9400
    for text in ("0", "65536", "http", "-1", GIANT):
        with pytest.raises(ConfigError, match="GRADRING_PROMETHEUS_PORT="):
            Settings.from_environ({"GRADRING_PROMETHEUS_PORT": text})


@pytest.mark.parametrize(
    ("text", "address"),
    [("", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("::", "::"), ("lo", "127.0.0.1")],
)
def test_the_address_for_metrics_is_an_address_or_an_interface(text: str, address: str) -> None:
    settings = Settings.from_environ({"GRADRING_PROMETHEUS_ADDRESS": text})
    assert settings.prometheus_address == address


def test_an_argument_beats_a_variable() -> None:
    environ = {
        "GRADRING_TOKEN": "secret",
        "GRADRING_REQUIRE_AUTH": "1",
        "GRADRING_TRANSPORT": "nonsense",
        "GRADRING_TIMEOUT_S": "nonsense",
        "GRADRING_STREAMS": "nonsense",
        "GRADRING_STALL_TIMEOUT_S": "nonsense",
        "GRADRING_STALL_WARNING_S": "nonsense",
        "GRADRING_CHECKSUM": "nonsense",
        "GRADRING_REPRODUCIBLE": "nonsense",
        "GRADRING_WIRE_DTYPE": "nonsense",
    }
    settings = Settings.from_environ(
        environ,
        token=b"other",
        require_auth=False,
        transport="shm",
        timeout=7,
        streams=4,
        stall_timeout=60,
        stall_warning=3,
        checksum=True,
        reproducible=False,
        wire_dtype="float16",
    )
    assert settings == Settings(
        token=b"other",
        require_auth=False,
        transport="shm",
        timeout=7.0,
        streams=4,
        stall_timeout=60.0,
        stall_warning=3.0,
        checksum=True,
        wire_dtype="float16",
    )


def test_a_token_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"from a file\r\n")
    (tmp_path / "token").chmod(0o600)
    settings = Settings.from_environ({"GRADRING_TOKEN_FILE": str(tmp_path / "token")})
    assert settings.token == b"from a file"


def test_a_token_is_never_printed() -> None:
    assert "secret" not in repr(Settings(token=b"secret"))


GIANT = "9" * 5000
SHORTENED = "9" * 79 + r"\.\.\."


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"GRADRING_TRANSPORT": "rdma"}, "GRADRING_TRANSPORT='rdma' is not one of auto, tcp, shm"),
        ({"GRADRING_TIMEOUT_S": "soon"}, "GRADRING_TIMEOUT_S='soon'"),
        ({"GRADRING_TIMEOUT_S": "0"}, "GRADRING_TIMEOUT_S='0'"),
        ({"GRADRING_TIMEOUT_S": "1_0"}, "GRADRING_TIMEOUT_S='1_0' is not a number of seconds"),
        (
            {"GRADRING_STALL_TIMEOUT_S": "\u0663"},
            "GRADRING_STALL_TIMEOUT_S='\u0663' is not a number",
        ),
        ({"GRADRING_STREAMS": "1_0"}, "GRADRING_STREAMS='1_0' is not a whole number"),
        ({"GRADRING_STREAMS": "\u0663"}, "GRADRING_STREAMS='\u0663' is not a whole number"),
        (
            {"GRADRING_PORT": "\u0662\u0669\u0665\u0660\u0660"},
            "GRADRING_PORT='٢٩٥٠٠' is neither a port",
        ),
        ({"GRADRING_LOG": "\u0661\u0660"}, "GRADRING_LOG='..' is not one of DEBUG"),
        ({"GRADRING_STALL_TIMEOUT_S": "-1"}, "GRADRING_STALL_TIMEOUT_S='-1'"),
        ({"GRADRING_TIMEOUT_S": "inf"}, "GRADRING_TIMEOUT_S='inf'"),
        (
            {"GRADRING_WIRE_DTYPE": "int8"},
            "GRADRING_WIRE_DTYPE='int8' is not one of bfloat16, float16; correct it",
        ),
        ({"GRADRING_REPRODUCIBLE": "maybe"}, "GRADRING_REPRODUCIBLE='maybe' is neither 1 nor 0"),
        (
            {"GRADRING_STREAMS": "many"},
            "GRADRING_STREAMS='many' is not a whole number from 1 to 16",
        ),
        ({"GRADRING_STREAMS": "0"}, "GRADRING_STREAMS=0"),
        ({"GRADRING_STREAMS": "17"}, "GRADRING_STREAMS=17"),
        ({"GRADRING_STREAMS": GIANT}, f"GRADRING_STREAMS='{SHORTENED} is not a whole number"),
        ({"GRADRING_TIMEOUT_S": GIANT}, f"GRADRING_TIMEOUT_S='{SHORTENED} is not"),
        ({"GRADRING_STREAMS": "1.5"}, "GRADRING_STREAMS='1.5'"),
        ({"GRADRING_STALL_WARNING_S": "-1"}, "GRADRING_STALL_WARNING_S='-1'"),
        ({"GRADRING_REQUIRE_AUTH": "maybe"}, "GRADRING_REQUIRE_AUTH='maybe'"),
        ({"GRADRING_CHECKSUM": "crc"}, "GRADRING_CHECKSUM='crc' is neither 1 nor 0"),
        ({"GRADRING_LOG": "loud"}, "GRADRING_LOG='loud' is not one of DEBUG, INFO, WARNING"),
        ({"GRADRING_LOG": "-1"}, "GRADRING_LOG='-1'"),
        ({"GRADRING_LOG": GIANT}, f"GRADRING_LOG='{SHORTENED} is not one of DEBUG"),
        (
            {"GRADRING_ALGORITHM": "\udcff"},
            r"GRADRING_ALGORITHM='\\udcff' is no text; give names su",
        ),
        ({"GRADRING_ALGORITHM": "foo"}, '^GRADRING_ALGORITHM="foo": "foo" is no algorithm; give'),
        ({"GRADRING_RACK": "r" * 25}, "^GRADRING_RACK=rrr.* is not a name of at most 24 bytes"),
        ({"GRADRING_TOKEN_FILE": "/nonexistent"}, "GRADRING_TOKEN_FILE='/nonexistent' cannot be"),
        ({"GRADRING_TOKEN": "a", "GRADRING_TOKEN_FILE": "b"}, "both set"),
        ({"GRADRING_TRACE": "/"}, "GRADRING_TRACE='/' names no file"),
        *(
            ({name: path}, f"^{name}='.{{80}}.* is too long: the path has {size} bytes and its")
            for name in ("GRADRING_TRACE", "GRADRING_FLIGHT_DIR", "GRADRING_LOG_DIR")
            for path, size in [
                ("/tmp/" + "a" * 300, 305),
                ("/tmp/" + "\xe9" * 130, 265),
                ("/a" * 2050, 4100),
            ]
        ),
        (
            {"GRADRING_PROMETHEUS_ADDRESS": "9400"},
            "GRADRING_PROMETHEUS_ADDRESS='9400' is neither an IP",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings.from_environ(environ)


@pytest.mark.parametrize("streams", [0, 17, -1, 1.5, "many", "3", True])
def test_an_impossible_number_of_streams_is_named(streams: int) -> None:
    with pytest.raises(ConfigError, match=f"streams={streams!r} is not a whole number from 1 to"):
        Settings.from_environ({}, streams=streams)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tls": ("ca", "cert", "key")}, r"tls=\('ca', 'cert', 'key'\) is not a .*TlsFiles"),
        ({"interface": 1}, "interface=1 is neither an IP address nor one of this host's"),
        ({"timeout": 10**400}, "timeout=1000.* is not a number of seconds"),
        ({"stall_warning": 10**5000}, "stall_warning=a number of more than 80 digits is not"),
        ({"prometheus_port": 70000}, "prometheus_port=70000 is not a whole number from 1 to 65535"),
        ({"prometheus_port": "9100"}, "prometheus_port='9100' is not a whole number from 1 to"),
        ({"log": 1.5}, "log=1.5 is not one of DEBUG"),
        ({"checksum": "crc"}, "checksum='crc' is neither True nor False"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings.from_environ({}, **arguments)


def test_an_argument_that_is_no_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="stream is no setting; did you mean streams"):
        Settings.from_environ({}, stream=2)
    with pytest.raises(TypeError, match="worldsize is no setting; did you mean world_size"):
        gradring.init(worldsize=2)  # type: ignore[call-arg]


def test_an_empty_token_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\n")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(ConfigError, match="is empty"):
        Settings.from_environ({"GRADRING_TOKEN_FILE": str(tmp_path / "token")})
    with pytest.raises(ConfigError, match="is empty"):
        Settings.from_environ({}, token=b"")


@pytest.mark.parametrize(
    ("token", "named"),
    [
        (7, "token is of type int; give str, bytes"),
        ([7], "token is of type list"),
        ("secret\ud800", "token cannot be encoded as UTF-8"),
    ],
)
def test_a_token_is_text_or_bytes(token: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        Settings.from_environ({}, token=token)
    assert "secret" not in str(caught.value)


def test_the_core_gets_all_settings_as_one_object() -> None:
    settings = Settings.from_environ({"GRADRING_PORT": "29500-29515"}, token="secret", rack="a")
    config = settings.for_core(listen="10.0.0.5:1", announce="node-a:2", job_id=" mine ")
    assert (config.listen, config.announce, config.job) == ("10.0.0.5:1", "node-a:2", "mine")
    assert config.ports == (29500, 29515) and config.keeps_strangers_out
    elsewhere = config.listening_at(None)
    assert elsewhere.listen is None and elsewhere.announce == config.announce
    assert not DEFAULTS.for_core().keeps_strangers_out


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"algorithm": "bubble"}, "algorithm=.*bubble"),
        ({"rack": "a" * 25}, "rack=a* is not a name of at most 24 bytes"),
        ({"interface": "fe80::1%lo"}, "interface=fe80::1%lo is not an IP address"),
    ],
)
def test_what_only_the_core_can_check_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(DEFAULTS, **given).for_core()
