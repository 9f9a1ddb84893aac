"""Variables of an optimizer that each rank holds in part.

A rank holds its part of each variable of the optimizer's state. Before a file is written, the ranks
gather the whole values, so files look as without parts. The next step cuts them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.errors import ConfigError
from gradring.gradients.buckets import Entry, pack
from gradring.gradients.names import Label, name_of
from gradring.gradients.parts import Division, divide
from gradring.gradients.reduction import Collective
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph import compat, replica_step
from gradring.tensorflow.graph.adoption import strategy_of
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.graph.start_wait import start_all_gather, wait
from gradring.tensorflow.rules.updates import own, when
from gradring.tensorflow.seams.table import overrides

#: Stages of an optimizer's state: all variables are cut; a program has assigned some, which may be
#: whole; all are whole and equal on all ranks.
_CUT, _ASSIGNED, _WHOLE = range(3)


class Parts:
    """The parts of one optimizer's variables, and of the variables that it trains."""

    def __init__(
        self, name: str, communicator: Communicator, trained: Sequence[Any], bucket_bytes: int
    ) -> None:
        """Divides the trained variables; nothing is sent.

        Args:
            name: Name of the optimizer.
            communicator: The strategy's group.
            trained: The variables that the optimizer trains.
            bucket_bytes: Limit of the variables that travel together, in bytes.
        """
        self.name = name
        self.communicator = communicator
        self.trained = list(trained)
        self.positions = {id_of(variable): i for i, variable in enumerate(self.trained)}
        self.states: list[StateVariable] = []
        self._stage = compat.plain_variable(_CUT, "stage_of_parts", tf.int64)
        # A backward pass produces the gradients of the last variables first.
        order = list(reversed(range(len(self.trained))))
        dtypes = [tf.as_dtype(variable.dtype) for variable in self.trained]
        sizes = [_elements(self.trained[i]) * dtypes[i].size for i in order]
        entries = [Entry(dtypes[i].name, size) for i, size in zip(order, sizes, strict=True)]
        #: Positions of the trained variables that travel together.
        self.buckets = [
            [order[index] for index in bucket.indices] for bucket in pack(entries, bucket_bytes)
        ]
        self._divisions: dict[int, list[Division]] = {}
        self._weights: dict[tuple[int, int], list[WeightPart]] = {}
        #: Rank and world size for which the states are cut.
        self._cut_for = compat.plain_variable(0, "place_of_parts", tf.int64, (2,))
        with tf.init_scope():
            self._cut_for.assign(self.place)
        #: True once states may have other values than their initial ones.
        self.has_begun = False

    @property
    def place(self) -> tuple[int, int]:
        """Rank and world size."""
        return self.communicator.rank, self.communicator.world_size

    def division(self, position: int) -> Division:
        """Returns the division of a trained variable in the current group."""
        size = self.communicator.world_size
        if size not in self._divisions:
            found: list[Any] = [None] * len(self.trained)
            for bucket in self.buckets:
                shapes = [tf.TensorShape(self.trained[i].shape).as_list() for i in bucket]
                for i, division in zip(bucket, divide(shapes, size), strict=True):
                    found[i] = division
            self._divisions[size] = found
        return self._divisions[size][position]

    def buckets_of(self, positions: Iterable[int]) -> list[list[int]]:
        """Returns the buckets without other trained variables than these."""
        wanted = set(positions)
        buckets = ([i for i in bucket if i in wanted] for bucket in self.buckets)
        return [bucket for bucket in buckets if bucket]

    def counts(self, positions: Iterable[int]) -> list[int]:
        """Returns the number of elements of each rank in these variables together."""
        divisions = [self.division(position) for position in positions]
        ranks = range(self.communicator.world_size)
        return [sum(division.count(rank) for division in divisions) for rank in ranks]

    def part_of(self, position: int, value: tf.Tensor) -> tf.Tensor:
        """Returns this rank's part of a value of the variable's shape."""
        division, rank = self.division(position), self.communicator.rank
        units = division.units(rank)
        flat = value if division.is_by_rows else tf.reshape(value, [-1])
        return tf.reshape(flat[units.start : units.stop], division.part_shape(rank))

    def weights(self) -> list[WeightPart]:
        """Returns variables for this rank's parts of all trained variables."""
        if self.place not in self._weights:
            self._weights[self.place] = [
                WeightPart(variable, self.division(position).part_shape(self.communicator.rank))
                for position, variable in enumerate(self.trained)
            ]
        return self._weights[self.place]

    def add_state(self, make: Callable[[], Any], reference: Any) -> Any:
        """Returns the optimizer's variable that `make` makes, after it was cut.

        Args:
            make: Makes a variable of Keras with the shape of `reference`.
            reference: A trained variable.
        """
        position = self.positions[id_of(reference)]

        def create(_: Any, **kwargs: Any) -> StateVariable:
            state = StateVariable(self, position, kwargs)
            self.states.append(state)
            return state

        with tf.variable_creator_scope(create):
            made = make()
        # The shape that Keras knows is that of the whole value.
        made.assign = self.states[-1].assign
        return made

    def check_place(self) -> None:
        """Refuses parts that were cut for another place in the group.

        Raises:
            gradring.errors.ConfigError: The group has formed again, and the program has not given
                the optimizer its whole state.
        """
        with tf.init_scope():
            is_cut_for_it = tuple(self._cut_for.numpy()) == self.place
            fits = is_cut_for_it or all(state.is_whole() for state in self.states)
        if not fits:
            raise ConfigError(
                f"rank {self.communicator.rank} of {self.communicator.host}: a new group of "
                f"{self.communicator.world_size} ranks has formed, and the state of "
                f"{self.name} is divided as in the former one; restore it from a "
                "gradring.tensorflow.elastic.State or a checkpoint before it is used"
            )

    def cut(self) -> None:
        """Cuts the states that are whole, in each step."""
        self.has_begun = True

        def cutting() -> None:
            for state in self.states:
                state.hold(_copied(state.own_part()), is_whole=False)
            self._cut_for.assign(self.place)
            self._stage.assign(_CUT)

        when(self._stage > _CUT, cutting)

    def make_whole(self) -> None:
        """Gives all ranks the whole state; every rank calls it, eagerly.

        Before the first step, a rank needs no other: all have the initial values.

        Raises:
            gradring.errors.ConfigError: Only some ranks have loaded a state. Or the state is
                divided as in a former group.
        """
        if tf.executing_eagerly():
            if self.are_whole():
                return
            if self.has_begun:
                self.compare_stages()
        is_initial = tf.executing_eagerly() and not self.has_begun
        if not is_initial:
            self.check_place()
        self.note_assigned()
        for state in self.states:
            value = state.initial() if is_initial else state.gathered()
            state.hold(value, is_whole=True)
        self._stage.assign(_WHOLE)

    def hold_initial(self) -> None:
        """Holds whole initial values on this rank, unless its state has begun to change."""
        if not self.has_begun:
            self.note_assigned()
            for state in self.states:
                state.hold(state.initial(), is_whole=True)

    def stage(self) -> int:
        """Returns the stage of the state on this rank; called eagerly."""
        return int(self._stage.numpy())

    def compare_stages(self) -> None:
        """Compares the stages of all ranks; every rank calls it, eagerly.

        Raises:
            gradring.errors.ConfigError: Only some ranks have loaded a state.
        """
        stage = self.stage()
        found = np.array([stage, -stage])
        # Ranks may count their optimizers differently, so the name is not that of this one.
        self.communicator.all_reduce(found, "max", name="Sharded: stage of an optimizer's state")
        if found[0] != -found[1]:
            raise ConfigError(
                f"rank {self.communicator.rank} of {self.communicator.host}: some ranks have "
                f"assigned the state of {self.name}, such as by load_weights, and others have not; "
                "load it on all ranks, or by gradring.tensorflow.restore"
            )

    def are_whole(self) -> bool:
        """Returns whether all ranks have the whole state."""
        with tf.init_scope():
            return self.stage() == _WHOLE

    def note_assigned(self) -> None:
        """Notes that a program has assigned a state, and so may have made it whole."""
        self.has_begun = True
        self._stage.assign(tf.maximum(self._stage, _ASSIGNED))

    def has_any(self, ids: Iterable[int]) -> bool:
        """Returns whether one of the ids is that of a trained variable or a state."""
        ids = set(ids)
        known = ids & self.positions.keys()
        return bool(known) or any(id_of(state) in ids for state in self.states)


