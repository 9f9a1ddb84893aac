"""Names of Keras 3 that gradring replaces or reads, as rows of one table.

Most names are private. `keras/compat_keras.py` lists the stand-ins of the replaced ones. The places
of a name are tried in order, so those of the newest version come first.
"""

from __future__ import annotations

from typing import Any

from gradring.tensorflow.seams.table import Seam

_OPTIMIZER = "keras:optimizers.Optimizer"
_LOSS_SCALE = "keras:optimizers.LossScaleOptimizer"
_NORMALISATION = "keras:layers.BatchNormalization"
_MODEL = "keras:Model"
_LOSS = "keras.src.losses.loss"
_BACKEND = "keras.src.backend.tensorflow"
_EPOCHS = f"{_BACKEND}.trainer:TFEpochIterator"
_BACKUP = "keras:callbacks.BackupAndRestore"
_CALLBACKS = "keras:callbacks.CallbackList"
#: Class renamed in Keras 3.16.
_TRAINER = "keras.src.trainers.trainer:BaseTrainer keras.src.trainers.trainer:Trainer"
#: Modules of ops moved in Keras 3.16.
_NN = f"{_BACKEND}.ops.nn {_BACKEND}.nn"
_VARIABLE = f"{_BACKEND}.ops.core:Variable {_BACKEND}.core:Variable"


def _attribute(owner: str, name: str, does: str, **rest: Any) -> Seam:
    return Seam(owner, name, does, is_attribute=True, **rest)


# Optimizers

APPLY = Seam(_OPTIMIZER, "apply", "applies gradients by the update rule", "grads")
APPLY_SCALED = Seam(_LOSS_SCALE, "apply", "applies gradients by the update rule", "grads")
APPLY_GRADIENTS = Seam(
    _OPTIMIZER,
    "_backend_apply_gradients",
    "names reductions after the variables",
    "grads trainable_variables",
)
CLIP_GRADIENTS = Seam(
    _OPTIMIZER, "_clip_gradients", "clips the sum of all replicas' gradients", "grads"
)
UPDATE_STEP = Seam(
    _OPTIMIZER,
    "_backend_update_step",
    "updates variables by the update rule",
    "grads trainable_variables learning_rate",
)
SUM_GRADIENTS = Seam(
    _OPTIMIZER,
    "_all_reduce_sum_gradients",
    "reduces gradients once, also where they are clipped",
    "grads_and_vars",
)
CHECK_FINITE = Seam(
    _LOSS_SCALE, "check_finite", "has all ranks skip the same steps after an overflow", "grads"
)
BUILD_OPTIMIZER = Seam(
    _OPTIMIZER, "build", "makes the optimizer's variables in the scope of the model's", "variables"
)
ADD_VARIABLE = Seam(
    _OPTIMIZER,
    "add_variable_from_reference",
    "makes variables of an optimizer's state by the update rule",
    "reference_variable",
)
FINALIZE = Seam(
    _OPTIMIZER, "finalize_variable_values", "averages whole variables at the end", "var_list"
)
SAVE_OPTIMIZER = Seam(
    _OPTIMIZER, "save_own_variables", "gathers the state that is in a file", "store"
)
DISTRIBUTION_STRATEGY = _attribute(
    _OPTIMIZER, "_distribution_strategy", "the strategy of an optimizer that was made elsewhere"
)
TRAINED = _attribute(_OPTIMIZER, "_trainable_variables", "the variables of an optimizer")
LEARNING_RATE = _attribute(
    _OPTIMIZER, "_learning_rate", "compares the learning rates at the end of an epoch"
)
ITERATIONS = _attribute(_OPTIMIZER, "_iterations", "counts the steps that are done", since="3.5")
USE_WEIGHT_DECAY = Seam(
    _OPTIMIZER, "_use_weight_decay", "tells servers and divided states what decays", "variable"
)

# Layers and losses

