"""``gradring verify -np N -- CMD...``: comparison of a training on N ranks and on one process."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gradring.clusters import without_cluster_variables
from gradring.config.parse import MAX_WORLD_SIZE
from gradring.config.values import check_path, check_variables
from gradring.launch.first_process import in_child
from gradring.launch.hosts import THIS_HOST
from gradring.launch.launcher import launch
from gradring.launch.plain import Plain
from gradring.launch.program import Program
from gradring.launch.servers import Servers
from gradring.launch.supervisor import Supervisor
from gradring.machine.streams import print_error
from gradring.tools.cli.arguments import count, make_directory, option, say
from gradring_start import AS_HOROVOD, AS_MWMS, VERIFY, WITH_STRATEGY, advice_to_install

NAME = "verify"
HELP = "train a program on one process and on N ranks, and say whether the weights are equal"
EXAMPLE = "gradring verify -np 2 train.py"
STEPS = 20
#: Exit codes; 2 is wrong usage.
EQUAL, DIFFERENT, FAILED = 0, 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the number of ranks, of steps, and the command."""
    parser.usage = "gradring verify [-np N] [option...] [--] COMMAND..."
    add = partial(option, parser)
    add("-np -n N", count("ranks", least=2), dest="world_size", default=2)(
        "number of ranks, on this machine (default %(default)d)"
    )
    add("--steps N", count("steps"), default=STEPS)(
        "end both trainings after N steps of optimizers (default %(default)d)"
    )
    add("--ps N", count("parameter servers"), default=0, dest="servers")(
        "start N parameter servers beside the one process and beside the ranks, as gradring run "
        "--ps does"
    )
    add("-m", dest="module")("COMMAND is a Python module, as of python -m")
    add = partial(option, parser.add_mutually_exclusive_group())
    add("--as-horovod")("start both trainings as gradring run --as-horovod does")
    add("--as-mwms")(
        "start the ranks as gradring run --as-mwms does; the one process uses TensorFlow's strategy"
    )
    add("--with-strategy")(
        "start the ranks as gradring run --with-strategy does; the one process has no strategy"
    )
    option(parser, "--log-dir DIR", Path)(
        "write the output of the one process to DIR/one/rank-0.log, and that of the ranks to "
        "DIR/ranks"
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="as of gradring run: a Python script, or any program; then its arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs and compares both trainings; returns 0 if they are equal, 1 if not, 3 if one failed."""
    command: list[str] = arguments.program
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        return _misused("there is no command; type: gradring verify -np 2 train.py")
    if arguments.world_size > MAX_WORLD_SIZE:
        return _misused(f"a group has at most {MAX_WORLD_SIZE} ranks")
    if (advice := advice_to_install()) is not None:
        return _misused(advice)
    check_variables(without_cluster_variables(os.environ), is_own=True)
    if arguments.log_dir is not None:
        check_path("--log-dir", arguments.log_dir.absolute())
        make_directory("--log-dir", arguments.log_dir)
    program = Program(command, arguments.module)
    if (problem := program.problem(os.environ.get("PATH"))) is not None:
        print_error(f"gradring verify: {problem}")
        return FAILED
    try:
        return in_child(partial(_verify, program, arguments))
    except OSError as error:
        print_error(f"gradring verify: the processes cannot be started: {error}")
        return FAILED


def _verify(program: Program, arguments: argparse.Namespace) -> int:
    from gradring.records import trainings
    from gradring.tools.verify.verdict import verdict

    horovod = {AS_HOROVOD: "1"} if arguments.as_horovod else {}
    of_ranks = {
        **horovod,
        **({AS_MWMS: "1"} if arguments.as_mwms else {}),
        **({WITH_STRATEGY: "1"} if arguments.with_strategy else {}),
    }
    size = arguments.world_size
    with tempfile.TemporaryDirectory(prefix="gradring-verify-") as directory:
        records = Path(directory)
        for name, ranks, stand_ins in (("one", 1, horovod), ("ranks", size, of_ranks)):
            trainings.begin(records / name, arguments.steps)
            who = "one process" if ranks == 1 else f"{ranks} ranks"
            say(f"trains on {who}")
            log_dir = None if arguments.log_dir is None else arguments.log_dir / name
            policy = _policy(ranks, arguments.servers)
            code = _train(program, policy, records / name, stand_ins, log_dir)
            if code != 0:
                print_error(
                    f"gradring verify: the program failed on {who}, with exit code {code}; nothing "
                    "was compared"
                )
                return FAILED if code < 128 else code
        (one,) = trainings.read(records / "one", 1)
        is_equal, sentences = verdict(one, trainings.read(records / "ranks", size))
    for sentence in sentences:
        say(sentence)
    if is_equal is None:
        return FAILED
    return EQUAL if is_equal else DIFFERENT


def _policy(ranks: int, servers: int) -> Plain | Servers:
    hosts = [THIS_HOST] * ranks
    if servers:
        return Servers(hosts, servers, 0)
    return Plain(hosts, 0) if ranks > 1 else _Alone(hosts, 0)


def _train(
    program: Program,
    policy: Plain | Servers,
    records: Path,
    stand_ins: Mapping[str, str],
    log_dir: Path | None,
) -> int:
    """Runs the program on `ranks` ranks; returns its exit code."""
    if log_dir is not None:
        make_directory("--log-dir", log_dir)
    without = {AS_HOROVOD, AS_MWMS, WITH_STRATEGY}
    environ = {name: value for name, value in os.environ.items() if name not in without}
    environ |= {**stand_ins, VERIFY: str(records), "PYTHONHASHSEED": "0"}
    code = launch(program, policy, environ=environ, log_dir=log_dir, shown=())
    # Others can train on without a worker, and then there is nothing to compare.
    lost = policy.lost if isinstance(policy, Servers) else []
    return code or next((each.exit_code for each in lost if each.exit_code), 0)


class _Alone(Plain):
    """A single process without ``TF_CONFIG``, so that TensorFlow's strategies see no cluster."""

    def begin(self, job: Supervisor, environ: Mapping[str, str]) -> None:
        """Starts the process."""
        super(Plain, self).begin(job, environ)
        (environment,) = job.environments(environ)
        environment.pop("TF_CONFIG")
        job.start(0, environment)


def _misused(problem: str) -> int:
    print_error(f"gradring verify: {problem}")
    return 2