@overrides(
    compat.ResourceVariable,
    "read_value_no_copy",
    "_copy_trackable_to_cpu",
    "_restore_from_tensors",
)
class StateVariable(compat.ResourceVariable):  # type: ignore[misc]
    """A variable of an optimizer's state, of which this rank holds its part, or all of it."""

    def __init__(self, parts: Parts, position: int, arguments: dict[str, Any]) -> None:
        """Makes the variable with this rank's part of its initial value.

        Args:
            parts: The optimizer's parts.
            position: Position of the trained variable that it belongs to.
            arguments: Arguments of `tf.Variable`.
        """
        self.parts, self._position = parts, position
        #: Index among the states of the optimizer.
        self._index = len(parts.states)
        self._whole = tf.TensorShape(parts.trained[position].shape)
        self._arguments = arguments
        self._is_whole = compat.plain_variable(False, "is_whole", tf.bool)
        rank = self._whole.rank
        with tf.init_scope(), tf.device("/device:CPU:0"):
            value = self.initial()
            super().__init__(
                _copied(parts.part_of(position, value)),
                trainable=False,
                dtype=value.dtype,
                name=arguments.get("name"),
                shape=tf.TensorShape([None] * rank if rank else None),
            )

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the whole value."""
        return self._whole

    def initial(self) -> tf.Tensor:
        """Returns the whole initial value, which is the same on all ranks."""
        value = self._arguments["initial_value"]
        value = value() if callable(value) else value
        if isinstance(value, compat.CheckpointInitialValue):
            value = value.wrapped_value
        return tf.convert_to_tensor(value, self._arguments.get("dtype"))

    @property
    def distribute_strategy(self) -> Any:
        """The strategy of the trained variable."""
        return strategy_of([self.parts.trained[self._position]])

    def make_whole(self, root: int | None = None) -> None:
        """Gives all ranks the whole state of the optimizer; every rank calls it.

        Args:
            root: The rank whose value all ranks are about to get. If it has the whole value, such
                as from a file, the others need not have any.
        """
        parts = self.parts
        if root is not None and not tf.executing_eagerly():
            with tf.init_scope():
                parts.compare_stages()
        elif root is not None:
            has_whole = np.array([self.is_whole() or not parts.has_begun], np.int64)
            parts.communicator.broadcast(has_whole, root, name="Sharded: whole value")
            if has_whole[0]:
                parts.hold_initial()
                if not self.is_whole():
                    # The root sends a whole value, and this one does not count.
                    parts.note_assigned()
                    self.hold(self.initial(), is_whole=True)
                return
        parts.make_whole()

    def is_whole(self) -> bool:
        """Returns whether this rank holds all of the value; called eagerly."""
        return bool(self._is_whole.numpy())

    def own_part(self) -> tf.Tensor:
        """Returns this rank's part of the value.

        A part that is held is taken from 0 on. A flag tells it, since TensorFlow's optimizer of
        graphs would take the size of the value from what the graph assigns later.
        """
        division, rank = self.parts.division(self._position), self.parts.communicator.rank
        if not division.count(rank):
            return tf.zeros(division.part_shape(rank), self.dtype)
        flat = tf.reshape(self.read_value(), [-1])
        first = tf.where(self._is_whole, division.units(rank).start * division.unit, 0)
        part = tf.slice(flat, [first], [division.count(rank)])
        return tf.reshape(part, division.part_shape(rank))

    def gathered(self) -> tf.Tensor:
        """Returns the whole value; every rank calls it."""
        parts, label = self.parts, "Sharded: whole state"
        shown = f"{label} {name_of(self)}"
        # Ranks may count the layers of other models differently.
        collective = Collective(parts.communicator, Label(shown, f"{label} {self._index}"))
        counts = tf.constant(parts.counts([self._position]), tf.int64)
        flat = tf.reshape(self.own_part(), [-1])
        ((whole,),) = wait([start_all_gather(flat, counts, collective)])
        return tf.reshape(whole, self._whole)

    def hold(self, value: tf.Tensor, *, is_whole: bool) -> None:
        """Holds a part, or the whole value."""
        super().assign(value)
        self._is_whole.assign(is_whole)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """See `tf.Variable.assign`; takes a whole value, or in a step of the optimizer a part."""
        value = tf.convert_to_tensor(value, self.dtype)
        if not replica_step.current().is_applying:
            self.parts.note_assigned()
            self._is_whole.assign(True)
        elif value.shape.rank is not None and value.shape == self._whole:
            value = self.parts.part_of(self._position, value)
        return super().assign(value, *args, **kwargs)

    def read_value_no_copy(self) -> tf.Tensor:
        """Returns the whole value, for files; every rank calls it, unless all have it."""
        return self.read_value() if self.parts.are_whole() else self.gathered()

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        (value,) = restored_tensors.values()
        return self.assign(tf.ensure_shape(value, self._whole))

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        if self not in object_map:
            object_map[self] = compat.ResourceVariable(
                tf.zeros(self._whole, self.dtype), trainable=False, name=self.name.split(":")[0]
            )
        object_map[self].assign(self.read_value_no_copy())


class WeightPart(compat.ResourceVariable):  # type: ignore[misc]
    """This rank's part of a trained variable, which stands for the variable in a step."""

    def __init__(self, variable: Any, shape: Sequence[int]) -> None:
        """Makes a part of zeros.

        Args:
            variable: The trained variable.
            shape: Shape of the part.
        """
        self._variable = own(variable)
        with tf.init_scope(), tf.device("/device:CPU:0"), tf.name_scope("gradring/"):
            zeros = tf.zeros(shape, self._variable.dtype)
            super().__init__(zeros, trainable=False, name="part")

    @property
    def name(self) -> str:
        """Name of the whole variable, by which a program can leave it out of weight decay."""
        return str(self._variable.name)

    def _distributed_container(self) -> Any:
        """Returns the variable by which optimizers know this part."""
        container = getattr(self._variable, "_distributed_container", None)
        return self._variable if container is None else container()


def _copied(part: tf.Tensor) -> tf.Tensor:
    """Returns a copy of a part, which could be a view that keeps the memory of the whole."""
    return tf.raw_ops.DeepCopy(x=part)


def _elements(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements())
