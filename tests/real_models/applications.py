"""The architectures of `keras.applications`: the smallest size of each, on the smallest images."""

from __future__ import annotations

import functools
from typing import Any

from real_models.real_model import RealModel, images

SIDES = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Large": 32,
    "MobileNetV3Small": 32,
    "NASNetMobile": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "VGG19": 32,
    "Xception": 71,
}
"""The side of the images, in pixels."""


def application(name: str) -> Any:
    """The model as it is, but for what would drop units or whole branches by chance."""
    import keras

    options = {"include_preprocessing": False} if name in _WITH_PREPROCESSING else {}
    model = getattr(keras.applications, name)(
        weights=None,
        classes=10,
        classifier_activation=None,
        input_shape=(SIDES[name], SIDES[name], 3),
        **options,
    )
    if any("Dropout" in type(layer).__name__ for layer in model.layers):
        model = keras.models.clone_model(model, clone_function=_without_dropping)
    return model


def transfer() -> Any:
    """A frozen network with a head that is trained."""
    import keras

    base = keras.applications.MobileNetV2(weights=None, include_top=False, input_shape=(32, 32, 3))
    base.trainable = False
    layers = keras.layers
    return keras.Sequential([base, layers.GlobalAveragePooling2D(), layers.Dense(10)])


_WITH_PREPROCESSING = (
    "ConvNeXtTiny",
    "EfficientNetV2B0",
    "MobileNetV3Large",
    "MobileNetV3Small",
)


def _without_dropping(layer: Any) -> Any:
    config = layer.get_config()
    if "Dropout" in type(layer).__name__:
        config["rate"] = 0.0
    return type(layer).from_config(config)


MODELS = {
    name: RealModel(functools.partial(application, name), images(side), learning_rate=1e-5)
    for name, side in SIDES.items()
} | {"frozen MobileNetV2 with a new head": RealModel(transfer, images(32))}
