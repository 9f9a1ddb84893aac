"""One small branch of a model for every layer of Keras."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

#: Name of an input: shape of a sample.
INPUTS: dict[str, tuple[int, ...]] = {
    "features": (6,),
    "sequence": (8, 6),
    "image": (12, 12, 3),
    "volume": (6, 6, 6, 2),
    "film of lines": (3, 6, 2),
    "film of images": (3, 6, 6, 2),
    "film of volumes": (2, 4, 4, 4, 2),
    "ids": (5,),
    "word": (1,),
    "sound": (512,),
    "wave": (512, 1),
}

#: Layers that have no branch, and why.
LEFT_OUT = {
    "FlaxLayer": "wraps code of JAX",
    "InputLayer": "every model has it",
    "InputSpec": "is no layer",
    "JaxLayer": "wraps code of JAX",
    "Layer": "is the base of all",
    "MaxNumBoundingBoxes": "takes boxes, and no batch",
    "StackedRNNCells": "is a cell; RNN has it here",
    "GRUCell": "is a cell; RNN has it here",
    "LSTMCell": "is a cell; RNN has it here",
    "SimpleRNNCell": "is a cell; RNN has it here",
    "TFSMLayer": "needs a saved model",
    "TorchModuleWrapper": "wraps code of PyTorch",
    "Wrapper": "is the base of wrappers",
}

#: Draw numbers, and each replica draws its own.
_RANDOM = {
    "AlphaDropout",
    "AugMix",
    "CutMix",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "MixUp",
    "RandAugment",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
}


def is_of_one_process(path: str) -> bool:
    """Whether a variable of `model_of` must be that of one process.

    It need not where the branch draws numbers, or normalises each replica's part for itself.
    """
    layer, _, variable = path.partition("/")
    branch = layer.removeprefix("end_of_")
    is_plain = branch in ("BatchNormalization", "batch_normalization")
    return bool(variable) and not (is_plain or branch in _RANDOM or branch.startswith("Random"))


def names(module: Any) -> dict[str, type]:
    """Classes of a module of Keras, without second names of the same one."""
    classes = {name: each for name, each in vars(module).items() if inspect.isclass(each)}
    return {name: each for name, each in classes.items() if each.__name__ == name}


def _options(name: str) -> dict[str, Any]:
    """What a layer's constructor needs."""
    by_prefix: dict[str, dict[str, Any]] = {
        "Adaptive": {"output_size": 2},
        "AveragePooling": {"pool_size": 2},
        "ConvLSTM": {"filters": 2, "kernel_size": 3},
        "Conv": {"filters": 4, "kernel_size": 3},
        "Depthwise": {"kernel_size": 3},
        "Separable": {"filters": 4, "kernel_size": 3},
        "SpatialDropout": {"rate": 0.3},
    }
    found = (options for prefix, options in by_prefix.items() if name.startswith(prefix))
    return OPTIONS.get(name) or next(found, {})


OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"rate": 0.3} for name in ("AlphaDropout", "Dropout", "GaussianDropout")},
    **{name: {"units": 3} for name in ("GRU", "LSTM", "SimpleRNN")},
    "RandomBrightness": {"factor": 0.2, "value_range": (0, 1)},
    "RandomColorDegeneration": {"factor": 0.5, "value_range": (0, 1)},
    "RandomColorJitter": {"value_range": (0, 1), "brightness_factor": 0.2},
    "RandomContrast": {"factor": 0.2, "value_range": (0, 1)},
    "RandomCrop": {"height": 12, "width": 12},
    "RandomElasticTransform": {"value_range": (0, 1)},
    "RandomErasing": {"value_range": (0, 1)},
    "RandomGaussianBlur": {"value_range": (0, 1)},
    "RandomGrayscale": {"factor": 0.5},
    "RandomHue": {"factor": 0.5, "value_range": (0, 1)},
    "RandomInvert": {"factor": 0.5, "value_range": (0, 1)},
    "RandomPosterization": {"factor": 4, "value_range": (0, 255)},
    "RandomRotation": {"factor": 0.1},
    "RandomSaturation": {"factor": 0.5, "value_range": (0, 1)},
    "RandomSharpness": {"factor": 0.5, "value_range": (0, 1)},
    "RandomShear": {"x_factor": 0.2},
    "RandomTranslation": {"height_factor": 0.1, "width_factor": 0.1},
    "RandomZoom": {"height_factor": 0.1},
    "Activation": {"activation": "gelu"},
    "ActivityRegularization": {"l1": 0.1, "l2": 0.1},
    "AugMix": {"value_range": (0, 1)},
    "AutoContrast": {"value_range": (0, 1)},
    "BatchNormalization": {"momentum": 0.8},
    "CategoryEncoding": {"num_tokens": 10, "output_mode": "multi_hot"},
    "CenterCrop": {"height": 6, "width": 6},
    "ContrastLimitedAdaptiveHistogramEqualization": {
        "value_range": (0, 1),
        "tile_grid_size": (2, 2),
    },
    "Dense": {"units": 3, "activity_regularizer": "l2", "kernel_regularizer": "l2"},
    "Discretization": {"bin_boundaries": [-1.0, 0.0, 1.0]},
    "EinsumDense": {"equation": "abc,cd->abd", "output_shape": (8, 3), "bias_axes": "d"},
    "Embedding": {"input_dim": 10, "output_dim": 3, "mask_zero": True},
    "Equalization": {"value_range": (0, 1)},
    "GaussianNoise": {"stddev": 0.3},
    "GroupNormalization": {"groups": 2},
    "GroupQueryAttention": {"head_dim": 4, "num_query_heads": 2, "num_key_value_heads": 1},
    "Hashing": {"num_bins": 8},
    "IntegerLookup": {"vocabulary": [1, 2, 3]},
    "MelSpectrogram": {"sequence_length": 64, "fft_length": 64, "num_mel_bins": 8},
    "Permute": {"dims": (2, 1)},
    "RandAugment": {"value_range": (0, 1)},
    "RepeatVector": {"n": 2},
    "Rescaling": {"scale": 0.5},
    "Reshape": {"target_shape": (-1, 3)},
    "Resizing": {"height": 5, "width": 7},
    "ReversibleEmbedding": {"input_dim": 10, "output_dim": 3},
    "STFTSpectrogram": {"frame_length": 64, "frame_step": 32, "fft_length": 64},
    "Solarization": {"value_range": (0, 1)},
    "StringLookup": {"vocabulary": ["a", "b"]},
    "TextVectorization": {"vocabulary": ["a", "b"], "output_sequence_length": 3},
}

#: Where the name of a layer does not tell its input.
KINDS = {
    "CategoryEncoding": "ids",
    "Embedding": "ids",
    "GlobalAveragePooling1D": "sequence",
    "HashedCrossing": "word",
    "Hashing": "word",
    "IntegerLookup": "ids",
    "MelSpectrogram": "sound",
    "RepeatVector": "features",
    "ReversibleEmbedding": "ids",
    "STFTSpectrogram": "wave",
    "StringLookup": "word",
    "TextVectorization": "word",
    "ConvLSTM1D": "film of lines",
    "ConvLSTM2D": "film of images",
    "ConvLSTM3D": "film of volumes",
}

_OF_IMAGES = {
    "AugMix",
    "AutoContrast",
    "CenterCrop",
    "ContrastLimitedAdaptiveHistogramEqualization",
    "CutMix",
    "Equalization",
    "MixUp",
    "RandAugment",
    "Resizing",
    "Solarization",
}


_OF_AXES = {"2D": "image", "3D": "volume"}


def kind_of(branch: str) -> str:
    """Of the input of a branch."""
    name = branch.split("_")[0]
    if name in KINDS:
        return KINDS[name]
    if name in _OF_IMAGES or name.startswith("Random"):
        return "image"
    found = (kind for axes, kind in _OF_AXES.items() if axes in name)
    return next(found, "sequence")


