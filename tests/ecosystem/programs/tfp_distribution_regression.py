"""tensorflow-probability: a regression whose output is a distribution."""

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from record import Record

tf.keras.utils.set_random_seed(1)
tfd = tfp.distributions
draw = np.random.default_rng(0)
x = draw.uniform(-1, 1, size=(512, 1)).astype("float32")
y = (2 * x + draw.normal(size=x.shape) * (0.2 + np.abs(x))).astype("float32")


def negative_log_likelihood(y, distribution):
    return -distribution.log_prob(y)


model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(16, activation="tanh", input_shape=(1,)),
        tf.keras.layers.Dense(2),
        tfp.layers.DistributionLambda(
            lambda t: tfd.Normal(loc=t[..., :1], scale=1e-3 + tf.math.softplus(0.5 * t[..., 1:]))
        ),
    ]
)
model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss=negative_log_likelihood)
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
