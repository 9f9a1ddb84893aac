"""Maker of the `Updates` of a rule of `gradring.updates`."""

from __future__ import annotations

from gradring import updates
from gradring.errors import ConfigError
from gradring.gradients.checks import CheckGradients, Embeddings
from gradring.group.communicator import Communicator
from gradring.tensorflow.cluster.tasks import Served
from gradring.tensorflow.graph.start_wait import ALL_TO_ALL_RANKS_MAX
from gradring.tensorflow.rules.accumulation import AccumulatedUpdates
from gradring.tensorflow.rules.compression.compressed import CompressedUpdates
from gradring.tensorflow.rules.local import LocalUpdates
from gradring.tensorflow.rules.parameter_server import PushedUpdates
from gradring.tensorflow.rules.primary import PrimaryUpdates
from gradring.tensorflow.rules.updates import Updates


def make(
    rule: updates.Rule,
    communicator: Communicator,
    bucket_bytes: int,
    check_gradients: CheckGradients | None,
    devices: int,
    served: Served | None = None,
    embeddings: Embeddings = "rows",
) -> Updates:
    """Returns the `Updates` of a rule, for the arguments of a strategy.

    Args:
        rule: The update rule.
        communicator: The strategy's group.
        bucket_bytes: Argument of the strategy.
        check_gradients: Argument of the strategy.
        devices: Number of local devices.
        served: This process and its parameter servers; needed by `ParameterServer`.
        embeddings: Argument of the strategy.

    Raises:
        gradring.errors.ConfigError: The rule cannot be combined with these arguments.
    """
    if check_gradients is not None and devices > 1:
        raise ConfigError(
            f"check_gradients={check_gradients!r} on rank {communicator.rank} of "
            f"{communicator.host}, which has {devices} local devices: only gradients of one are "
            "checked; start one process for each"
        )
    if rule == updates.AllReduce():
        return Updates()
    if devices > 1:
        raise ConfigError(
            f"update={rule} on rank {communicator.rank} of {communicator.host}, which has "
            f"{devices} local devices: only AllReduce() trains several; start one process for each"
        )
    reduces = not isinstance(rule, updates.LocalSGD | updates.ParameterServer)
    if check_gradients is not None and not reduces:
        raise ConfigError(
            f"check_gradients={check_gradients!r} looks at gradients that are reduced, and "
            f"update={rule} reduces none; leave one of them out"
        )
    if isinstance(rule, updates.ParameterServer):
        assert served is not None, "a strategy knows who serves"
        return PushedUpdates(rule, served)
    if isinstance(rule, updates.LocalSGD):
        return LocalUpdates(rule, communicator, bucket_bytes)
    inner: Updates
    match rule:
        case updates.AllReduce():
            inner = Updates()
        case updates.Primary():
            inner = PrimaryUpdates(communicator)
        case updates.Sharded():
            # It checks names of TensorFlow that the other rules do not need.
            from gradring.tensorflow.rules.sharded import ShardedUpdates

            inner = ShardedUpdates(communicator, bucket_bytes, check_gradients, embeddings)
    if isinstance(rule, updates.AllReduce) and rule.compression is not None:
        if check_gradients is not None:
            raise ConfigError(
                f"check_gradients={check_gradients!r} looks at gradients that travel as they are, "
                f"and update={rule} sends others; leave one of them out"
            )
        by_owners = isinstance(rule.compression, updates.Int8 | updates.Bits16)
        if by_owners and communicator.world_size > ALL_TO_ALL_RANKS_MAX:
            raise ConfigError(
                f"update={rule} on rank {communicator.rank} of {communicator.host}: parts of "
                f"gradients go from each rank to each, which at most {ALL_TO_ALL_RANKS_MAX} ranks "
                f"can do, and these are {communicator.world_size}; use TopK or PowerSGD, or "
                "init(wire_dtype=...)"
            )
        inner = CompressedUpdates(rule.compression, communicator, bucket_bytes, embeddings)
    return inner if rule.sync_every == 1 else AccumulatedUpdates(rule.sync_every, inner)