def _calls() -> dict[str, Callable[[Any], Any]]:
    """How layers are made and called that need more than their options."""
    from keras import layers, ops

    two = {
        name: lambda x, name=name: getattr(layers, name)()([x, ops.flip(x, 1)])
        for name in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")
    }
    return two | {
        "AdditiveAttention": lambda x: layers.AdditiveAttention()([x, ops.flip(x, 1)]),
        "Attention": lambda x: layers.Attention(use_scale=True)([x, ops.flip(x, 1)]),
        "Bidirectional": lambda x: layers.Bidirectional(layers.LSTM(3))(x),
        "Dot": lambda x: layers.Dot(axes=2)([x, ops.flip(x, 1)]),
        "GroupQueryAttention": lambda x: layers.GroupQueryAttention(
            **OPTIONS["GroupQueryAttention"]
        )(x, ops.flip(x, 1)),
        "HashedCrossing": lambda x: layers.HashedCrossing(num_bins=8)((x, x)),
        "Lambda": lambda x: layers.Lambda(lambda y: 2 * y)(x),
        "Masking": lambda x: layers.LSTM(3)(layers.Masking()(x)),
        # Decibels are large.
        "MelSpectrogram": lambda x: layers.Rescaling(0.01)(
            layers.MelSpectrogram(**OPTIONS["MelSpectrogram"])(x)
        ),
        "MultiHeadAttention": lambda x: layers.MultiHeadAttention(2, 4)(x, ops.flip(x, 1)),
        "Normalization": lambda x: layers.Normalization(mean=0.5, variance=2.0)(x),
        "Pipeline": lambda x: layers.Pipeline([layers.Rescaling(2.0), layers.Rescaling(0.3)])(x),
        "RNN": lambda x: layers.RNN(
            [layers.GRUCell(3), layers.LSTMCell(3), layers.SimpleRNNCell(3)]
        )(x),
        "SpectralNormalization": lambda x: layers.SpectralNormalization(layers.Dense(3))(x),
        "TimeDistributed": lambda x: layers.TimeDistributed(layers.Dense(3))(x),
        "BatchNormalization_synchronized": lambda x: layers.BatchNormalization(
            momentum=0.8, synchronized=True
        )(x),
        "Embedding_pooled": lambda x: layers.GlobalAveragePooling1D()(
            layers.Embedding(10, 3, mask_zero=True)(x)
        ),
    }


def _called(layer: type, options: dict[str, Any], x: Any) -> Any:
    return layer(**options)(x)


def branches() -> dict[str, Callable[[Any], Any]]:
    """By name, what makes of an input the output of the layer."""
    from keras import layers

    calls = _calls()
    made: dict[str, Callable[[Any], Any]] = {}
    for name, layer in names(layers).items():
        if name not in LEFT_OUT:
            made[name] = calls.get(name) or functools.partial(_called, layer, _options(name))
    return made | {name: call for name, call in calls.items() if "_" in name}


def samples(kind: str, count: int) -> Any:
    """The same samples on every rank."""
    draw = np.random.default_rng(len(kind))
    shape = (count, *INPUTS[kind])
    if kind == "ids":
        return draw.integers(1, 10, shape).astype(np.int32)
    if kind == "word":
        return draw.choice(["a", "b", "c"], shape).astype(object)
    if kind == "image":
        return draw.uniform(size=shape).astype(np.float32)
    return draw.normal(size=shape).astype(np.float32)


def model_of(kind: str, made: dict[str, Callable[[Any], Any]]) -> Any:
    """All branches of one kind of input; each has one of the outputs, and variables of its own."""
    import keras
    from keras import layers, ops

    dtype = {"ids": "int32", "word": "string"}.get(kind, "float32")
    given = layers.Input(INPUTS[kind], dtype=dtype)
    ends = []
    for name, branch in made.items():
        flat = layers.Flatten()(ops.cast(branch(given), "float32"))
        ends.append(layers.Dense(1, name=f"end_of_{name}")(flat))
    return keras.Model(given, layers.Concatenate()(ends) if len(ends) > 1 else ends[0])
