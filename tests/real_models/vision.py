"""Images and volumes."""

from __future__ import annotations

from typing import Any

import numpy as np

from real_models.real_model import RealModel, arrays, images


def unet() -> Any:
    """Four levels down and up, with biases, each level joined with its counterpart."""
    import keras

    layers = keras.layers

    def twice(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    x = inputs = keras.Input((32, 32, 3))
    passed = []
    for filters in (32, 64, 128):
        x = twice(x, filters)
        passed.append(x)
        x = layers.MaxPooling2D()(x)
    x = twice(x, 256)
    for filters in (128, 64, 32):
        x = layers.Conv2DTranspose(filters, 2, 2)(x)
        x = twice(layers.Concatenate()([x, passed.pop()]), filters)
    return keras.Model(inputs, layers.Conv2D(4, 1)(x))


def pixels(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Images, and a class for each pixel."""
    return draw.normal(size=(count, 32, 32, 3)), draw.integers(0, 4, (count, 32, 32))


def vit() -> Any:
    """Six layers of attention over 64 patches, which learn their positions."""
    import keras

    layers = keras.layers

    class Positions(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=shape[1:], name="positions")

        def call(self, x: Any) -> Any:
            return x + self.table

    inputs = keras.Input((32, 32, 3))
    x = layers.Reshape((64, 192))(layers.Conv2D(192, 4, 4)(inputs))
    x = Positions()(x)
    for _ in range(6):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(3, 64)(y, y)])
        y = layers.Dense(768, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(192)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def two_convolutions() -> Any:
    """With biases, and a kernel that is a bucket by itself."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((16, 16, 3)),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Conv2D(512, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def blocks(side: int, channels: tuple[int, ...]) -> Any:
    """Residual blocks with a shortcut that has a layer, and synchronised normalisation in both."""
    import keras

    layers = keras.layers

    def normalised(x: Any, filters: int, size: int) -> Any:
        x = layers.Conv2D(filters, size, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(synchronized=True)(x)

    x = inputs = keras.Input((side, side, 32))
    for filters in channels:
        y = normalised(layers.ReLU()(normalised(x, filters, 3)), filters, 3)
        x = layers.ReLU()(layers.Add()([normalised(x, filters, 1), y]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def small_resnet() -> Any:
    """Three blocks."""
    return blocks(8, (64, 128, 256))


def one_block() -> Any:
    """One wide block."""
    return blocks(8, (256,))


def squeeze_and_excite() -> Any:
    """Branches that meet by multiplication, with biases before the normalisation of each half."""
    import keras

    layers = keras.layers
    x = inputs = keras.Input((16, 16, 3))
    for filters in (64, 256):
        x = layers.Conv2D(filters, 3, padding="same")(x)
        x = layers.Activation("swish")(layers.BatchNormalization()(x))
        y = layers.GlobalAveragePooling2D(keepdims=True)(x)
        y = layers.Conv2D(filters // 4, 1, activation="relu")(y)
        x = layers.Multiply()([x, layers.Conv2D(filters, 1, activation="sigmoid")(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def volumes() -> Any:
    """Conv3D."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 16, 16, 1)),
            layers.Conv3D(32, 3, (1, 2, 2), activation="relu"),
            layers.Conv3D(128, 3, padding="same", activation="relu"),
            layers.Conv3D(128, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling3D(),
            layers.Dense(10),
        ]
    )


def separable() -> Any:
    """Separable and depthwise convolutions, and one in groups."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(64, 3, strides=2, padding="same"),
            layers.SeparableConv2D(256, 3, padding="same", activation="relu"),
            layers.DepthwiseConv2D(3, padding="same", activation="relu"),
            layers.Conv2D(256, 3, groups=4, padding="same", activation="relu"),
            layers.SeparableConv2D(1024, 3, strides=2, padding="same", activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(10),
        ]
    )


def autoencoder() -> Any:
    """Strided convolutions, and transposed ones back."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(64, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(128, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(256, 3, 2, padding="same", activation="relu"),
            layers.Conv2DTranspose(128, 3, 2, padding="same", activation="relu"),
            layers.Conv2DTranspose(64, 3, 2, padding="same", activation="relu"),
            layers.Conv2DTranspose(3, 3, 2, padding="same"),
        ]
    )


def same_images(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Images that are their own labels."""
    shown = draw.normal(size=(count, 32, 32, 3))
    return shown, shown


MODELS = {
    "U-Net": RealModel(unet, pixels),
    "ViT": RealModel(vit, images(32)),
    "two convolutions with biases": RealModel(two_convolutions, images(16)),
    "residual blocks, synchronised BN": RealModel(small_resnet, images(8, 32)),
    "wide residual block, synchronised BN": RealModel(one_block, images(8, 32)),
    "squeeze and excite": RealModel(squeeze_and_excite, images(16)),
    "Conv3D": RealModel(volumes, arrays((8, 16, 16, 1))),
    "separable, depthwise, grouped convolutions": RealModel(separable, images(32)),
    "transposed convolutions": RealModel(autoencoder, same_images, "values"),
}
