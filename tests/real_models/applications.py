"""The architectures of `keras.applications`, on the smallest images."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from real_models.real_model import RealModel, images

SMALLEST_SIZES = (
    "ConvNeXtTiny",
    "DenseNet121",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "InceptionResNetV2",
    "InceptionV3",
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Large",
    "MobileNetV3Small",
    "NASNetMobile",
    "ResNet50",
    "ResNet50V2",
    "VGG16",
    "VGG19",
    "Xception",
)

LARGER_SIZES = (
    *(f"ConvNeXt{size}" for size in ("Small", "Base", "Large", "XLarge")),
    *(f"DenseNet{layers}" for layers in (169, 201)),
    *(f"EfficientNetB{size}" for size in range(1, 8)),
    *(f"EfficientNetV2{size}" for size in ("B1", "B2", "B3", "S", "M", "L")),
    "NASNetLarge",
    *(f"ResNet{layers}{version}" for layers in (101, 152) for version in ("", "V2")),
)
"""The same layers as in a smallest one, more or larger ones."""

RESNETS_V2 = ("ResNet50V2", "ResNet101V2", "ResNet152V2")
DEEPEST = tuple(f"EfficientNet{size}" for size in ("B4", "B5", "B6", "B7", "V2S", "V2M", "V2L"))

SIDE = 32
SIDES = (
    {"InceptionResNetV2": 75, "InceptionV3": 139, "Xception": 71}
    | dict.fromkeys(DEEPEST, 128)
    | dict.fromkeys(RESNETS_V2, 96)
)
"""The side of the images, in pixels; of others it is 32.

Some see nothing smaller. In the others the last layers would normalise one pixel of four images,
which makes of one rounding, through so many layers, a tenth of the result.
"""


def application(name: str) -> Any:
    """The model as it is, but for what would drop units or whole branches by chance."""
    import keras

    architecture, side = getattr(keras.applications, name), SIDES.get(name, SIDE)
    has_preprocessing = "include_preprocessing" in inspect.signature(architecture).parameters
    model = architecture(
        weights=None,
        classes=10,
        classifier_activation=None,
        input_shape=(side, side, 3),
        **({"include_preprocessing": False} if has_preprocessing else {}),
    )
    if any("Dropout" in type(layer).__name__ for layer in model.layers):
        model = keras.models.clone_model(model, clone_function=_without_dropping)
    return model


def transfer() -> Any:
    """A frozen network with a head that is trained."""
    import keras

    base = keras.applications.MobileNetV2(
        weights=None, include_top=False, input_shape=(SIDE, SIDE, 3)
    )
    base.trainable = False
    layers = keras.layers
    return keras.Sequential([base, layers.GlobalAveragePooling2D(), layers.Dense(10)])


def _without_dropping(layer: Any) -> Any:
    config = layer.get_config()
    if "Dropout" in type(layer).__name__:
        config["rate"] = 0.0
    return type(layer).from_config(config)


def _learning_rate(name: str) -> float:
    """Small enough that training does not amplify roundings to its own size.

    Gradients of some that have learned nothing are so large that with 1e-5 each step makes forty
    times as much of a rounding.
    """
    is_steep = name.startswith(("EfficientNet", "Inception", "NASNet")) or name in RESNETS_V2
    return 1e-8 if is_steep else 1e-5


MODELS = {
    name: RealModel(
        functools.partial(application, name),
        images(SIDES.get(name, SIDE)),
        learning_rate=_learning_rate(name),
    )
    for name in (*SMALLEST_SIZES, *LARGER_SIZES)
} | {"frozen MobileNetV2 with a new head": RealModel(transfer, images(SIDE))}
