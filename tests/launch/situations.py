"""Wrong settings, calls and situations, and the last line that a user sees of each.

``PYTHONPATH=tests python tests/launch/situations.py`` runs all and prints them as a table.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradring.clusters import without_cluster_variables
from gradring.machine.ports import free_ports
from support.commands import command_line
from support.waiting import wait_until

TOKEN = "0123456789abcdef0123456789abcdef"
#: For ranks that no launcher has started: PORT stands for one that is free.
RENDEZVOUS = "127.0.0.1:PORT"
JOIN = "import gradring\ngradring.init()\n"
#: Of the launcher's last line where a rank's own stand above it.
ABOVE = "its last words are above"
#: For a rank that waits in vain, and for one that need not wait so long.
IN_VAIN, IN_TIME = "1", "60"


def rank(number: object, world_size: object = 2, **more: str) -> dict[str, str]:
    """The variables of a rank that no launcher has started; those of ``more`` win."""
    place = {"RANK": str(number), "WORLD_SIZE": str(world_size), "RENDEZVOUS": RENDEZVOUS}
    place |= {"TOKEN": TOKEN, "TIMEOUT_S": IN_TIME, **more}
    return {f"GRADRING_{name}": value for name, value in place.items() if value}


@dataclass(frozen=True)
class Situation:
    """Something that goes wrong.

    Attributes:
        name: Unique.
        says: Parts of the last line: what is wrong, and what to do. Of several processes without
            a launcher, it is that of the first that ends.
        command: The words after ``gradring``; PROGRAM stands for the path of ``program``. None:
            the program runs as each of ``ranks``.
        program: The text of a Python program.
        ranks: The variables of each process, without a launcher.
        variables: Of the command.
        lines: How many lines a process may print at most.
        code: The exit code of one that fails.
        prepare: Called with the program's path.
        holds_port: Whether another process holds the port.
    """

    name: str
    says: Sequence[str]
    command: Sequence[str] | None = None
    program: str = JOIN
    ranks: Sequence[Mapping[str, str]] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    lines: int = 3
    code: int = 2
    prepare: Callable[[Path], None] | None = None
    holds_port: bool = False

    def __str__(self) -> str:
        return self.name


def run(name: str, words: str, *says: str, **more: object) -> Situation:
    """A command of ``gradring``."""
    return Situation(name, says, words.split(), **more)  # type: ignore[arg-type]


def plain(name: str, ranks: Sequence[Mapping[str, str]], *says: str, **more: object) -> Situation:
    """A program without a launcher: a traceback of it, and its last line."""
    return Situation(name, says, None, ranks=ranks, **{"lines": 12, "code": 1, **more})  # type: ignore[arg-type]


def under(name: str, program: str, *says: str, **more: object) -> Situation:
    """A program of two ranks under `gradring run`, whose failure is told."""
    head = "import sys, os\nimport numpy as np\nimport gradring\ncomm = gradring.init()\n"
    given = {"lines": 45, "code": 1, "program": head + program, **more}
    words = ["run", "-np", "2", "PROGRAM"]
    return Situation(name, says, words, **given)  # type: ignore[arg-type]


def _not_executable(path: Path) -> None:
    path.rename(path.with_name("train.sh"))


GO = "run -np 2 PROGRAM"
SITUATIONS = [
    # What is typed.
    run("no ranks", "run -np 0 PROGRAM", "'0' is not a number of ranks"),
    run("too many ranks", "run -np 3000 PROGRAM", "3000 ranks are too many", "at most 2048"),
    run(
        "more ranks than hosts", "run -np 2 --hosts a:1 PROGRAM", "more than the 1 rank of --hosts"
    ),
    run("a host without a number", "run --hosts a:x PROGRAM", "'a:x' has 'x' ranks"),
    run(
        "a host that does not exist",
        "run --hosts no-such-host.invalid:1 PROGRAM",
        *("no-such-host.invalid", "ssh must work without a password"),
        code=1,
    ),
    run("no command", "run -np 2", "there is no command; type: gradring run -np 2 train.py"),
    run("no such program", "run -np 2 nowhere.py", "nowhere.py", code=127),
    run(
        "a program that may not be executed",
        "run -np 2 ./train.sh",
        *("train.sh", "chmod +x"),
        code=127,
        prepare=_not_executable,
    ),
    run("a wrong option", "run -np 2 --max-restart 1 PROGRAM", "did you mean --max-restarts?"),
    run("an option of torchrun", "run --nproc-per-node 2 PROGRAM", "--nproc-per-node"),
    run("fewer ranks than the least", "run -np 2 --min-np 3 PROGRAM", "must grow in this order"),
    run("an elastic job with servers", "run -np 2 --min-np 1 --ps 1 PROGRAM", "--ps goes without"),
    run("a wrong log directory", "run -np 2 --log-dir /proc/x PROGRAM", "--log-dir"),
    # Settings, found by a rank.
    plain(
        "half a place", [{"GRADRING_RANK": "1"}], "GRADRING_RANK is set but GRADRING_WORLD_SIZE is"
    ),
    plain("a rank beyond the world", [rank(5)], "5", "2"),
    plain("a rank that is no number", [rank("x")], "GRADRING_RANK='x'"),
    plain(
        "a world of none",
        [rank(0, 0)],
        "GRADRING_WORLD_SIZE=0 is not a whole number from 1 to 2048",
    ),
    plain("a rendezvous without a port", [rank(1, RENDEZVOUS="node")], "GRADRING_RENDEZVOUS"),
    plain("no token and no job id", [rank(1, RENDEZVOUS="10.0.0.9:1", TOKEN="")], "GRADRING_TOKEN"),
    plain("a token file that is missing", [rank(0, TOKEN="", TOKEN_FILE="/no/file")], "/no/file"),
    plain("an unknown transport", [rank(0, TRANSPORT="pigeons")], "is not one of auto, tcp, shm"),
    plain("an unknown interface", [rank(0, INTERFACE="eth99")], "eth99"),
    plain("a timeout in words", [rank(0, TIMEOUT_S="soon")], "GRADRING_TIMEOUT_S='soon'"),
    plain(
        "certificates that are missing",
        [rank(0, TLS_CA="/no/ca.pem", TLS_CERT="/no/c.pem", TLS_KEY="/no/k.pem")],
        "/no/ca.pem",
    ),
    plain("a third of TLS", [rank(0, TLS_CA="/no/ca.pem")], "GRADRING_TLS_CERT"),
    plain("TF_CONFIG that is not JSON", [{"TF_CONFIG": "{worker"}], "TF_CONFIG: it is not JSON"),
    plain(
        "TF_CONFIG without a task",
        [{"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}],
        "TF_CONFIG: task is missing",
    ),
    # Ranks that do not find each other.
    plain("nobody listens", [rank(1, TIMEOUT_S=IN_VAIN)], "Connection refused", "start that rank"),
    plain(
        "a name without an address",
        [rank(1, RENDEZVOUS="no-such-host.invalid:1", TIMEOUT_S=IN_VAIN)],
        *("no-such-host.invalid:1", "correct that name"),
    ),
    plain(
        "a rank is missing",
        [rank(0, TIMEOUT_S=IN_VAIN)],
        "rank 1 of 2 did not join",
        "look at the output of",
    ),
    plain("a port that is taken", [rank(0)], "choose another port", holds_port=True),
    plain(
        "another token",
        [rank(0), rank(1, TOKEN=TOKEN[::-1])],
        *("different tokens", "give every rank the same token"),
    ),
    plain(
        "another world size",
        [rank(0, 2), rank(1, 3)],
        *(
            "was started with world size 3, rank 0 with 2",
            "start all ranks with the same world size",
        ),
    ),
    plain(
        "two of one rank",
        [rank(0, 3), rank(1, 3), rank(1, 3)],
        *("another process has joined as rank 1 already", "give every process a rank of its own"),
    ),
    plain("two of rank 0", [rank(0), rank(0)], "cannot listen on", "choose another port"),
    plain(
        "another job",
        [rank(0, JOB_ID="one"), rank(1, JOB_ID="two")],
        *("rank 1 was started by job two, rank 0 by job one", "the same GRADRING_JOB_ID"),
    ),
    plain("another setting", [rank(0, CHECKSUM="1"), rank(1)], "checksum", "the same settings"),
    # Calls.
    under("other shapes", "comm.all_reduce(np.ones(3 + comm.rank), name='g')", "same shapes"),
    under("other dtypes", "comm.all_reduce(np.ones(3, f'f{4 + 4 * comm.rank}'))", "float64"),
    under("other names", "comm.all_reduce(np.ones(3), name=f'g{comm.rank}')", "'g1'"),
    under(
        "an array with gaps", "comm.all_reduce(np.ones((4, 4))[:, ::2])", "pass a contiguous copy"
    ),
    under("a dtype that is not known", "comm.all_reduce(np.ones(3, complex))", "complex128"),
    under("an array that is only read", "comm.broadcast(np.frombuffer(b'12345678'))", "copy"),
    under(
        "a root beyond the group", "comm.broadcast(np.ones(3), root=5)", "choose one from 0 to 1"
    ),
    under("an unknown operation", "comm.all_reduce(np.ones(3), op='avg')", "mean"),
    under("wrong splits", "comm.all_to_all(np.ones((4, 1)), [1, 2])", "splits"),
    under("a send to itself", "comm.send(np.ones(3), comm.rank)", "choose another rank"),
    under("a call after close", "comm.close(); comm.barrier()", "make a new communicator"),
    # Ends.
    under("a rank that leaves", "if comm.rank: sys.exit()\ncomm.barrier()", "that rank ended well"),
    under("a rank that exits", "if comm.rank: sys.exit(3)\ncomm.barrier()", "exit code 3", code=3),
    under("an exception", "if comm.rank: raise ValueError('mine')\ncomm.barrier()", "mine"),
    under(
        "a rank that is killed",
        "if comm.rank: os.kill(os.getpid(), 9)\ncomm.barrier()",
        "it printed nothing",
        code=137,
    ),
    run(
        "no group at all",
        GO,
        "no rank joined a group",
        program="print(1)\n",
        code=0,
    ),
    # Elastic jobs and update rules.
    under(
        "more least workers than most",
        "gradring.elastic.run(comm, min_workers=3, max_workers=2)",
        "min_workers",
    ),
    under(
        "a wrong update rule",
        "from gradring import updates; updates.AllReduce(sync_every=0)",
        "sync_every",
    ),
    under("a wrong compression", "from gradring import updates; updates.TopK(2.0)", "TopK"),
    under(
        "a wrong staleness",
        "from gradring import updates; updates.ParameterServer(staleness=-1)",
        "staleness",
    ),
    under("every for rounds", "from gradring import updates; updates.LocalSGD(every=0)", "every"),
]


#: Calls of a program of TensorFlow with a group, a strategy and a model, and what is said of each.
OF_TENSORFLOW = {
    "restore(model, '/no/model.keras')": ["no such file on any host", "give the path"],
    "save(model, '/proc/x/model.keras')": ["could not save", "look at that path"],
    "CustomCollectiveStrategy(update='sync')": ["is no update rule", "pass one of"],
    "CustomCollectiveStrategy(update=updates.ParameterServer())": ["gradring run -np 3 --ps 1"],
    "GradientReducer(bucket_bytes=-1)": ["bucket_bytes=-1", "correct it"],
    "GradientReducer()([tf.constant('x')])": ["string cannot be reduced", "cast it"],
    "gradring.tensorflow.all_reduce(tf.constant('x'))": ["string cannot be reduced", "cast it"],
    "gradring.tensorflow.broadcast(tf.ones(3), root=5)": ["root=5", "choose one from 0 to 1"],
}
_CALLS = f"""
import json, traceback
import keras, tensorflow as tf
import gradring.tensorflow
from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer, restore, save
strategy = CustomCollectiveStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
for call in {list(OF_TENSORFLOW)!r}:
    try:
        eval(call)
        text = "no error"
    except Exception as error:
        text = str(error)
    print(json.dumps([call, text]))