NORMALISE = Seam(
    _NORMALISATION, "call", "combines moving statistics of all replicas", "inputs training mask"
)
LAYER_CALL = Seam("keras:layers.Layer", "__call__", "has empty batches pass layers")
ADD_LOSS = Seam("keras:layers.Layer", "add_loss", "adds nothing for an empty batch", "loss")
FLATTEN_LAYERS = Seam("keras:layers.Layer", "_flatten_layers", "the layers in a layer")
LOSS_CALL = Seam("keras:losses.Loss", "__call__", "has empty batches pass losses", "y_true y_pred")
MOMENTS_SYNC = Seam(
    _NN,
    "_compute_moments_sync",
    "sends the moments of all replicas in one message",
    "x axes keepdims",
)
MOMENTS = Seam(_NORMALISATION, "_moments", "counts masked samples of all replicas", "inputs mask")
REDUCTION_AXES = _attribute(_NORMALISATION, "_reduction_axes", "dimensions of moments")
MASK = _attribute(
    "keras.src.backend.common.masking keras:layers.Layer",
    "_keras_mask",
    "keeps the mask of a sequence",
)
LOGITS = _attribute(_NN, "_keras_logits", "keeps from what probabilities were made")
SCALE_LOSS = Seam(
    _LOSS,
    "scale_loss_for_distribution",
    "weighs a loss by the replica's samples",
    "value",
    since="3.8",
)
UNSCALE_LOSS = Seam(
    _LOSS,
    "unscale_loss_for_distribution",
    "logs a loss without a reduction as it is",
    "value",
    since="3.8",
)
REDUCE_WEIGHTED = Seam(
    _LOSS,
    "reduce_weighted_values",
    "remembers the mask of a loss",
    "values sample_weight mask",
    since="3.8",
)
REDUCE_VALUES = Seam(
    _LOSS, "reduce_values", "weighs a loss by what it is divided by", "values", since="3.8"
)
ADDITIONAL_LOSS = Seam(
    _MODEL,
    "_aggregate_additional_loss",
    "divides a loss of `add_loss` once",
    "loss",
    since="3.8",
)
PLAIN_ADDITIONAL_LOSS = Seam(
    _TRAINER,
    "_aggregate_additional_loss",
    "the same without a strategy",
    "loss",
    since="3.8",
)
UPDATE_MEAN = Seam(
    "keras:metrics.Mean", "update_state", "weighs means by the samples", "values sample_weight"
)

# Variables

NEXT_SEED = Seam(
    "keras:random.SeedGenerator",
    "next",
    "has each replica draw its own random numbers",
    "ordered",
)
VALUE = _attribute(
    f"{_VARIABLE} keras.src.backend.common.variables:KerasVariable",
    "_value",
    "TensorFlow's variable behind one of Keras",
)
INITIALIZE = Seam(_VARIABLE, "_initialize", "makes a variable anew in the scope", "value")

# Loops

SYMBOLIC_BUILD = Seam(
    _MODEL,
    "_maybe_symbolic_build",
    "builds a model from one replica's part of a batch",
    "iterator data_batch",
    since="3.5",
)
MAKE_TRAIN = Seam(_MODEL, "make_train_function", "makes a training step one step", "force")
MAKE_TEST = Seam(_MODEL, "make_test_function", "makes a test step one step", "force")
MAKE_PREDICT = Seam(_MODEL, "make_predict_function", "makes a step of `predict` one", "force")
MAKE_FUNCTION = Seam(
    _MODEL,
    "_make_function",
    "weighs what a step does by the replica's samples",
    "step_function",
    since="3.7",
)
MODEL_STRATEGY = _attribute(
    _MODEL, "_distribute_strategy", "gives a model its strategy, in programs that know of none"
)
PREDICT_ON_BATCH = Seam(_MODEL, "predict_on_batch", "predicts on each rank by itself", "x")
COMPILE = Seam(_TRAINER, "compile", "compiles in the scope of the model")
FIT = Seam(_MODEL, "fit", "trains on all ranks together")
EVALUATE = Seam(_MODEL, "evaluate", "evaluates on all ranks together")
PREDICT = Seam(_MODEL, "predict", "predicts on all ranks together")
CACHED_EVALUATION = _attribute(
    _MODEL, "_use_cached_eval_dataset", "tells a validation of `fit` from `evaluate`"
)
EVALUATION_ITERATOR = _attribute(
    _MODEL, "_eval_epoch_iterator", "forgets the iterator of a `fit` that failed"
)
INITIAL_EPOCH = _attribute(_MODEL, "_initial_epoch", "the epoch at which a backup goes on")
REDUCE_LOGS = Seam(
    f"{_BACKEND}.trainer",
    "reduce_per_replica",
    "averages all logs of a step in one message",
    "values strategy reduction",
)
BEGIN_EPOCHS = Seam(_EPOCHS, "__init__", "ends epochs on all ranks", "distribute_strategy")
RESET_EPOCHS = Seam(_EPOCHS, "reset", "ends epochs on all ranks", "", since="3.7")
BATCHES = Seam(_EPOCHS, "_enumerate_iterator", "takes the batches of an epoch", "", since="3.7")
BATCHES_BEFORE_37 = Seam(
    _EPOCHS, "enumerate_epoch", "takes the batches of an epoch", "", until="3.7"
)
EPOCHS_STRATEGY = _attribute(_EPOCHS, "_distribute_strategy", "the strategy of epochs")
EPOCHS_DATASET = _attribute(_EPOCHS, "_distributed_dataset", "the dataset of epochs")
EPOCHS_BATCHES = _attribute(_EPOCHS, "_num_batches", "has iterators say where an epoch ends")
OUTPUT_SIGNATURE = _attribute(
    "keras.src.trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter",
    "_output_signature",
    "what a generator gives, before it gives it",
)
LOGS_OF_EPOCH = Seam(
    _MODEL, "_get_metrics_result_or_logs", "reads the logs of an epoch on all ranks", "logs"
)

