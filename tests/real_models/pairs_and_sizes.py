"""Several networks at once, and layers in extreme numbers and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from real_models.real_model import Part, RealModel, arrays, words

SIDE = 600
NOISE = 64


def tower() -> Any:
    """A network with 1.6 MB of gradients, and synchronised normalisation."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((SIDE,)),
            layers.Dense(SIDE),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(64),
        ]
    )


def two_towers() -> Any:
    """A user and an item, with a network each."""
    import keras

    user, item = keras.Input((SIDE,)), keras.Input((SIDE,))
    met = keras.layers.Dot(1, normalize=True)([tower()(user), tower()(item)])
    return keras.Model([user, item], met)


def siamese() -> Any:
    """Two inputs, and one network for both."""
    import keras

    layers = keras.layers
    left, right = keras.Input((SIDE,)), keras.Input((SIDE,))
    shared = keras.Sequential(
        [
            layers.Input((SIDE,)),
            layers.Dense(SIDE, activation="relu"),
            layers.Dense(SIDE, activation="relu"),
        ]
    )
    met = layers.Subtract()([shared(left), shared(right)])
    return keras.Model([left, right], layers.Dense(1)(met))


def couples(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Two vectors, and how alike they are."""
    left, right = (draw.normal(size=(count, SIDE)) for _ in range(2))
    return (left, right), draw.normal(size=(count, 1))


def gan() -> Any:
    """A generator and a discriminator, each with an optimizer; `fit` takes both steps."""
    import keras
    import tensorflow as tf

    layers = keras.layers

    class Gan(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.Sequential(
                [
                    layers.Input((NOISE,)),
                    layers.Dense(8 * 8 * 64, activation="relu"),
                    layers.Reshape((8, 8, 64)),
                    layers.Conv2DTranspose(128, 4, 2, padding="same", activation="relu"),
                    layers.Conv2DTranspose(3, 4, 2, padding="same", activation="tanh"),
                ]
            )
            self.discriminator = keras.Sequential(
                [
                    layers.Input((32, 32, 3)),
                    layers.Conv2D(64, 4, 2, padding="same"),
                    layers.LeakyReLU(),
                    layers.Conv2D(256, 4, 2, padding="same"),
                    layers.LeakyReLU(),
                    layers.Flatten(),
                    layers.Dense(1),
                ]
            )

        def compile(self, optimizers: Any, **_: Any) -> None:
            super().compile()
            self.optimizers = optimizers

        def train_step(self, data: Any) -> Any:
            x, y = data
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            losses = []
            for (loss_of, weights), optimizer in zip(
                gan_parts(self, x, y), self.optimizers, strict=True
            ):
                with tf.GradientTape() as tape:
                    loss = loss_of()
                    share = loss / replicas
                optimizer.apply(tape.gradient(share, weights), weights)
                losses.append(loss)
            return {"loss": sum(losses)}

    return Gan()


def gan_parts(model: Any, x: Any, _: Any) -> list[Part]:
    """The discriminator's loss, then the generator's."""
    import tensorflow as tf

    def entropy(logits: Any, is_real: bool) -> Any:
        labels = tf.ones_like(logits) if is_real else tf.zeros_like(logits)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))

    def told_apart() -> Any:
        pictures, noise = x
        made = model.generator(noise, training=True)
        return entropy(model.discriminator(pictures, training=True), True) + entropy(
            model.discriminator(made, training=True), False
        )

    def deceived() -> Any:
        made = model.generator(x[1], training=True)
        return entropy(model.discriminator(made, training=True), True)

    return [
        (told_apart, model.discriminator.trainable_variables),
        (deceived, model.generator.trainable_variables),
    ]


def pictures_and_noise(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
    """What a GAN sees; the noise is an input, so that one process can have the same."""
    pictures = draw.normal(size=(count, 32, 32, 3))
    return (pictures, draw.normal(size=(count, NOISE))), np.zeros(count)


def vae() -> Any:
    """A variational autoencoder, whose second loss comes from a layer by `add_loss`."""
    import keras

    layers, ops = keras.layers, keras.ops

    class Sampling(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            mean, log_variance, noise = inputs
            divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            self.add_loss(-0.5 * ops.mean(ops.sum(divergence, axis=1)))
            return mean + ops.exp(0.5 * log_variance) * noise

    seen, noise = keras.Input((28, 28, 1)), keras.Input((16,))
    x = layers.Conv2D(32, 3, 2, padding="same", activation="relu")(seen)
    x = layers.Conv2D(64, 3, 2, padding="same", activation="relu")(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    x = Sampling()([layers.Dense(16)(x), layers.Dense(16)(x), noise])
    x = layers.Reshape((7, 7, 64))(layers.Dense(7 * 7 * 64, activation="relu")(x))
    x = layers.Conv2DTranspose(64, 3, 2, padding="same", activation="relu")(x)
    return keras.Model([seen, noise], layers.Conv2DTranspose(1, 3, 2, padding="same")(x))


def digits_and_noise(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
    """What a VAE sees and has to draw again."""
    seen = draw.uniform(size=(count, 28, 28, 1))
    return (seen, draw.normal(size=(count, 16))), seen


def hundred_layers() -> Any:
    """`keras.Sequential` of 100 layers; an orthogonal kernel keeps gradients alive."""
    import keras

    layers = keras.layers
    hidden = [layers.Dense(64, "tanh", kernel_initializer="orthogonal") for _ in range(98)]
    return keras.Sequential([layers.Input((64,)), *hidden, layers.Flatten(), layers.Dense(10)])


def large_layer() -> Any:
    """A layer of 300 MB in float32: a bucket of twenty times the usual size."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(8660, activation="relu"),
            layers.Dense(8660, activation="relu"),
            layers.Dense(10),
        ]
    )


def large_embedding() -> Any:
    """Ten million parameters, of which a batch touches some rows."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((50,), dtype="int32"),
            layers.Embedding(100_000, 100),
            layers.GlobalAveragePooling1D(),
            layers.Dense(10),
        ]
    )


def perceptron() -> Any:
    """Layers of 4 MiB each, in a model of a user's own class."""
    import keras

    class Perceptron(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(4)]
            self.last = keras.layers.Dense(10)

        def call(self, x: Any) -> Any:
            for layer in self.hidden:
                x = layer(x)
            return self.last(x)

    model = Perceptron()
    model(keras.ops.zeros((1, 784)))
    return model


MODELS = {
    "two towers, synchronised BN": RealModel(two_towers, couples, "values"),
    "two towers, shared layers": RealModel(siamese, couples, "values", learning_rate=1e-3),
    "GAN": RealModel(gan, pictures_and_noise, "own", parts=gan_parts),
    "VAE": RealModel(vae, digits_and_noise, "values"),
    "Sequential of 100 layers": RealModel(hundred_layers, arrays((64,))),
    "layer of 300 MB": RealModel(large_layer, arrays((64,))),
    "embedding of 10 M parameters": RealModel(large_embedding, words(100_000, 50)),
    "perceptron of a class of its own": RealModel(perceptron, arrays((784,))),
}
