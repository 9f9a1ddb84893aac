"""Update rules as values: checked when they are made, compared, and shown."""

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
    """Every rank applies the sum of all ranks' gradients, as one process would.

    Attributes:
        compression: None (default): gradients are sent uncompressed. `Int8`, `Bits16`, `TopK` or
            `PowerSGD`: gradients of variables of two or more dimensions are sent in fewer bytes,
            and the lost part is added to the next gradients.
        sync_every: Number of steps after which the ranks reduce, and the optimizer updates the
            variables. The steps before add their gradients up in memory, so ``sync_every=k`` has
            the effect of batches k times as large. Default 1.

    Raises:
        gradring.errors.ConfigError: `compression` has another value, or `sync_every` is below 1.

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
    """The chief (rank 0) applies the sum of all gradients, and sends its variables to all.

    So the variables have the same bits on all ranks, even if their processors or libraries differ.
    Only the chief's optimizer has a state.

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
class Sharded:
    """Each rank updates its part of the variables, and all ranks gather the variables.

    A rank holds the optimizer's state for its part only, and updates only this part. So with N
    ranks, state takes 1/N of the memory, and the update 1/N of the time. A reduce-scatter and an
    all-gather send as many bytes as the all-reduce of `AllReduce`. Ranks have the same variables
    after each step.

    The optimizer must be one of Keras 3 that updates each element by itself. These are SGD,
    RMSprop, Adam, AdamW, Adadelta, Adagrad, Adamax, Nadam, Ftrl and Lion, and classes that inherit
    `update_step` from one of them. Clipping, weight decay, averages of weights, loss scaling and
    accumulation have the effect that they have in one process.

    Files have the whole state, so any number of ranks, and one process, can restore them. All ranks
    must save together, such as by `gradring.tensorflow.save`. After a save, each rank holds the
    whole state until the next step.

    See S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020, stage 1.

    Attributes:
        sync_every: As for `AllReduce`.

    Raises:
        gradring.errors.ConfigError: `sync_every` is below 1. Another optimizer is noticed when it
            is built.

    Examples:
        >>> rule = gradring.updates.Sharded()
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     weight, optimizer = tf.Variable(tf.zeros([32])), keras.optimizers.SGD(1.0, 0.5)
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, weight)])
        >>> strategy.run(replica_step, args=(tf.fill([32], 1.0 + rank),))
        >>> weight[0].numpy().item(), optimizer.momentums[0].numpy().shape
        (-3.0, (16,))
    """

    sync_every: int = 1

    def __post_init__(self) -> None:
        _check_count(self, "sync_every")


