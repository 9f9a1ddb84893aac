"""The rules, as values: checked when they are made, compared and shown, and nothing else."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, TypeAlias

from gradring.config.parse import shown
from gradring.config.values import check_path
from gradring.errors import ConfigError
from gradring.group.communicator import Communicator
from gradring.group.require_equal import require_equal
from gradring.updates.compression import Compression


@dataclass(frozen=True)
class AllReduce:
    """Every rank applies the sum of all ranks' gradients: all do what one process would do.

    Attributes:
        compression: None (default): gradients travel as they are. `Int8`, `Bits16`, `TopK` or
            `PowerSGD`: those of variables of two or more dimensions travel in fewer bytes, and what
            is lost is added to the next ones.
        sync_every: After how many steps the ranks reduce, and the optimizer moves the variables.
            The steps before add up their gradients in memory, so that ``sync_every=k`` does what
            batches of k times the size would do. Default 1.

    Raises:
        gradring.errors.ConfigError: `compression` is something else, or `sync_every` is below 1.

    Examples:
        >>> rule = gradring.updates.AllReduce(sync_every=2)
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     weight, optimizer = tf.Variable(0.0), keras.optimizers.SGD(1.0)
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, weight)])
        >>> for step in range(2):
        ...     strategy.run(replica_step, args=(tf.constant(1.0 + rank),))
        ...     print(weight.numpy())
        0.0
        -3.0
    """

    compression: Compression | None = None
    sync_every: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.compression, Compression | None):
            raise _wrong(self, "compression", "is none of gradring.updates; correct it")
        _check_count(self, "sync_every")


@dataclass(frozen=True)
class Primary:
    """The chief, which is rank 0, applies the sum of all gradients, and sends all its variables.

    So the variables have the same bits everywhere, whatever a rank's processor or libraries
    compute, and only the chief's optimizer has a state.

    Attributes:
        sync_every: As for `AllReduce`.

    Raises:
        gradring.errors.ConfigError: `sync_every` is below 1.

    Examples:
        >>> rule = gradring.updates.Primary()
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     weight, optimizer = tf.Variable([0.0]), keras.optimizers.SGD(1.0, momentum=0.5)
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, weight)])
        >>> strategy.run(replica_step, args=(tf.constant([1.0 + rank]),))
        >>> own = [float(weight[0]), float(optimizer.momentums[0][0])]
        >>> gradring.tensorflow.all_gather(tf.constant([own])).numpy()  # rank 1 has no momentum
        array([[-3., -3.],
               [-3.,  0.]], dtype=float32)
    """

    sync_every: int = 1

    def __post_init__(self) -> None:
        _check_count(self, "sync_every")


@dataclass(frozen=True)
class Nesterov:
    """An outer step: what all ranks have moved together is taken as a gradient (DiLoCo).

    See A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv 2311.08105.

    Attributes:
        learning_rate: Of the outer step, above 0; default 0.7.
        momentum: Nesterov's, from 0 to below 1; default 0.9. Rounds of less than 16 steps need
            less, such as 0.3.

    Raises:
        gradring.errors.ConfigError: One of them is something else.

    Examples:
        >>> outer = gradring.updates.Nesterov(learning_rate=1.0, momentum=0.5)
        >>> rule = gradring.updates.LocalSGD(every=1, outer=outer)
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     weight, optimizer = tf.Variable(0.0), keras.optimizers.SGD(1.0)
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, weight)])
        >>> strategy.run(replica_step, args=(tf.constant((1.0 + rank) / 2),))
        >>> weight.numpy().item()  # the mean has moved by 1.5, and momentum adds half of that
        -2.25
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_number(self, "learning_rate", lambda rate: rate > 0, "above 0")
        _check_number(self, "momentum", lambda momentum: 0 <= momentum < 1, "from 0 to below 1")


@dataclass(frozen=True)
class LocalSGD:
    """Each rank applies its own gradients; after some steps, the ranks average their variables.

    Attributes:
        every: The steps of a round, at the end of which they do; default 16.
        outer: None (default): the mean replaces the variables. `Nesterov`: it is where an outer
            optimizer steps to, from the variables that the round began with.

    Raises:
        gradring.errors.ConfigError: `every` is below 1, or `outer` is something else.

    Examples:
        >>> rule = gradring.updates.LocalSGD(every=2)
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     weight, optimizer = tf.Variable(0.0), keras.optimizers.SGD(1.0)
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, weight)])
        >>> for step in range(2):
        ...     strategy.run(replica_step, args=(tf.constant((1.0 + rank) / 2),))
        ...     print(weight.numpy())  # rank 1 has -2 and -3
        -1.0
        -3.0
    """

    every: int = 16
    outer: Nesterov | None = None

    def __post_init__(self) -> None:
        _check_count(self, "every")
        if not isinstance(self.outer, Nesterov | None):
            raise _wrong(self, "outer", "is neither None nor a Nesterov; correct it")


