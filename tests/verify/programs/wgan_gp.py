"""A WGAN with a gradient penalty: two optimizers, three tapes and noise in one step."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

images = np.random.default_rng(0).random((128, 4, 4, 1), dtype="float32")
critic = keras.Sequential([layers.Input((4, 4, 1)), layers.Conv2D(4, 3), layers.LeakyReLU(0.2)])
critic.add(layers.Flatten())
critic.add(layers.Dense(1))
generator = keras.Sequential([layers.Input((8,)), layers.Dense(16), layers.Reshape((4, 4, 1))])


class WGAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic, self.generator = critic, generator

    def compile(self, of_critic, of_generator):
        super().compile()
        self.of_critic, self.of_generator = of_critic, of_generator

    def penalty(self, real, fake):
        mixed = real + tf.random.uniform([tf.shape(real)[0], 1, 1, 1]) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            judged = self.critic(mixed, training=True)
        slopes = tf.reduce_sum(tape.gradient(judged, [mixed])[0] ** 2, axis=[1, 2, 3])
        return tf.reduce_mean((tf.sqrt(slopes) - 1.0) ** 2)

    def train_step(self, real):
        noise = tf.random.normal([tf.shape(real)[0], 8])
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                loss = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
                loss += 10.0 * self.penalty(real, fake)
            weights = self.critic.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.of_critic.apply_gradients(zip(gradients, weights, strict=True))
        with tf.GradientTape() as tape:
            cost = -tf.reduce_mean(self.critic(self.generator(noise, training=True)))
        weights = self.generator.trainable_variables
        gradients = tape.gradient(cost, weights)
        self.of_generator.apply_gradients(zip(gradients, weights, strict=True))
        return {"critic": loss, "generator": cost}


model = WGAN()
model.compile(*(keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(2)))
model.fit(images, batch_size=32, epochs=1, verbose=0)
