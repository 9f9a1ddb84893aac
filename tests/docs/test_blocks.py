"""Every block of the documents runs, prints what it says, or says why it does not run."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gradring.clusters import without_cluster_variables
from gradring.machine.ports import free_ports
from gradring.tools import cli
from support.commands import AS_PYTHON, PYTHON, head_of_script
from support.documents import ROOT, Block, blocks, make_targets, programs

DEADLINE_S = 240
#: Launchers of others, and what needs no check of its arguments.
FOREIGN = (
    *("docker", "firewall-cmd", "kubectl", "mpiexec", "mpirun"),
    *("openssl", "pip", "sbatch", "srun", "torchrun"),
)
SHELL_WORDS = ("done", "export", "for", "mkdir", "umask")
#: The port in the documents, or a range that begins with it; a free one takes its place.
PORTS = re.compile(r"\b29500(?:-(\d+))?\b")
FIRST_PORT = 29500
COMMANDS = ("gradring", "make", "python", "cargo", *FOREIGN)

SSH = f"""{head_of_script()}import subprocess, sys
sys.exit(subprocess.call(["sh", "-c", sys.argv[-1]]))
"""
GRADRING = f'#!/bin/sh\nexec {PYTHON} -m gradring "$@"\n'

#: What a document shows in one way, and a run prints in another.
VARIES = re.compile(r"\bnode-[ab]\b|\.\.\.|\s+")
#: As well as numbers that vary; ranks, ordinals and sizes do not.
NUMBERS_VARY = re.compile(rf"(?<!rank )(?<!ranks )(?<![\[#\w])\d[\d.,:]*k?|{VARIES.pattern}")


def sections() -> list[Any]:
    """The blocks of each section that has commands to run."""
    found = []
    for title, group in itertools.groupby(blocks(), lambda b: f"{b.document}: {b.section}"):
        members = list(group)
        run = [b for b in members if b.language == "bash" and b.mark != "not run"]
        if run:
            slow = [pytest.mark.slow] if any(b.mark == "slow" for b in run) else []
            found.append(pytest.param(members, id=title, marks=slow))
    return found


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory with all programs of the documents, and what commands find on the path."""
    for name, text in programs().items():
        tmp_path.joinpath(name).write_text(text)
    tmp_path.joinpath("bin").mkdir()
    for name, script in {
        # Each name of a host is one of this machine, so that ssh has nowhere to go.
        "ssh": SSH,
        "python": AS_PYTHON,
        "gradring": GRADRING,
    }.items():
        tmp_path.joinpath("bin", name).write_text(script)
        tmp_path.joinpath("bin", name).chmod(0o755)
    return tmp_path


def with_ports(text: str, port: int) -> str:
    """A document's text with ``port`` for the one that it names; a range stays as long as it is."""

    def moved(found: re.Match[str]) -> str:
        last = found[1] and int(found[1]) + port - FIRST_PORT
        return f"{port}-{last}" if last else str(port)

    return PORTS.sub(moved, text)


