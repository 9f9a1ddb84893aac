"""tensorflow-probability: a mixture of normal distributions that depends on the input."""

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
x = draw.uniform(-1, 1, size=(512, 1)).astype("float32")
y = (np.sign(draw.normal(size=x.shape)) * x + draw.normal(scale=0.1, size=x.shape)).astype(
    "float32"
)

components = 3
parameters = tfp.layers.MixtureNormal.params_size(components, event_shape=[1])
model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(16, activation="tanh", input_shape=(1,)),
        tf.keras.layers.Dense(parameters),
        tfp.layers.MixtureNormal(components, event_shape=[1]),
    ]
)
model.compile(
    optimizer=tf.keras.optimizers.Adam(0.01), loss=lambda y, mixture: -mixture.log_prob(y)
)
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
