"""Standard input of one rank, its prompts on a terminal, and whose output is shown."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import DEADLINE_S, IN_A_GROUP, gradring, script

from support.commands import command_line

READS = "print(rank, 'read', sys.stdin.read().split(), flush=True)\n"


class Terminal:
    """A user at a terminal: what stands on it, and what is typed."""

    def __init__(self, controller: int) -> None:
        self._controller = controller
        self.text = ""

    def until(self, wanted: str) -> "re.Match[str]":
        """Reads until there is something new that matches; what was before is forgotten."""
        while (found := re.search(wanted, self.text)) is None:
            try:
                data = os.read(self._controller, 4096)
            except OSError:
                data = b""
            assert data, f"{wanted!r} is not in {self.text!r}"
            self.text += data.decode().replace("\r", "")
        self.text = self.text[found.end() :]
        return found

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())


@contextmanager
def at_a_terminal(*command: str) -> Iterator[tuple[Terminal, "list[int]"]]:
    """Runs a command; the list has its exit code when the block has ended."""
    pid, controller = pty.fork()
    if pid == 0:
        os.execve(command[0], command, {**os.environ, "NO_COLOR": "1"})
    codes: list[int] = []
    try:
        yield Terminal(controller), codes
    finally:
        os.close(controller)  # a hang-up ends what still runs
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_a_debugger_in_a_single_rank_is_answered_at_the_terminal(tmp_path: Path) -> None:
    program = script(tmp_path, "x = 41\nbreakpoint()\nprint('x is', x)\n")
    with at_a_terminal(*command_line("run", "-np", 1, *program)) as (terminal, _):
        terminal.until(r"\[0\] -> print\('x is', x\)\n\[0\] \(Pdb\) $")
        terminal.type("p x + 1\n")
        terminal.until(r"42\n\[0\] \(Pdb\) $")
        terminal.type("c\n")
        terminal.until(r"x is 41\n")


def test_lines_of_other_ranks_begin_anew_and_the_prompt_comes_again(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program = script(
        tmp_path,
        f"asked = {str(asked)!r}\n"
        "if rank == 1: print('answer:', input('name? '))\n"
        "else:\n"
        "    while not os.path.exists(asked): time.sleep(0.01)\n"
        "    print('meanwhile', flush=True)\n",
    )
    with at_a_terminal(*command_line("run", "-np", 2, "--stdin", 1, *program)) as (terminal, _):
        terminal.until(r"^\[1\] name\? $")
        asked.touch()
        terminal.until(r"^\n\[0\] meanwhile\n\[1\] name\? $")
        terminal.type("Ada\n")
        terminal.until(r"^Ada\nanswer: Ada\n")


def test_ctrl_c_at_a_prompt_is_answered_on_a_line_of_its_own(tmp_path: Path) -> None:
    program = script(tmp_path, "breakpoint()\ntime.sleep(300)\n")
    command = command_line("run", "-np", 1, "--grace", 200, *program)
    with at_a_terminal(*command) as (terminal, codes):
        terminal.until(r"\[0\] \(Pdb\) $")
        terminal.type("\x03")
        terminal.until(r"\ngradring run: interrupted: the rank has 200 s to end")
        terminal.until(r"\[0\] \(Pdb\) $")
        terminal.type("\x03")
        with pytest.raises(AssertionError, match="not in"):
            terminal.until("never printed")
    assert codes == [130]


def test_a_launcher_in_the_background_of_a_shell_leaves_the_terminal_alone(tmp_path: Path) -> None:
    command = command_line("run", "-np", 1, *script(tmp_path, READS))
    shell = f"import os, subprocess; subprocess.run({command!r}, preexec_fn=os.setpgrp)"
    with at_a_terminal(sys.executable, "-c", shell) as (terminal, _):
        terminal.until(r"\[0\] 0 read \[\]\n")


@pytest.mark.parametrize(
    ("options", "readers"),
    [(["-np", 1], {0}), (["-np", 2], set()), (["-np", 3, "--stdin", 2], {2})],
)
def test_one_rank_reads_what_comes_from_a_pipe(
    tmp_path: Path, options: list[object], readers: set[int]
) -> None:
    command = command_line("run", *options, *script(tmp_path, IN_A_GROUP + READS))
    done = subprocess.run(
        command, input="some words", capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    for rank in range(int(str(options[1]))):
        words = ["some", "words"] if rank in readers else []
        assert f"[{rank}] {rank} read {words}\n" in done.stdout


def test_a_closed_standard_input_is_an_empty_one(tmp_path: Path) -> None:
    command = command_line("run", "-np", 1, *script(tmp_path, READS))
    closed = "import os, sys; os.close(0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", closed, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr) == ("[0] 0 read []\n", "")


def test_who_meets_a_breakpoint_without_a_terminal_is_told_of_the_option(tmp_path: Path) -> None:
    done = gradring("run", "-np", 2, *script(tmp_path, "if rank == 1: breakpoint()\npass\n"))
    assert done.stderr.endswith(
        "gradring run: to answer breakpoint(), give a rank the terminal, as with --stdin 1\n"
    )


def test_the_output_of_some_ranks_is_shown_and_that_of_all_is_kept(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        IN_A_GROUP
        + "print('out', rank)\nprint('err', rank, file=sys.stderr)\nif rank == 0: sys.exit(3)\n",
    )
    done = gradring("run", "-np", 3, "--output-rank", "1,2", "--log-dir", tmp_path, *program)
    assert sorted(done.stdout.splitlines()) == ["[1] out 1", "[2] out 2"]
    before, _, report = done.stderr.partition("failed first (exit code 3)")
    assert "[0]" not in before and "[1] err 1" in before
    assert report.endswith("[0] err 0\n")
    assert (tmp_path / "rank-0.log").read_text().splitlines() == ["out 0", "err 0"]
