"""tensorflow-recommenders: ratings by a ranking task and a cross layer."""

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
rows = {
    "user": draw.integers(0, 60, 1024).astype(str),
    "film": draw.integers(0, 40, 1024).astype(str),
    "rating": draw.integers(1, 6, (1024, 1)).astype("float32"),
}


class Ranking(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.users = tf.keras.Sequential(
            [
                tf.keras.layers.StringLookup(vocabulary=np.unique(rows["user"])),
                tf.keras.layers.Embedding(61, 16),
            ]
        )
        self.films = tf.keras.Sequential(
            [
                tf.keras.layers.StringLookup(vocabulary=np.unique(rows["film"])),
                tf.keras.layers.Embedding(41, 16),
            ]
        )
        self.cross = tfrs.layers.dcn.Cross(kernel_initializer="glorot_uniform")
        self.ratings = tf.keras.Sequential(
            [tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(1)]
        )
        self.task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.SUM),
            metrics=[tf.keras.metrics.RootMeanSquaredError()],
        )

    def call(self, features):
        both = tf.concat([self.users(features["user"]), self.films(features["film"])], axis=1)
        return self.ratings(self.cross(both))

    def compute_loss(self, features, training=False):
        return self.task(labels=features["rating"], predictions=self(features))


model = Ranking()
model.compile(optimizer=tf.keras.optimizers.Adagrad(0.02))
data = tf.data.Dataset.from_tensor_slices(rows).batch(128).cache()
model(next(iter(data)))
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(data, epochs=5, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
