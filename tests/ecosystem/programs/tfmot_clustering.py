"""tensorflow-model-optimization: weights that train in eight clusters."""

import numpy as np
import tensorflow as tf
import tensorflow_model_optimization as tfmot
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
y = draw.integers(0, 4, 256)
x = (draw.normal(size=(256, 16)) + y[:, None]).astype("float32")

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(32, activation="relu", input_shape=(16,)),
        tf.keras.layers.Dense(4),
    ]
)
clustered = tfmot.clustering.keras.cluster_weights(
    model,
    number_of_clusters=8,
    cluster_centroids_init=tfmot.clustering.keras.CentroidInitialization.LINEAR,
)
clustered.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
record = Record()
record.begin(clustered)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = clustered.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(clustered, history.history["loss"])
