"""A reader who copies a block of Python finds every name in it, in a fresh interpreter."""

from __future__ import annotations

import pytest
from block_names import chains_of, imports_of, look_up, unknown_names

from support.documents import Block, blocks

PYTHON = [block for block in blocks() if block.source is not None]


@pytest.fixture(scope="module")
def missing() -> dict[str, list[str]]:
    sources = [block.source or "" for block in PYTHON]
    found = look_up([(imports_of(source), chains_of(source)) for source in sources])
    return {str(block): names for block, names in zip(PYTHON, found, strict=True)}


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_every_name_of_a_block_exists(block: Block, missing: dict[str, list[str]]) -> None:
    assert missing[str(block)] == []
    unknown = unknown_names(block.source or "", block.given)
    assert not unknown, "import it, define it, or say `given: NAME` in the comment before the block"


def test_names_that_do_not_exist_are_found_out() -> None:
    source = "import gradring\nfrom gradring import errors\n"
    uses = ("gradring.init()", "gradring.nothing.at_all()", "errors.PeerLostError", "errors.Lost")
    (missing, nothing) = look_up(
        [
            (imports_of(source + "\n".join(uses)), chains_of(source + "\n".join(uses))),
            ("import gradring.nothing", []),
        ]
    )
    assert missing == ["errors.Lost", "gradring.nothing", "gradring.nothing.at_all"]
    assert nothing == ["import gradring.nothing: No module named 'gradring.nothing'"]
    assert unknown_names("print(model.fit(x)); y = [z for z in y]", ["x"]) == {"model"}


def test_a_submodule_that_another_block_imports_helps_no_block() -> None:
    found = look_up(
        [("import gradring.tools.cli.env", []), ("import gradring", ["gradring.tools.cli"])]
    )
    assert found == [[], ["gradring.tools.cli"]]


def test_what_needs_a_package_that_is_not_installed_is_left_out() -> None:
    imports = "import not_there.part\nimport gradring.tools.cli"
    chains = ["not_there.part.Thing", "gradring.tools.cli.COMMANDS", "gradring.nothing"]
    assert look_up([(imports, chains)]) == [["gradring.nothing"]]
