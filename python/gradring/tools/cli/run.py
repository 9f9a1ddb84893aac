"""``gradring run -np N -- CMD...``, on this machine and others by ssh."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradring.clusters import outer_place, without_cluster_variables
from gradring.config.parse import MAX_WORLD_SIZE, is_digits
from gradring.config.values import Settings, check_path, check_variables
from gradring.config.words import counted, listed
from gradring.launch.elastic import Elastic
from gradring.launch.first_process import in_child
from gradring.launch.hostfile import read_hosts
from gradring.launch.hosts import THIS_HOST, Host, parse_hosts, parse_port, place_ranks
from gradring.launch.input_workers import UNPROTECTED, InputWorkers
from gradring.launch.launcher import DEFAULT_GRACE_S, launch
from gradring.launch.plain import Plain
from gradring.launch.program import Program
from gradring.launch.servers import Servers
from gradring.launch.slots import HOST_FAILURES, Limits
from gradring.launch.ssh import FORWARDED_PREFIXES, Ssh
from gradring.launch.supervisor import Policy
from gradring.machine.streams import print_error
from gradring.tools.cli.arguments import (
    check_file,
    count,
    make_directory,
    option,
    seconds,
    usage,
)
from gradring_start import AS_HOROVOD, AS_MWMS, SERVERS, WITH_STRATEGY, advice_to_install

NAME = "run"
HELP = "start N ranks of a program, on this machine or on several"
EXAMPLE = "gradring run -np 2 train.py"
#: Equivalent options of torchrun, accelerate, deepspeed, horovodrun, mpirun and srun.
EQUIVALENTS = {
    "-np": (
        *("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes"),
        *("--num_gpus", "--num-proc", "--ntasks", "--ntasks-per-node"),
    ),
    "--hosts": ("--nnodes", "--num_machines", "--num_nodes", "--host", "--nodes", "--npernode"),
    "--hostfile": ("--machinefile", "--deepspeed_hostfile"),
    "--min-np": ("--min-num-proc", "--min_nodes"),
    "--max-np": ("--max-num-proc", "--max_nodes"),
    "--max-restarts": ("--max_restarts", "--reset-limit"),
    "--host-cooldown": ("--blacklist-cooldown-range",),
    "--log-dir": ("--log_dir", "--output-filename"),
    "--trace": ("--timeline-filename",),
    "-m": ("--module",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the number of ranks, the options and the command."""
    parser.usage = "gradring run [-np N] [option...] [--] COMMAND..."
    where = parser.add_argument_group("ranks and hosts")
    add, placed = partial(option, where), partial(option, where.add_mutually_exclusive_group())
    add("-np -n N", count("ranks"), dest="world_size")(
        "number of ranks (default with --hosts or --hostfile: the ranks of all hosts)"
    )
    placed("--hosts -H HOST:RANKS,...", usage(parse_hosts), default=[])(
        "hosts and their numbers of ranks, such as node-a:2,node-b:2; ssh must reach the other "
        "hosts without a password"
    )
    placed("--hostfile FILE", usage(lambda text: read_hosts(Path(text))), default=[])(
        "the same from a file; a line for each host, such as node-a slots=2 or node-a:2"
    )
    add = partial(option, parser.add_argument_group("program"))
    add("-m", dest="module")("COMMAND is a Python module, as of python -m")
    add("--as-horovod")(
        "ranks that import horovod get gradring.horovod, so that installed programs need no "
        "change (sets GRADRING_AS_HOROVOD)"
    )
    add("--as-mwms")(
        "ranks that make a tf.distribute.MultiWorkerMirroredStrategy get gradring's strategy (sets "
        "GRADRING_AS_MWMS)"
    )
    add("--with-strategy")(
        "all ranks together train the model of a program for one machine that calls Keras' fit "
        "(sets GRADRING_WITH_STRATEGY)"
    )
    add = partial(option, parser.add_argument_group("failures and restarts"))
    add("--max-restarts R", count("restarts", least=0))(
        "start all ranks again after a failure, R times at most (default 0). GRADRING_RESTART "
        "is the number of the attempt. In an elastic job: limit of restarts of single ranks "
        "(default: none)"
    )
    add("--grace SECONDS", seconds, default=DEFAULT_GRACE_S)(
        "time that the other ranks have to end after a failure (default %(default)g)"
    )
    add = partial(option, parser.add_argument_group("elastic jobs"))
    add("--min-np N", count("ranks"), dest="least")(
        "make the job elastic: a failed rank starts again alone, and the job begins with N ranks "
        "or more (default: as -np)"
    )
    add("--max-np N", count("ranks"), dest="most")(
        "make the job elastic: up to N ranks run when there is room (default: as -np)"
    )
    add("--host-discovery-script FILE", usage(_program), dest="host_script")(
        "make the job elastic: FILE is a program that prints the available hosts, such as "
        "node-a:2, one on each line; it is run every second"
    )
    add("--host-failures N", count("failures", least=0), default=HOST_FAILURES)(
        "in an elastic job: give up a host after N failures of a rank in a row (default "
        "%(default)d; 0: never)"
    )
    add("--host-cooldown SECONDS", seconds)(
        "in an elastic job: time for which a host is given up; it doubles each time (default: for "
        "good)"
    )
    add = partial(option, parser.add_argument_group("parameter servers and input"))
    add("--ps N", count("parameter servers"), default=0, dest="servers")(
        "start N parameter servers beside the ranks: tasks of type ps that run the same program. A "
        "failed rank then does not end the others, and --max-restarts counts restarts of single "
        "processes"
    )
    add("--input-workers K", count("input workers"), default=0)(
        "start tf.data service with the job: a dispatcher, and K workers on the hosts in turn that "
        "read data for the ranks. Programs use it by "
        "gradring.tensorflow.distribute_input(dataset, strategy)"
    )
    add("--input-unprotected")(
        "allow --input-workers with several hosts, or with GRADRING_REQUIRE_AUTH, although "
        "tf.data service has neither authentication nor encryption"
    )
    add = partial(option, parser.add_argument_group("output and input of ranks"))
    add("--log-dir DIR", Path)(
        "also write each rank's output to DIR/rank-0.log and so on, and the steps of a "
        "gradring.Monitor to DIR/steps.jsonl. When the group fails, write the flight records to "
        "DIR/flight"
    )
    add("--output-rank RANK,...", usage(_ranks), dest="shown")(
        "show the output of these ranks only, such as 0 (default: all). The report of a failure "
        "can be of any rank, and --log-dir keeps the output of all"
    )
    add("--stdin RANK", usage(_rank), dest="reader")(
        "the rank that reads the standard input of this command, as for breakpoint(); it must run "
        "on this machine (default: 0 with -np 1, else none)"
    )
    add("--trace FILE", Path)(
        "write a timeline of all ranks' collectives, to open at ui.perfetto.dev"
    )
    add = partial(option, parser.add_argument_group("ranks on other hosts, by ssh"))
    add("-x NAME[=VALUE]", action="append", default=[], dest="forward")(
        f"a variable for ranks on other hosts; {listed(f'{it}*' for it in FORWARDED_PREFIXES)} "
        "are always sent"
    )
    add("--python PATH", default=sys.executable)(
        "the interpreter on other hosts (default: the path of this one)"
    )
    add("--ssh-port PORT", usage(lambda text: parse_port(text, "port")))(
        "of the ssh servers (default: from ssh's configuration, or 22)"
    )
    add("--ssh-identity-file FILE", usage(_existing_file))(
        "the private key for ssh (default: ssh's own)"
    )
    add("--ssh-option NAME=VALUE", action="append", default=[], dest="ssh_options")(
        "an option for ssh, as of ssh -o, such as ProxyJump=gateway"
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="a Python script, such as train.py, or any program; then its arguments. A script runs "
        "under the interpreter of gradring",
    )


