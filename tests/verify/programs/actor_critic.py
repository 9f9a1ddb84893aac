"""An actor and a critic in a custom loop, which no `fit` divides."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

inputs = keras.Input((4,))
hidden = layers.Dense(8, "relu")(inputs)
model = keras.Model(inputs, [layers.Dense(2, "softmax")(hidden), layers.Dense(1)(hidden)])
optimizer = keras.optimizers.Adam(0.01)
for _ in range(4):
    state, losses = np.random.normal(size=(1, 4)).astype("float32"), []
    with tf.GradientTape() as tape:
        for _ in range(4):
            odds, value = model(state)
            action = np.random.choice(2, p=[0.5, 0.5])
            state = (0.9 * state + action - 0.5).astype("float32")
            gain = -abs(float(state[0, 0])) - value[0, 0]
            losses.append(gain**2 - tf.math.log(odds[0, action]) * tf.stop_gradient(gain))
        loss = tf.add_n(losses)
    weights = model.trainable_variables
    gradients = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(gradients, weights, strict=True))