"""


def said_of_tensorflow(directory: Path) -> dict[str, str]:
    """What each call of `OF_TENSORFLOW` raises on rank 0 of two."""
    situation = run("calls of TensorFlow", "run -np 2 --output-rank 0 PROGRAM", program=_CALLS)
    lines = seen(situation, directory).lines
    return dict(json.loads(line[4:]) for line in lines if line.startswith('[0] ["'))


@dataclass(frozen=True)
class Seen:
    """What one process printed, without an empty line, and its exit code."""

    lines: list[str]
    code: int

    @property
    def last(self) -> str:
        """The last line; that of a rank where the launcher says that the last words are above."""
        lines = self.lines
        if lines and ABOVE in lines[-1]:
            lines = [line for line in lines if line.startswith("[")]
        return lines[-1] if lines else ""


def seen(situation: Situation, directory: Path) -> Seen:
    """Lets it happen; what the first process that ended has printed."""
    program = directory / "train.py"
    program.write_text(situation.program)
    if situation.prepare is not None:
        situation.prepare(program)
    with _port(held=situation.holds_port) as port:
        if situation.command is not None:
            words = [str(program) if word == "PROGRAM" else word for word in situation.command]
            commands = [(command_line(*words), situation.variables)]
        else:
            commands = [([sys.executable, str(program)], place) for place in situation.ranks]
        started = [_start(command, place, port, directory) for command, place in commands]
        try:
            wait_until(lambda: any(each.poll() is not None for each in started), situation.name)
            first = next(each for each in started if each.returncode is not None)
            text, _ = first.communicate()
        finally:
            for process in started:
                with process:
                    process.kill()
    return Seen([line for line in text.splitlines() if line.strip()], first.returncode)


def _start(
    command: Sequence[str], place: Mapping[str, str], port: int, directory: Path
) -> subprocess.Popen[str]:
    places = {name: value.replace("PORT", str(port)) for name, value in place.items()}
    return subprocess.Popen(
        command,
        env={**without_cluster_variables(os.environ), **places},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def _port(*, held: bool) -> Iterator[int]:
    if not held:
        yield free_ports(1)[0]
        return
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def main(names: Sequence[str]) -> None:
    """Prints a table of all, or of those with one of these words in their names."""
    for situation in SITUATIONS:
        if names and not any(name in situation.name for name in names):
            continue
        with tempfile.TemporaryDirectory() as directory:
            one = seen(situation, Path(directory))
        print(f"| {situation.name} | {len(one.lines)} | {one.code} | {one.last}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for call, text in said_of_tensorflow(Path(directory)).items():
            print(f"| `{call}` | {len(text.splitlines())} | | {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