def run(arguments: argparse.Namespace) -> int:
    """Launches the ranks; returns 0, or the exit code of the rank that failed first."""
    command: list[str] = arguments.program
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        return _misused("there is no command; type: gradring run -np 2 train.py")
    hosts: list[Host] = arguments.hosts or arguments.hostfile
    room = sum(host.slots for host in hosts)
    world_size = arguments.world_size or room
    if not world_size:
        if {"-n", "-np"}.intersection(command):
            return _misused("-np is behind the command; type: gradring run -np 2 train.py")
        return _misused("the number of ranks is missing; give -np N, --hosts or --hostfile")
    if room and world_size > room and arguments.host_script is None:
        source = "--hosts" if arguments.hosts else "--hostfile"
        return _misused(f"-np {world_size} is more than the {counted(room, 'rank')} of {source}")
    least, most = arguments.least or world_size, arguments.most or world_size
    if not least <= world_size <= most:
        return _misused(
            f"--min-np {least}, -np {world_size} and --max-np {most} must grow in this order"
        )
    if most > MAX_WORLD_SIZE:
        return _misused(f"{most} ranks are too many; a group has at most {MAX_WORLD_SIZE}")
    reader, shown = arguments.reader, arguments.shown
    for name, rank in ("--stdin", reader or 0), ("--output-rank", max(shown or [0])):
        if rank >= most:
            return _misused(f"{name} {rank}: ranks run from 0 to {most - 1}")
    options = (arguments.least, arguments.most, arguments.host_script)
    is_elastic = options != (None,) * 3
    if arguments.servers and is_elastic:
        return _misused(
            "--ps goes without --min-np, --max-np and --host-discovery-script: ranks with "
            "parameter servers need no others, and start again by --max-restarts"
        )
    if reader is not None and is_elastic:
        return _misused(
            "--stdin goes without --min-np, --max-np and --host-discovery-script: ranks of an "
            "elastic job may move to other machines"
        )
    if not is_elastic:
        for name, value in (
            ("--host-failures", arguments.host_failures != HOST_FAILURES),
            ("--host-cooldown", arguments.host_cooldown is not None),
        ):
            if value:
                return _misused(
                    f"{name} is for an elastic job; give --min-np, --max-np or "
                    "--host-discovery-script too, or omit it"
                )
    if arguments.input_unprotected and not arguments.input_workers:
        return _misused(f"{UNPROTECTED} is for --input-workers K; give both, or none")
    chosen = {
        AS_HOROVOD: arguments.as_horovod,
        AS_MWMS: arguments.as_mwms,
        WITH_STRATEGY: arguments.with_strategy,
    }
    stand_ins = {variable: "1" for variable, is_chosen in chosen.items() if is_chosen}
    if stand_ins and (advice := advice_to_install()) is not None:
        return _misused(advice)
    hash_seed = _hash_seed() if arguments.with_strategy else {}
    given = dict(entry.split("=", 1) for entry in arguments.forward if "=" in entry)
    is_own = not hosts or any(host.is_local for host in hosts)
    own = without_cluster_variables(os.environ)  # as the ranks get them
    check_variables(own, is_own=is_own and arguments.host_script is None)
    check_variables(given, is_own=False)
    if arguments.servers:
        stand_ins[SERVERS] = "1"
    if arguments.log_dir is not None:
        check_path("--log-dir", arguments.log_dir.absolute())
        make_directory("--log-dir", arguments.log_dir)
    if arguments.trace is not None:
        check_path("--trace", arguments.trace.absolute())
        check_file("--trace", arguments.trace)
    _warn_of_outer_launcher(world_size)
    _warn_of_unset(arguments.forward)
    if not hosts and arguments.host_script is None:
        hosts = [replace(THIS_HOST, slots=world_size)]
    policy: Policy
    if is_elastic:
        limits = Limits(
            world_size,
            least,
            most,
            start_s=Settings.from_environ(os.environ).timeout,
            restarts=arguments.max_restarts,
            host_failures=arguments.host_failures,
            cooldown_s=arguments.host_cooldown,
        )
        policy = Elastic(limits, hosts, arguments.host_script)
    else:
        ranks, restarts = place_ranks(hosts, world_size), arguments.max_restarts or 0
        if reader is not None and not ranks[reader].is_local:
            return _misused(
                f"--stdin {reader}: rank {reader} runs on {ranks[reader].name}, and only a rank on "
                "this machine reads the standard input of gradring run"
            )
        servers = arguments.servers
        policy = Servers(ranks, servers, restarts) if servers else Plain(ranks, restarts)
    if arguments.input_workers:
        served = InputWorkers(policy, arguments.input_workers, hosts)
        served.check(os.environ, unprotected=arguments.input_unprotected)
        policy = served
    start = partial(
        launch,
        Program(command, arguments.module),
        policy,
        environ={**os.environ, **stand_ins, **hash_seed},
        log_dir=arguments.log_dir,
        grace_s=arguments.grace,
        ssh=_ssh(arguments),
        forward=[*arguments.forward, *hash_seed],
        trace=arguments.trace,
        reader=0 if most == 1 else reader,
        shown=shown,
    )
    try:
        return in_child(start)
    except OSError as error:
        print_error(f"gradring run: the ranks cannot be started: {error}")
        return 1


