"""Distributed optimizers under `gradring.updates.Sharded`: each rank holds a part of the state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.errors import ConfigError, MismatchError
from gradring.gradients.buckets import DEFAULT_BUCKET_BYTES
from gradring.gradients.names import name_of, with_gaps
from gradring.gradients.replicas import check_equal
from gradring.horovod.process_sets import communicator_of
from gradring.horovod.tensorflow.calls import require_equal_calls
from gradring.horovod.tensorflow.compression import Compression
from gradring.horovod.tensorflow.gradients import Gradient, Options
from gradring.tensorflow.graph.adoption import strategy_of
from gradring.tensorflow.graph.model_variables import optimizer_variables
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.keras import compat_keras
from gradring.tensorflow.replicas import contents
from gradring.tensorflow.rules import updates
from gradring.tensorflow.rules.optimizer_parts import Parts
from gradring.updates import AllReduce, Rule, Sharded

#: The default of `update=`.
ALL_REDUCE = AllReduce()
#: The only other rule of distributed optimizers.
SHARDED = Sharded()


def check_rule(optimizer: Any, update: Rule, options: Options) -> None:
    """Refuses an update rule that the optimizer or another option does not support.

    Raises:
        gradring.errors.ConfigError: The rule is unknown, or contradicts an option.
        NotImplementedError: The optimizer is not of Keras 3.
    """
    if update == ALL_REDUCE:
        return
    kind, of_rule = type(optimizer).__name__, f"DistributedOptimizer: update={update}"
    if update != SHARDED:
        raise ConfigError(
            f"{of_rule} is none of AllReduce() and Sharded(), of gradring.updates and without "
            "arguments; pass one of them, or give another rule to CustomCollectiveStrategy"
        )
    if not hasattr(type(optimizer), "apply"):
        raise NotImplementedError(
            f"{of_rule} needs an optimizer of Keras 3, and {kind} is none; leave out update="
        )
    if updates.is_wrapper(optimizer):
        raise ConfigError(
            f"{of_rule} divides the state of an optimizer inside of a {kind}; distribute each of "
            f"those that {kind} has: hvd.DistributedOptimizer(optimizer, update=Sharded())"
        )
    if options.process_set.ranks is not None:
        raise ConfigError(
            f"{of_rule} divides the state among all ranks, and process_set={options.process_set} "
            "has some; leave out one of them"
        )
    if options.compression is not Compression.none:
        raise ConfigError(
            f"{of_rule} does not take compression=; leave out one of them, or use "
            'gradring.init(wire_dtype="bfloat16")'
        )


def make_rule(options: Options) -> updates.Updates:
    """Returns the `Updates` of a distributed optimizer under `Sharded`.

    Raises:
        NotImplementedError: Keras has another backend than TensorFlow.
    """
    backend = sys.modules["keras"].backend.backend()
    if backend != "tensorflow":
        raise NotImplementedError(
            f"DistributedOptimizer: update={SHARDED} needs Keras' backend tensorflow, and it has "
            f"{backend}; leave out update="
        )
    # It checks names of TensorFlow that other optimizers do not need.
    from gradring.tensorflow.rules.sharded import ShardedUpdates

    # The hooks of an optimizer's step, variables and files.
    compat_keras.repair()
    return ShardedUpdates(
        communicator_of(options.process_set),
        DEFAULT_BUCKET_BYTES,
        None,
        op=options.op.value,
        predivide=float(options.gradient_predivide_factor),
    )


class HoldingParts:
    """An addition to the base of distributed optimizers of Keras 3."""

    _options: Options
    _rule: updates.Updates

    def _begin_reducing(self) -> None:
        super()._begin_reducing()  # type: ignore[misc]
        updates.set_updates(self, self._rule)
        object.__setattr__(self, "_has_compared", False)

    def build(self, variables: Sequence[Any]) -> None:
        """Makes this rank's parts of the optimizer's variables.

        Raises:
            gradring.errors.ConfigError: The variables belong to a strategy.
        """
        if strategy_of(variables) is not None:
            raise ConfigError(
                f"{type(self).__name__}.build: update=Sharded() of DistributedOptimizer trains "
                "variables that were made outside of strategies; make the model outside, or give "
                "update= to CustomCollectiveStrategy and take the optimizer itself"
            )
        build: Callable[..., None] = super().build  # type: ignore[misc]
        build(variables)

    def register_local_var(self, var: Any) -> None:
        """Refuses a local variable, whose value would differ between the ranks.

        Raises:
            gradring.errors.ConfigError: Always.
        """
        raise ConfigError(
            f"{type(self).__name__}.register_local_var: update=Sharded() gives all ranks the same "
            f"variables, and {name_of(var)} would differ between them; leave out update="
        )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _update(self, gradients: Sequence[Gradient], variables: Sequence[Any], given: Any) -> None:
        keras: Any = self
        if given is not None and not keras.built:
            with tf.init_scope():
                keras.build(variables)
        if self._options.sparse_as_dense:
            gradients = [None if it is None else tf.convert_to_tensor(it) for it in gradients]
        present = [getattr(it, "values", it) for it in gradients if it is not None]
        require_equal_calls(
            communicator_of(self._options.process_set),
            "sharded update",
            with_gaps("gradients", gradients),
            present,
            how=self._options.op.value,
            rows_differ=True,
        )
        self._compare_beginnings()
        # A stand-in of `Optimizer.apply` calls the rule.
        self._apply_plainly(gradients, given)  # type: ignore[attr-defined]

    def _compare_beginnings(self) -> None:
        """Compares the weights of all ranks, and their optimizers, before the first step.

        Each rank updates its part of the weights, so a step would mix unequal weights. In the
        groups of an elastic job, the state makes the weights equal.

        Raises:
            gradring.errors.MismatchError: On every rank, if the weights differ, or only some ranks
                have loaded an optimizer's state.
        """
        communicator = communicator_of(self._options.process_set)
        is_known = self._has_compared or communicator.world_size == 1  # type: ignore[attr-defined]
        if is_known or communicator.generation > 0:
            return
        parts: Parts = self._rule.parts_of(self)  # type: ignore[attr-defined]
        states = {id_of(state) for state in parts.states}
        own = (each for each in optimizer_variables(self) if id_of(each) not in states)
        compared = enumerate([*updates.trained_by(self), *own])
        try:
            with tf.init_scope():
                arrays = {f"{index}/{name_of(each)}": contents(each) for index, each in compared}
                arrays["loaded state"] = np.array(parts.stage())
                check_equal(communicator, arrays, "weights")
        except tf.errors.FailedPreconditionError:
            # The variables are initialised in this step. TensorFlow traces it again after that.
            return
        except MismatchError as error:
            raise MismatchError(
                f"{type(self).__name__} with update=Sharded() on rank {communicator.rank} of "
                f"{communicator.host}: the ranks begin to train with different weights or states",
                advice="call hvd.broadcast_variables(model.variables + optimizer.variables, "
                "root_rank=0) before the first step, or give fit a "
                "BroadcastGlobalVariablesCallback(0) behind the callbacks that load weights, and a "
                "built model",
                rank=communicator.rank,
                host=communicator.host,
            ) from error
        object.__setattr__(self, "_has_compared", True)
