"""Programs that ``gradring run`` starts: scripts, modules and others, and who runs scripts."""

import os
import sys
from pathlib import Path

import pytest
import ssh_stand_in
from launching import executable, gradring, python_path, script

from support.commands import AS_PYTHON, PYTHON

WHO = "print(sys.executable, sys.argv, sys.path[0])\n"
WITHOUT_GRADRING = f'#!/bin/sh\nexec {PYTHON} -I -S "$@"\n'
"""An interpreter that sees no packages but Python's own."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: one with a space in its name."""
    directory = tmp_path / "my runs"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def without_gradring(tmp_path: Path) -> dict[str, str]:
    """A PATH on which `python` is an interpreter without gradring, as without activation."""
    executable(tmp_path / "bare" / "python", WITHOUT_GRADRING)
    return {"PATH": f"{tmp_path / 'bare'}{os.pathsep}{os.environ['PATH']}"}


def test_a_script_runs_under_the_interpreter_of_gradring(
    here: Path, without_gradring: dict[str, str]
) -> None:
    script(here, "import gradring\n" + WHO)
    arguments = ["-np", "7", "--hosts", "a", "--", "-m", "x y"]
    done = gradring("run", "-np", 1, "train.py", *arguments, **without_gradring)
    assert done.stdout == f"[0] {sys.executable} {['train.py', *arguments]} {here}\n", done.stderr


@pytest.mark.parametrize("mode", [0o644, 0o755])
@pytest.mark.parametrize("name", ["./train.py", "../my runs/train.py", "{here}/train.py"])
def test_it_does_so_wherever_the_script_is_and_whether_it_is_executable(
    here: Path, name: str, mode: int
) -> None:
    script(here, WHO)
    (here / "train.py").chmod(mode)  # without a #! line
    name = name.format(here=here)
    done = gradring("run", "-np", 1, "--", name)
    assert done.stdout == f"[0] {sys.executable} {[name]} {here}\n", done.stderr


def test_a_scripts_shebang_does_not_change_its_interpreter(here: Path) -> None:
    executable(here / "train.py", "#!/bin/false\nprint('ours')\n")
    assert gradring("run", "-np", 1, "./train.py").stdout == "[0] ours\n"


def test_a_program_on_the_path_may_be_named_like_a_script(here: Path, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "tool.py", "#!/bin/sh\necho its own\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    assert gradring("run", "-np", 1, "tool.py", PATH=path).stdout == "[0] its own\n"


def test_other_programs_run_as_they_are(here: Path) -> None:
    executable(here / "train", "#!/bin/sh\necho shell $1\n")
    assert gradring("run", "-np", 1, "./train", "one").stdout == "[0] shell one\n"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["train.py"], "there is no file 'train.py' in {here}"),
        (["/there/train.py"], "there is no file '/there/train.py'\n"),
        (["there/train.py"], "there is no file 'there/train.py' in {here}"),
        (["no-such-program"], "there is no program 'no-such-program'; check its name and PATH"),
        (["run.sh"], "there is no program 'run.sh' on PATH; type ./run.sh for the file"),
        (["./plain file"], "'./plain file' cannot be executed; type: chmod +x './plain file'"),
        (["python9.9", "a.py"], "there is no program 'python9.9'; type: gradring run ... a.py"),
        (
            ["python9", "-u", "a.py"],
            "there is no program 'python9'; type: gradring run ... {python} -u a.py",
        ),
    ],
)
def test_what_cannot_be_started_says_what_to_type(
    here: Path, command: list[str], problem: str
) -> None:
    executable(here / "run.sh", "#!/bin/sh\n")
    (here / "plain file").touch()
    done = gradring("run", "-np", 2, *command)
    assert (done.returncode, done.stdout) == (127, "")
    problem = problem.format(here=here, python=PYTHON)
    assert done.stderr.startswith(f"gradring run: {problem}"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["#!/no/such/interpreter\n", "no first line"])
def test_a_program_without_an_interpreter_is_explained(here: Path, text: str) -> None:
    executable(here / "train", text)
    done = gradring("run", "-np", 1, "./train")
    assert done.returncode == 127
    assert "its first line must be #! and the path of an interpreter" in done.stderr


@pytest.mark.parametrize("module", ["gradring", "numpy.linalg"])
def test_a_python_without_our_packages_is_explained_in_one_line(
    module: str, here: Path, without_gradring: dict[str, str]
) -> None:
    (here / "train.py").write_text(f"import {module}\n")
    done = gradring("run", "-np", 2, "python", "train.py", "--lr", "a b", **without_gradring)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gradring run: the Python that 'python' started on ")
    assert last.endswith(
        f"has no {module.partition('.')[0]}; gradring is installed for {sys.executable}; "
        "type: gradring run ... train.py --lr 'a b'"
    )
    assert done.stderr.count("gradring run ...") == 1