def _ssh(arguments: argparse.Namespace) -> Ssh:
    identity = arguments.ssh_identity_file
    options = [word for setting in arguments.ssh_options for word in ("-o", setting)]
    if identity is not None:
        options += ["-i", str(identity)]
    return Ssh(arguments.python, arguments.ssh_port, tuple(options))


def _hash_seed() -> dict[str, str]:
    """Returns one hash seed for all ranks, since programs for one process can iterate over sets."""
    name = "PYTHONHASHSEED"
    return {name: os.environ.get(name) or str(secrets.randbelow(2**32))}


def _warn_of_outer_launcher(world_size: int) -> None:
    """Warns of several groups, as in ``srun gradring run``; nested launchers are allowed."""
    outer = outer_place(os.environ)
    if outer is not None:
        source, place = outer
        print_error(
            f"gradring run: this is {place} ({source}), and each of them starts a group of its own "
            f"with {counted(world_size, 'rank')}; to make them one group, leave out gradring run"
        )


def _warn_of_unset(forward: Sequence[str]) -> None:
    """Warns of variables in -x that are not set, for example because they are not exported."""
    for entry in forward:
        if "=" not in entry and entry not in os.environ:
            print_error(
                f"gradring run: -x {entry}: this variable is not set here, so no rank gets it; "
                f"export it, or give -x {entry}=VALUE"
            )


def _misused(problem: str) -> int:
    print_error(f"gradring run: {problem}")
    return 2


def _program(text: str) -> Path:
    path = _existing_file(text)
    if not os.access(path, os.X_OK):
        raise ValueError(f"{text!r} cannot be executed; type: chmod +x {shlex.quote(text)}")
    return path


def _rank(text: str) -> int:
    if not is_digits(text):
        raise ValueError(f"{text!r} is no rank; give a number such as 0")
    return int(text)


def _ranks(text: str) -> list[int]:
    return [_rank(word) for word in text.split(",")]


def _existing_file(text: str) -> Path:
    # Unlike methods of a Path, functions of os.path raise no errors.
    path = Path(os.path.expanduser(text)).absolute()
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {text!r} that can be read")
    return path
