"""Texts from outside end in a value or in an error of ours, whatever they are.

The decoders of what travels between ranks are tested in ``rust/fuzzing/tests/decoders.rs``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from gradring.clusters import detect
from gradring.clusters.slurm import expand_nodelist
from gradring.config import parse
from gradring.errors import ConfigError
from gradring.observe.step_report import Totals

EXECUTIONS = 4000

TF_CONFIGS = [
    json.dumps({"cluster": cluster, "task": task})
    for cluster, task in [
        ({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, {"type": "worker", "index": 1}),
        ({"worker": {"0": "d:1", "1": "b:1"}, "ps": ["p:1"]}, {"type": "worker", "index": "1"}),
        ({"worker": ["[::1]:80", "host.name:65535"]}, {"type": "worker", "index": 0}),
    ]
]
PIECES = ["", '"', "{", "[", "]", "null", "true", "-1", "1e999", "NaN", "\\ud800", "\0", "é", ":1"]


def read_tf_config(text: str) -> None:
    cluster = detect({"TF_CONFIG": text})
    assert 0 <= cluster.rank < cluster.world_size


def read_address(text: str) -> None:
    assert parse.address(parse.address(text, "it"), "it")


def read_note(text: str) -> None:
    totals = Totals.from_note(text.encode(errors="surrogatepass"))
    if totals is not None:
        # It can be worked with, and be passed on.
        assert Totals.from_note(totals.minus(totals).to_note()) is not None


DECODERS: dict[str, tuple[Callable[[str], object], list[str]]] = {
    "TF_CONFIG": (read_tf_config, TF_CONFIGS),
    "address": (read_address, ["127.0.0.1:29500", "[::1]:1", "host.name:65535"]),
    "note": (read_note, [Totals(7, 1.5, 0.5, 0.25, {1: 0.25, 2: 1e-3}).to_note().decode()]),
    "nodelist": (expand_nodelist, ["gpu[01-02,7],login", "a[1-3]b[4-5]", "n"]),
}


def mutant(chance: random.Random, samples: list[str]) -> str:
    text = chance.choice(samples)
    for _ in range(chance.randrange(5)):
        start, end = sorted(chance.choices(range(len(text) + 1), k=2))
        end = min(end, start + 8)
        other = chance.choice(samples)
        piece = chance.choice([chance.choice(PIECES), other[: chance.randrange(len(other))]])
        text = text[:start] + piece + text[end:]
    return text


@pytest.mark.parametrize("name", DECODERS)
def test_any_text_is_a_value_or_a_config_error(name: str) -> None:
    decode, samples = DECODERS[name]
    for seed in range(EXECUTIONS):
        text = mutant(random.Random(seed), samples)
        try:
            decode(text)
        except ConfigError:
            pass
        except Exception as error:
            pytest.fail(f"seed {seed}: {text!r} raised {error!r}")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"cluster":' * 100_000,
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": %s}}' % ("9" * 5000),
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "%s"}}'
        % ("9" * 5000),
        '{"cluster": {"worker": {"%s": "a:1"}}, "task": {"type": "worker", "index": 0}}'
        % ("9" * 5000),
        '{"cluster": {"worker": ["a:%s"]}, "task": {"type": "worker", "index": 0}}' % ("9" * 5000),
    ],
    ids=["brackets", "objects", "number", "index", "sparse index", "port"],
)
def test_giants_are_config_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="TF_CONFIG"):
        detect({"TF_CONFIG": text})
