"""tensorflow-probability: a density by a masked autoregressive flow."""

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from record import Record

tf.keras.utils.set_random_seed(1)
tfb, tfd = tfp.bijectors, tfp.distributions
draw = np.random.default_rng(0)
first = draw.normal(size=(512, 1))
data = np.concatenate([first, first**2 + draw.normal(scale=0.3, size=first.shape)], axis=1)
data = data.astype("float32")

network = tfb.AutoregressiveNetwork(params=2, hidden_units=[16, 16], activation="relu")
flow = tfd.TransformedDistribution(
    distribution=tfd.Sample(tfd.Normal(loc=0.0, scale=1.0), sample_shape=[2]),
    bijector=tfb.MaskedAutoregressiveFlow(network),
)


class Density(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.network = network

    def call(self, inputs):
        return flow.log_prob(inputs)


model = Density()
model(data[:2])
model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss=lambda _, log_prob: -log_prob)
record = Record()
record.begin(network)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(
    data, np.zeros(len(data)), batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0
)
record.end(network, history.history["loss"])
