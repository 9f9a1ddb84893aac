"""tensorflow-recommenders: two towers by a retrieval task, and a search by brute force."""

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
user = draw.integers(0, 60, 1024)
rows = {"user": user, "film": (user + draw.integers(0, 5, 1024)) % 40}
films = tf.data.Dataset.range(40).batch(40)


class Retrieval(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.users = tf.keras.layers.Embedding(60, 16)
        self.films = tf.keras.layers.Embedding(40, 16)
        self.task = tfrs.tasks.Retrieval()

    def compute_loss(self, features, training=False):
        users, films = self.users(features["user"]), self.films(features["film"])
        return self.task(users, films, compute_metrics=False)


model = Retrieval()
model.compile(optimizer=tf.keras.optimizers.Adagrad(0.5))
data = tf.data.Dataset.from_tensor_slices(rows).batch(128)
batch = next(iter(data))
model.users(batch["user"]), model.films(batch["film"])
record = Record()
record.begin([*model.users.get_weights(), *model.films.get_weights()])
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(data, epochs=5, callbacks=[laps], verbose=0)
record.end([*model.users.get_weights(), *model.films.get_weights()], history.history["loss"])

index = tfrs.layers.factorized_top_k.BruteForce(model.users)
index.index_from_dataset(tf.data.Dataset.zip((films, films.map(model.films))))
_, found = index(tf.constant([7]), k=5)
assert found.shape == (1, 5)