@dataclass(frozen=True)
class Nesterov:
    """An outer step: the mean movement of all ranks is taken as a gradient (DiLoCo).

    See A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv 2311.08105.

    Attributes:
        learning_rate: Learning rate of the outer step, above 0; default 0.7.
        momentum: Nesterov momentum, from 0 to below 1; default 0.9. Rounds of less than 16 steps
            need less, such as 0.3.

    Raises:
        gradring.errors.ConfigError: An argument has another value.

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
    """Each rank applies its own gradients; after each round, ranks average their variables.

    Attributes:
        every: Number of steps of a round; default 16.
        outer: None (default): the mean replaces the variables. `Nesterov`: an outer optimizer takes
            a step from the variables of the beginning of the round towards the mean.

    Raises:
        gradring.errors.ConfigError: `every` is below 1, or `outer` has another value.

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
    one beside three workers, and all of them run the same program. Workers connect only to servers,
    so a lost worker stops no other. The variables are distributed over the servers by size.

    Servers know SGD, RMSprop, Adam, AdamW, Adadelta, Adagrad, Adamax, Nadam, Ftrl and Lion of Keras
    3, and no classes that inherit from one of them.

    The *version* of the variables is 1 at first, and grows by 1 with each update. The *staleness*
    of a gradient is the number of updates since its worker pulled the variables that it was
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
        aggregate: Number of gradients in one update, if `staleness` is not 0; default 1.
        overflow: Treatment of a gradient when the queue is full: when it has twice the gradients of
            an update, or twice the number of workers. ``"wait"`` (default): its worker waits.
            ``"drop_oldest"``: it replaces the oldest. ``"drop_newest"``: it is dropped. While the
            queue is full and updates wait for a server, workers wait under all three.
        late: Treatment of stale gradients. ``"weight"`` (default): they count 1 / (1 + staleness).
            ``"compensate"``: they are corrected by the change of the variables since (DC-ASGD).
            ``"drop"``: gradients staler than the bound, or than the number of workers, are dropped.
            Without `backup`, no gradient of ``staleness=0`` is stale.
        backup: Number of slowest workers that a synchronous update does not wait for; default 0.
            Their gradients are in a later one, as `late` says.
        placement: Servers for whole variables: a part of a variable's path, such as its layer or
            its name, mapped to the index of the server: ``{"embedding": 1}``. Variables made in a
            block of ``tf.device("/job:ps/task:1")`` in the scope of the strategy need no entry.
        snapshots: Directory for snapshots, in which each server creates its own directory. A
            restarted server or a restarted job continues from them. When a job ends well, its
            snapshots are renamed, and the next job starts from nothing. None (default): servers
            continue from a worker's variables, without the optimizer's state.
        snapshot_every: Number of updates between two snapshots; default 100.
        replicas: Number of further servers that keep each part of the variables, by the same
            updates; default 0. It must be below the number of servers, and excludes
            ``late="compensate"``. Up to k servers may be lost at a time with k replicas. A
            restarted server takes its parts from another one, and workers push again the gradients
            that only lost servers had applied. Each server needs memory and arithmetic for 1 + k
            parts, and each gradient is sent to 1 + k servers.
        worker_timeout: Seconds for which servers wait for a lost worker to return when all others
            have left; default 60. Other workers do not wait for it at all.

    Raises:
        gradring.errors.ConfigError: An argument has another value, or contradicts another argument.
            Too few servers for `replicas` are noticed when the strategy is made.

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
        """True if an update has the gradients of all workers, except for `backup`."""
        return self.staleness == 0

    @property
    def is_sum(self) -> bool:
        """True if an update is the sum of its gradients; False if it is their mean."""
        return self.is_synchronous and not self.backup

    def texts(self) -> dict[str, str]:
        """Returns the arguments that servers need, as texts by name."""
        untold = ("placement", "snapshots", "worker_timeout")
        texts = {name: str(value) for name, value in vars(self).items() if name not in untold}
        return {**texts, "combine": "sum" if self.is_sum else "mean"}


Rule: TypeAlias = AllReduce | Primary | Sharded | LocalSGD | ParameterServer
"""An update rule, a strategy's argument `update`, for annotations and `isinstance`.

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
    """Returns the rule if all ranks have an equal one; every rank must call it.

    Args:
        update: The rule, such as `AllReduce()`.
        communicator: The group whose ranks are compared.

    Raises:
        gradring.errors.ConfigError: ``update`` is no rule; in this case nothing is sent.
        gradring.errors.MismatchError: Rules differ; raised on every rank. It names the first rank
            with another rule than rank 0, and both rules.

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
    """Checks that there are enough servers for the copies.

    Raises:
        gradring.errors.ConfigError: Copies of a part could not all be on different servers.
    """
    if rule.replicas >= servers:
        needed = rule.replicas + 1
        raise ConfigError(
            f"ParameterServer: replicas={rule.replicas} needs at least {needed} parameter "
            f"servers, and there are {servers}; start more (gradring run --ps {needed}), or "
            "correct it"
        )


def check_server(said: str, server: int, servers: int) -> None:
    """Checks that a server exists. A process alone, without any servers, has server 0.

    Raises:
        gradring.errors.ConfigError: The server does not exist; the message has the number of
            servers.
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
    # Ranks compare the texts of rules, in which numpy's numbers look different.
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