# Files

SKIPPED_ATTRIBUTES = Seam(
    "keras.src.saving.saving_lib",
    "get_attr_skipset",
    "lets one rank save alone",
    "obj_type",
    since="3.6",
)
SKIPPED_BEFORE_36 = Seam(
    "keras.src.saving.saving_lib",
    "get_attr_skiplist",
    "lets one rank save alone",
    "obj_type",
    until="3.6",
)
SAVE_MODEL = Seam(
    "keras.src.saving.saving_lib", "save_model", "leaves whole files", "model filepath"
)
SAVE_WEIGHTS = Seam(
    "keras.src.saving.saving_lib", "save_weights_only", "leaves whole files", "model filepath"
)
LOAD_WEIGHTS = Seam(
    _MODEL,
    "load_weights",
    "has update rules drop gradients of the weights before",
    "filepath",
)
SAVE_HDF5 = Seam(
    "keras.src.legacy.saving.legacy_h5_format",
    "save_model_to_hdf5",
    "leaves whole files",
    "model filepath",
)

# Callbacks

CHECKPOINT = Seam(
    "keras:callbacks.ModelCheckpoint", "_save_model", "saves on the chief", "epoch batch logs"
)
BACKUP_BEGIN = Seam(_BACKUP, "on_train_begin", "restores on all ranks", "logs")
BACKUP_SAVE = Seam(_BACKUP, "_save_model", "saves on the chief", "")
BACKUP_END = Seam(_BACKUP, "on_train_end", "removes the backup on the chief", "logs")
BACKUP_EPOCH = _attribute(_BACKUP, "_current_epoch", "the epoch of a backup within an epoch")
BACKUP_PATH = _attribute(_BACKUP, "_weights_path", "whether there is a backup")
PREVIOUS_BACKUP = _attribute(
    _BACKUP, "_prev_weights_path", "whether there is an earlier backup", since="3.7"
)
TRAIN_BEGIN = Seam(_CALLBACKS, "on_train_begin", "has callbacks of all ranks agree", "logs")
BATCH_END = Seam(_CALLBACKS, "on_train_batch_end", "has callbacks of all ranks agree", "batch logs")
EPOCH_END = Seam(_CALLBACKS, "on_epoch_end", "has callbacks of all ranks agree", "epoch logs")
TRAIN_END = Seam(_CALLBACKS, "on_train_end", "has callbacks of all ranks agree", "logs")

# tf_keras

LEGACY_APPLY = Seam(
    "tf_keras:optimizers.Optimizer", "apply_gradients", "refuses other update rules"
)
OLDEST_APPLY = Seam(
    "tf_keras:optimizers.legacy.Optimizer", "apply_gradients", "refuses other update rules"
)
LEGACY_LOSS = Seam("tf_keras:losses.Loss", "__call__", "notes a loss of Keras")
LEGACY_MEAN = Seam("tf_keras:metrics.Mean", "update_state", "names values of a part", "values")
LEGACY_SCALE_LOSS = Seam(
    "tf_keras.src.utils.losses_utils", "scale_loss_for_distribution", "notes a loss of Keras"
)
LEGACY_FIT = Seam("tf_keras:Model", "fit", "compares the arguments of all ranks")
LEGACY_EVALUATE = Seam("tf_keras:Model", "evaluate", "compares the arguments of all ranks")
LEGACY_PREDICT = Seam("tf_keras:Model", "predict", "compares the arguments of all ranks")
LEGACY_BATCH_END = Seam(
    "tf_keras:callbacks.CallbackList",
    "on_train_batch_end",
    "has all ranks stop together",
    "batch logs",
)
LEGACY_EPOCH_END = Seam(
    "tf_keras:callbacks.CallbackList",
    "on_epoch_end",
    "has callbacks of all ranks agree",
    "epoch logs",
)

_ALL = [it for it in list(globals().values()) if isinstance(it, Seam)]
#: All seams of Keras, in the order above.
SEAMS = tuple(it for it in _ALL if it.package == "keras")
#: All seams of tf_keras.
LEGACY = tuple(it for it in _ALL if it.package == "tf_keras")