@dataclass(frozen=True)
class ParameterServer:
    """Servers keep the variables and the optimizer; workers push gradients and pull variables.

    The servers are the tasks of type ``ps`` in ``TF_CONFIG``: ``gradring run -np 3 --ps 1`` starts
    one beside three workers, and all of them run the same program. Workers need only the servers,
    so one that is lost stops nobody. The variables are spread over the servers by size.

    Their *version* is 1 for the initial ones, and goes on by 1 with each update. The *staleness* of
    a gradient is by how many versions they have gone on since its worker pulled those that it was
    computed with.

    | rule | an update is | a worker goes on |
    |---|---|---|
    | ``staleness=0`` | the sum over all workers, by rank order | after the update |
    | ``staleness=0, backup=k`` | the mean without the k slowest workers | after the update |
    | ``staleness=s`` | each gradient at once | up to s gradients before the slowest |
    | ``staleness=None`` | each gradient at once | at once |
    | ``aggregate=m`` besides | the mean of m gradients, out of a queue | as without |

    See M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014;
    for bounded staleness Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous
    Parallel Parameter Server", NIPS 2013; for backup workers J. Chen et al., "Revisiting
    Distributed Synchronous SGD", arXiv 1604.00981, 2016; for compensation S. Zheng et al.,
    "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017.

    Attributes:
        staleness: 0 (default): synchronous. A number above: bounded. None: asynchronous.
        aggregate: The gradients of one update, if `staleness` is not 0; default 1.
        overflow: What becomes of a gradient when the queue is full, with twice as many as are in an
            update, or as there are workers. ``"wait"`` (default): its worker waits.
            ``"drop_oldest"``: it takes the place of the oldest. ``"drop_newest"``: it is dropped.
            While it is full and updates wait for a server, workers wait under all three.
        late: What becomes of stale gradients. ``"weight"`` (default): they count
            1 / (1 + staleness). ``"compensate"``: they are corrected by what has changed since
            (DC-ASGD). ``"drop"``: those that are staler than the bound, or than the number of
            workers, are dropped. Without `backup`, no gradient of ``staleness=0`` is stale.
        backup: Without how many workers, the slowest, a synchronous update goes on; default 0.
            Their gradients are in a later one, as `late` says.
        placement: Which server is to have which variables, whole: by a part of a variable's path,
            such as its layer or its name, the index of the server: ``{"embedding": 1}``. What is
            made in a block of ``tf.device("/job:ps/task:1")`` in the scope of the strategy needs
            none.
        snapshots: A directory for the servers' snapshots, in which each server makes its own, and
            from which they go on when a server, or a job that was killed, is started again. A job
            that has ended well leaves them under another name, and the next one begins anew. None
            (default): they go on from a worker's variables; the optimizer begins anew.
        snapshot_every: Updates between two snapshots; default 100.
        replicas: On how many further servers each part of the variables is kept, by the same
            updates; default 0; fewer than there are servers, and not with ``late="compensate"``.
            With k, any k servers may be lost at a time: started again, each takes its parts from
            another, and what only they had applied, workers push again. Each server has the memory
            and the arithmetic of 1 + k parts, and gradients travel once for each copy.
        worker_timeout: For how many seconds servers wait for a lost worker to come back when all
            others have left; default 60. Until then, nobody else waits for it.

    Raises:
        gradring.errors.ConfigError: One of them is something else, or does not go with another. Too
            few servers for `replicas` are known when the strategy is made.

    Examples:
        >>> rule = gradring.updates.ParameterServer(staleness=None, aggregate=2)
        >>> rule.is_synchronous, rule.is_sum, rule.texts()["combine"]
        (False, False, 'mean')
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(
        ...     update=gradring.updates.ParameterServer()  # under gradring run -np 2 --ps 1
        ... )
        >>> with strategy.scope():
        ...     weight, optimizer = tf.Variable(0.0), keras.optimizers.SGD(1.0)
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, weight)])
        >>> strategy.run(replica_step, args=(tf.constant(1.0 + rank),))
        >>> weight.numpy().item(), strategy.update_stats()["version"]
        (-3.0, 2)
        >>> strategy.leave()
    """

    staleness: int | None = 0
    aggregate: int = 1
    overflow: Literal["wait", "drop_oldest", "drop_newest"] = "wait"
    late: Literal["weight", "compensate", "drop"] = "weight"
    backup: int = 0
    placement: Mapping[str, int] = field(default_factory=dict, hash=False)
    snapshots: str | os.PathLike[str] | None = None
    snapshot_every: int = 100
    replicas: int = 0
    worker_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.staleness is not None:
            _check_count(self, "staleness", least=0)
        _check_count(self, "aggregate")
        _check_count(self, "backup", least=0)
        _check_count(self, "snapshot_every")
        _check_count(self, "replicas", least=0)
        _check_number(self, "worker_timeout", lambda it: it >= 0, "of seconds from 0 up")
        _check_word(self, "overflow", ("wait", "drop_oldest", "drop_newest"))
        _check_word(self, "late", ("weight", "compensate", "drop"))
        if self.is_synchronous and self.aggregate > 1:
            problem = "needs another staleness than 0, with which all workers are in an update"
            raise _wrong(self, "aggregate", f"{problem}; correct it")
        if self.backup and not self.is_synchronous:
            problem = "needs staleness=0, with which an update waits for workers"
            raise _wrong(self, "backup", f"{problem}; correct it")
        if self.replicas and self.late == "compensate":
            problem = 'needs another late than "compensate": copies do not know what workers pulled'
            raise _wrong(self, "replicas", f"{problem}; correct it")
        if self.snapshots is not None:
            object.__setattr__(self, "snapshots", os.fsdecode(self.snapshots))
            check_path("ParameterServer: snapshots", Path(self.snapshots))
        _check_placement(self)

    @property
    def is_synchronous(self) -> bool:
        """Whether an update is of all workers, but for `backup`."""
        return self.staleness == 0

    @property
    def is_sum(self) -> bool:
        """Whether an update is the sum of its gradients; else it is their mean."""
        return self.is_synchronous and not self.backup

    def texts(self) -> dict[str, str]:
        """What servers are told of it, by name."""
        untold = ("placement", "snapshots", "worker_timeout")
        texts = {name: str(value) for name, value in vars(self).items() if name not in untold}
        return {**texts, "combine": "sum" if self.is_sum else "mean"}


