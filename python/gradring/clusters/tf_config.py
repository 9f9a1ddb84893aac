"""``TF_CONFIG``, as TensorFlow's own multi-worker strategies read it.

The chief and then the workers by index are the ranks. An evaluator is a single rank beside the
group, which does not know of it. A parameter server is in no group, so it has no place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradring.clusters.cluster import ALONE_RENDEZVOUS, Cluster, Environment
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

VARIABLE = "TF_CONFIG"
TRAINING_JOBS = ("chief", "worker")
SERVER, EVALUATOR = "ps", "evaluator"
BYSTANDERS = (SERVER, EVALUATOR)


@dataclass(frozen=True)
class _Task:
    """A task of the cluster."""

    job: str
    index: int
    address: str

    @property
    def field(self) -> str:
        return f"cluster.{self.job}[{self.index}]"


@dataclass(frozen=True)
class Servers:
    """Parameter servers.

    Attributes:
        addresses: ``host:port`` of each.
        own: Index of this process among them; None for any other process.
        workers: Number of chief and worker tasks that they serve.
    """

    addresses: tuple[str, ...]
    own: int | None
    workers: int


def place(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of ``task`` among chief and workers; an evaluator is a single rank."""
    text = environ.get(VARIABLE)
    if text is None:
        return None
    tasks, own = _read(text)
    if own.job == SERVER:
        raise ConfigError(
            f"TF_CONFIG names this process ps {own.index}, and a parameter server is in no group: "
            "it serves when a CustomCollectiveStrategy(update=updates.ParameterServer(...)) is made"
        )
    return Place(0, 1) if own.job == EVALUATOR else Place(tasks.index(own), len(tasks))


def servers_in(environ: Mapping[str, str]) -> Servers:
    """Returns the parameter servers of ``cluster``, and the index of this process among them."""
    text = parse.value(environ, VARIABLE)
    if text is None:
        return Servers((), None, 0)
    tasks, own = _read(text)
    listed = _servers(json.loads(text)["cluster"])
    addresses = tuple(task.address for task in listed)
    return Servers(addresses, own.index if own.job == SERVER else None, len(tasks))


def rendezvous(environ: Mapping[str, str]) -> str | None:
    """Returns the address of rank 0 in ``cluster``, or None without ``TF_CONFIG``."""
    text = parse.value(environ, VARIABLE)
    return None if text is None else _read(text)[0][0].address


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """Returns the cluster with the addresses of ``TF_CONFIG``."""
    tasks, own = _read(environ[VARIABLE])
    if own.job == EVALUATOR:
        return Cluster(0, 1, ALONE_RENDEZVOUS, None, ENVIRONMENT.source, _beside(own))
    moved = parse.given_rendezvous(environ)
    addresses = tuple(task.address for task in tasks)
    # In an elastic job, a later process may have other addresses in its TF_CONFIG.
    is_elastic = parse.value(environ, parse.JOIN) is not None
    return Cluster(
        place.rank,
        place.world_size,
        moved or tasks[0].address,
        None if moved and place.rank == 0 else own.address,
        ENVIRONMENT.source,
        f"TF_CONFIG names this process {own.job} {own.index} "
        f"among {place.world_size} chief and worker tasks.",
        addresses=addresses,
        job_id=None if is_elastic else job_id_of(addresses),
    )


ENVIRONMENT = Environment(VARIABLE, (VARIABLE,), place, join)


def job_id_of(addresses: Sequence[str]) -> str:
    """Returns a job's name from its addresses in rank order; another job has other addresses."""
    return f"{VARIABLE} {','.join(addresses)}"


def _beside(evaluator: _Task) -> str:
    return (
        f"TF_CONFIG names this process evaluator {evaluator.index}: a world of one, for which the "
        "chief and the workers do not wait."
    )


