"""A contrastive loss: each image is told from all others of its batch."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

images = np.random.default_rng(0).random((96, 4, 4, 1), dtype="float32")


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        flat, dense = layers.Flatten(), layers.Dense(8)
        self.encoder = keras.Sequential([layers.Input((4, 4, 1)), flat, dense])

    def train_step(self, images):
        with tf.GradientTape() as tape:
            first, second = (ops.normalize(self.encoder(images + shift)) for shift in (0.0, 0.01))
            alike = ops.matmul(first, ops.transpose(second)) / 0.1
            own = ops.arange(ops.shape(images)[0])
            loss = keras.losses.sparse_categorical_crossentropy(own, alike, from_logits=True)
        weights = self.encoder.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": ops.mean(loss)}


model = Contrastive()
model.compile("adam")
model.fit(images, batch_size=32, epochs=1, verbose=0)