def run(block: Block, workplace: Path, port: int) -> str:
    """Runs a block's commands as a script that ends at the first failure; what it printed."""
    script = with_ports(block.text, port).replace("/opt/venv/bin/python", PYTHON)
    script = script.replace("node-a", "127.0.0.2").replace("node-b", "127.0.0.3")
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=workplace,
        env={
            **without_cluster_variables(os.environ),
            "PATH": os.pathsep.join([str(workplace / "bin"), os.environ["PATH"]]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # Buffered, so that ranks without a launcher do not write into each other's lines.
            "PYTHONUNBUFFERED": "",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    if block.mark != "any outcome":
        assert (done.returncode != 0) == (block.mark == "fails"), f"{block}\n{done.stdout}"
    return done.stdout


def pattern(line: str, numbers_vary: bool = False) -> re.Pattern[str]:
    """Matches the lines that say the same as ``line`` of another run on another machine."""
    parts, end = [], 0
    for varying in (NUMBERS_VARY if numbers_vary else VARIES).finditer(line):
        parts.append(re.escape(line[end : varying.start()]))
        shown, end = varying[0], varying.end()
        if shown.isspace():
            parts.append(r"\s+")
        elif shown == "...":
            parts.append(".*")
        else:
            parts.append(r"[\d.,:]+k?" if shown[0].isdigit() else r"\S+")
    parts.append(re.escape(line[end:]))
    return re.compile("".join(parts) + "$")


def test_a_pattern_varies_in_measurements_and_hosts_alone() -> None:
    shown = "[0] rank 1 on node-b waited 10.1 ms for float32[98] (#5) ..."
    assert pattern(shown).match(shown.replace("node-b", "vm").replace("...", "and so on"))
    assert not pattern(shown).match(shown.replace("10.1", "10.2"))
    line = pattern(shown, numbers_vary=True)
    assert line.match("[0] rank 1 on vm waited   9 ms for float32[98] (#5) and so on")
    for other in ("[1] rank 1", "[0] rank 2"):
        assert not line.match(f"{other} on vm waited 9 ms for float32[98] (#5) and so on")
    assert not line.match("[0] rank 1 on vm waited 9 ms for float32[98] (#6) and so on")
    assert not line.match("[0] rank 1 on vm waited 9 ms for float32[97] (#5) and so on")


def test_a_range_of_ports_moves_as_a_whole() -> None:
    shown = "GRADRING_PORT=29500-29507 gradring doctor node-a:29500"
    assert with_ports(shown, 31423) == "GRADRING_PORT=31423-31430 gradring doctor node-a:31423"


@pytest.mark.parametrize("section", sections())
def test_a_section_does_what_it_says(section: list[Block], workplace: Path) -> None:
    port, ran, printed = free_ports(1)[0], None, ""
    for block in section:
        if block.language == "text" and ran is not None:
            # A stall of this machine may change what measurements say.
            for _ in range(2 if block.mark == "numbers vary" else 0):
                if missing(block, printed, port):
                    printed = run(ran, workplace, port)
            lines = "\n".join(missing(block, printed, port))
            assert not lines, f"{block} shows\n{lines}\nbut the commands printed\n{printed}"
        ran = None
        if block.language == "bash" and block.mark != "not run":
            ran, printed = block, run(block, workplace, port)


def missing(block: Block, printed: str, port: int) -> list[str]:
    """The lines that a block of text shows, and commands did not print."""
    return [
        line
        for line in with_ports(block.text, port).splitlines()
        if not any(
            pattern(line, block.mark == "numbers vary").match(said) for said in printed.splitlines()
        )
    ]


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.language in ("bash", "diff", "python", "text", "yaml"), "name the language"
    if block.language == "text":
        first = block.text.split(maxsplit=1)[0]
        assert first not in COMMANDS, "commands belong into a block of bash"
    if block.mark is not None:
        assert len(block.reason.split()) >= 3, "say why"
        for path in re.findall(r"tests/[\w/]+\.py", block.reason):
            assert (ROOT / path).is_file(), path
    if block.language == "python":
        compile(block.text, str(block), "exec")
        assert block.program or block.mark == "not run", "name a file, and run it in a command"
    if block.language == "bash" and block.mark == "not run":
        for command in block.commands:
            check_arguments(command)


def check_arguments(command: str) -> None:
    """What can be known of a command without running it."""
    words = shlex.split(command, comments=True)
    words = [word for word in words if not re.match(r"[A-Za-z_]+=", word)]
    if not words or words[0] in SHELL_WORDS:
        return
    if words[0] == "gradring":
        assert words[1] in cli.COMMANDS, command
        cli._parser([words[1]]).parse_args(words[1:])
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert set(targets) <= make_targets(), command
    elif words[:2] == ["python", "-m"]:
        module = words[2].replace(".", "/")
        places = [ROOT / place / module for place in ("", "tests", "python")]
        assert any(p.is_dir() or p.with_suffix(".py").is_file() for p in places), command
    else:
        assert words[0] in FOREIGN, f"what is {words[0]}?"


def test_every_program_is_run_by_a_command() -> None:
    run = [block for block in blocks() if block.mark != "not run"]
    scripts = [block.text for block in run if block.language == "bash"]
    for name in (block.program[0] for block in run if block.program):
        assert any(name in script for script in scripts), name