def _read(text: str) -> tuple[list[_Task], _Task]:
    """Returns all tasks in rank order, and the task of this process."""
    if not text.strip():
        raise _wrong("it", "is empty")
    try:
        config = json.loads(text, object_pairs_hook=_without_repetition)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise _wrong("it", f"is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise _wrong("it", 'is not an object with the fields "cluster" and "task"')
    cluster = _object(config, "cluster")
    tasks = _cluster(cluster)
    return tasks, _own(_object(config, "task"), tasks, cluster)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs; json would silently keep the last of equal keys."""
    found: dict[str, Any] = {}
    for key, entry in pairs:
        if key in found:
            raise _wrong(f"the key {parse.shown(key)}", "occurs twice in one object")
        found[key] = entry
    return found


def _object(config: dict[str, Any], field: str) -> dict[str, Any]:
    found = config.get(field)
    if found is None:
        raise _wrong(field, "is missing; without it this process would train alone")
    if not isinstance(found, dict) or not found:
        raise _wrong(field, "is not an object with at least one entry")
    return found


def _cluster(cluster: dict[str, Any]) -> list[_Task]:
    for job in cluster:
        if job not in TRAINING_JOBS + BYSTANDERS:
            known = ", ".join(TRAINING_JOBS + BYSTANDERS)
            raise _wrong(f"cluster.{job}", f"is not a known job; known are {known}")
    tasks = [task for job in TRAINING_JOBS if job in cluster for task in _tasks(job, cluster[job])]
    if not tasks:
        raise _wrong("cluster", "has neither a chief nor a worker")
    if sum(task.job == "chief" for task in tasks) > 1:
        raise _wrong("cluster.chief", "has more than one address")
    seen: dict[str, _Task] = {}
    for task in tasks:
        if task.address in seen:
            raise _wrong(task.field, f"has the address of {seen[task.address].field}")
        seen[task.address] = task
    return tasks


def _servers(cluster: dict[str, Any]) -> list[_Task]:
    return _tasks(SERVER, cluster.get(SERVER, []))


def _tasks(job: str, entries: object) -> list[_Task]:
    """Returns the tasks of one job, from a list of addresses or an object from index to address.

    An object with gaps describes a part of the cluster, as TensorFlow allows for parameter servers.
    It does not give the rank.

    Raises:
        ConfigError: The entries are neither, or name an index twice or out of range.
    """  # noqa: DOC501 (_wrong makes a ConfigError)
    if isinstance(entries, list):
        numbered: dict[int, object] = dict(enumerate(entries))
    elif isinstance(entries, dict):
        numbered = {_index(key, f"cluster.{job}"): entry for key, entry in entries.items()}
        if len(numbered) < len(entries):
            raise _wrong(f"cluster.{job}", "names one index twice")
    else:
        raise _wrong(f"cluster.{job}", "is neither a list of addresses nor an object")
    for index in range(len(numbered)):
        if index not in numbered:
            last = max(numbered)
            raise _wrong(f"cluster.{job}[{index}]", f"is missing, but there is an index {last}")
    return [
        _Task(job, index, parse.address(numbered[index], f"TF_CONFIG: cluster.{job}[{index}]"))
        for index in range(len(numbered))
    ]


def _own(task: dict[str, Any], tasks: list[_Task], cluster: dict[str, Any]) -> _Task:
    job = task.get("type")
    if job not in TRAINING_JOBS + BYSTANDERS:
        raise _wrong("task.type", f"is {job!r} but must be 'chief', 'worker', 'ps' or 'evaluator'")
    if "index" not in task:
        raise _wrong("task.index", "is missing")
    index = _index(task["index"], "task.index")
    if job == EVALUATOR:
        return _Task(job, index, "")  # no rank connects to it, and the cluster need not list it
    candidates = _servers(cluster) if job == SERVER else tasks
    for candidate in candidates:
        if (candidate.job, candidate.index) == (job, index):
            return candidate
    listed = ", ".join(f"{task.job} {task.index}" for task in candidates) or "no such task"
    raise _wrong("task", f"is {job} {index}, which is not in the cluster ({listed})")


def _index(found: object, field: str) -> int:
    """Returns an index, which some launchers write as a string."""
    if isinstance(found, str):
        # Python refuses to read, and to print, numbers of thousands of digits.
        if parse.is_digits(found) and len(found) <= parse.MAX_DIGITS:
            return int(found)
        found = found[: parse.MAX_DIGITS]
    if isinstance(found, int) and not isinstance(found, bool) and found >= 0:
        return found
    raise _wrong(field, f"has the index {found!r}, which is not a whole number")


def _wrong(field: str, problem: str) -> ConfigError:
    return ConfigError(f"TF_CONFIG: {field} {problem}; correct TF_CONFIG or unset it")