Rule: TypeAlias = AllReduce | Primary | LocalSGD | ParameterServer
"""An update rule, which a strategy is told by `update`, for annotations and `isinstance`.

Examples:
    >>> rules: dict[str, gradring.updates.Rule] = {
    ...     "fast": gradring.updates.AllReduce(),
    ...     "distant": gradring.updates.LocalSGD(every=16, outer=gradring.updates.Nesterov()),
    ... }
    >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rules["distant"])
    >>> isinstance(strategy.update_rule, gradring.updates.Rule)
    True
"""


def agree(update: object, communicator: Communicator) -> Rule:
    """The rule, if all ranks have this one; every rank must call it.

    Raises:
        gradring.errors.ConfigError: It is no rule; nothing is sent then.
        gradring.errors.MismatchError: On every rank; names the first that has another rule than
            rank 0, and both rules.

    Examples:
        >>> gradring.updates.agree(gradring.updates.LocalSGD(every=8), comm)
        LocalSGD(every=8, outer=None)
        >>> gradring.updates.agree(gradring.updates.LocalSGD(every=8 + rank), comm)
        Traceback (most recent call last):
            ...
        gradring.errors.MismatchError: rank 1 on ... has update=LocalSGD(every=9, ...
    """
    if not isinstance(update, Rule):
        raise ConfigError(
            f"update={update!r} is no update rule; pass one of gradring.updates, or leave it out"
        )
    require_equal(communicator, {"update": repr(update)}, remedy="give every rank the same rule")
    return update


def check_servers(rule: ParameterServer, servers: int) -> None:
    """Whether there are enough servers.

    Raises:
        gradring.errors.ConfigError: No two copies could be on different ones.
    """
    if rule.replicas >= servers:
        needed = rule.replicas + 1
        raise ConfigError(
            f"ParameterServer: replicas={rule.replicas} needs at least {needed} parameter "
            f"servers, and there are {servers}; start more (gradring run --ps {needed}), or "
            "correct it"
        )


def check_server(said: str, server: int, servers: int) -> None:
    """Whether there is the server that the program says. Alone and without any, there is server 0.

    Raises:
        gradring.errors.ConfigError: There is not; says how many there are.
    """
    if server >= max(1, servers):
        raise ConfigError(
            f"ParameterServer: {said} server {server}, and there are {servers}, counted from 0; "
            "correct it, or start more by --ps"
        )


def _check_count(rule: Rule, name: str, least: int = 1) -> None:
    count = getattr(rule, name)
    if not isinstance(count, Integral) or isinstance(count, bool) or count < least:
        raise _wrong(rule, name, f"is not a whole number above {least - 1}; correct it")
    # Ranks compare what rules look like, and numpy's numbers look otherwise.
    object.__setattr__(rule, name, int(count))


def _check_word(rule: Rule, name: str, words: Sequence[str]) -> None:
    if getattr(rule, name) not in words:
        raise _wrong(rule, name, f"is not one of {', '.join(words)}; correct it")


def _check_placement(rule: ParameterServer) -> None:
    placement = rule.placement
    problem = "does not name servers by number, by parts of paths; correct it"
    if not isinstance(placement, Mapping):
        raise _wrong(rule, "placement", problem)
    for path, server in placement.items():
        is_number = isinstance(server, Integral) and not isinstance(server, bool)
        if not isinstance(path, str) or not path or not is_number or server < 0:
            raise _wrong(rule, "placement", problem)
    ordered = {path: int(placement[path]) for path in sorted(placement)}
    object.__setattr__(rule, "placement", ordered)


def _check_number(
    rule: Nesterov | ParameterServer, name: str, is_right: Callable[[float], bool], what: str
) -> None:
    value = getattr(rule, name)
    if not (isinstance(value, Real) and math.isfinite(value) and is_right(float(value))):
        raise _wrong(rule, name, f"is not a number {what}; correct it")
    object.__setattr__(rule, name, float(value))


def _wrong(rule: object, name: str, problem: str) -> ConfigError:
    return ConfigError(f"{type(rule).__name__}: {name}={shown(getattr(rule, name))} {problem}")