def test_it_is_explained_for_a_module_too(here: Path, without_gradring: dict[str, str]) -> None:
    done = gradring("run", "-np", 1, "python", "-m", "gradring", "env", **without_gradring)
    last = done.stderr.splitlines()[-1]
    assert last.endswith("; type: gradring run ... -m gradring env"), done.stderr


def test_a_shell_script_whose_python_has_no_gradring_is_explained(
    here: Path, without_gradring: dict[str, str]
) -> None:
    (here / "train.py").write_text("import gradring\n")
    executable(here / "run.sh", "#!/bin/sh\npython train.py\n")
    done = gradring("run", "-np", 1, "./run.sh", **without_gradring)
    last = done.stderr.splitlines()[-1]
    assert last.endswith(f"is installed for {sys.executable}; use that one"), last


@pytest.mark.parametrize(
    ("command", "module"),
    [(["train.py"], "mine"), (["python", "train.py"], "mine"), (["train.py"], "os.mine")],
)
def test_a_module_that_gradrings_interpreter_lacks_too_is_not_explained(
    here: Path, without_gradring: dict[str, str], command: list[str], module: str
) -> None:
    (here / "train.py").write_text(f"import {module}\n")
    done = gradring("run", "-np", 1, *command, **without_gradring)
    assert done.stderr.splitlines()[-2].startswith("[0] ModuleNotFoundError")


@ssh_stand_in.needs_addresses
def test_scripts_and_modules_run_on_other_hosts_under_their_interpreter(
    here: Path, tmp_path: Path
) -> None:
    script(here, "print(sys.executable, sys.argv[1:], __name__)\n")
    ssh = ssh_stand_in.install(tmp_path)
    # The path there has a space, and differs from the path here.
    there = executable(tmp_path / "an env" / "python", AS_PYTHON)
    (tmp_path / "key").touch()
    # The last host is not needed, and cannot be reached.
    text = "localhost\r\nme@127.0.0.2 slots=99999999999 port=2222 # there\r\nme@127.0.0.3\r\n"
    (tmp_path / "hosts").write_text(text)
    options = ["-np", 2, "--hostfile", tmp_path / "hosts", "--python", there, "--ssh-port", 23]
    options += ["--ssh-identity-file", tmp_path / "key", "--ssh-option", "ConnectTimeout=3"]
    ssh |= {"SSH_STAND_IN_DOWN": "127.0.0.3", "PYTHONPATH": python_path(here)}
    arguments = ["a b", "$HOME '`x`'", "new\nline", "", "*", "--hosts", "--", "-np"]
    for command in (["train.py"], ["-m", "train"]):
        done = gradring("run", *options, *command, *arguments, **ssh)
        assert sorted(done.stdout.splitlines()) == [
            f"[{rank}] {sys.executable} {arguments} __main__" for rank in (0, 1)
        ], done.stderr
    notes = Path(ssh["SSH_STAND_IN_NOTES"]).read_text().splitlines()
    assert len(notes) == 4  # for each run, a look at the host and a rank
    for line in notes:
        assert f"['-p', '2222', '-o', 'ConnectTimeout=3', '-i', '{tmp_path / 'key'}'" in (
            line.replace(f"'{tmp_path / 'bin' / 'ssh'}', ", "")
        )
        assert f"\"'{there}' -m gradring.launch." in line


@ssh_stand_in.needs_addresses
@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["train.py"], "there is no file 'train.py' in {here}"),
        (["no-such-program"], "there is no program 'no-such-program'; check its name and PATH"),
    ],
)
def test_what_another_host_cannot_start_is_explained(
    here: Path, tmp_path: Path, command: list[str], problem: str
) -> None:
    done = gradring("run", "--hosts", "me@127.0.0.2", *command, **ssh_stand_in.install(tmp_path))
    assert done.returncode == 127
    assert problem.format(here=here) in done.stderr


@ssh_stand_in.needs_addresses
def test_a_python_of_another_host_without_gradring_is_explained(here: Path, tmp_path: Path) -> None:
    (here / "train.py").write_text("import gradring\n")
    python = executable(tmp_path / "bare" / "python3", WITHOUT_GRADRING)
    ssh = ssh_stand_in.install(tmp_path)
    done = gradring("run", "--hosts", "me@127.0.0.2:2", python, "train.py", **ssh)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"gradring run: the Python that {str(python)!r} started on 127.0.0.2 has no gradring; "
        f"gradring is installed for {sys.executable}; type: gradring run ... train.py"
    )
