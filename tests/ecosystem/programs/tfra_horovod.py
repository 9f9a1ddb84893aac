"""tensorflow-recommenders-addons: rows of dynamic embeddings, divided among Horovod's ranks.

`synchronous=True` adds up the gradients of the ranks, so each rank's loss is its part of the mean.
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from record import Record
from tensorflow_recommenders_addons import dynamic_embedding as de

hvd.init()
tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
user, film = draw.integers(0, 60, 1024), draw.integers(0, 40, 1024)
rating = ((user + film) % 5).astype("float32")


class Ratings(tf.keras.Model):
    def __init__(self):
        super().__init__()
        start = tf.keras.initializers.Constant(0.1)
        self.users = de.keras.layers.HvdAllToAllEmbedding(
            embedding_size=8, key_dtype=tf.int64, initializer=start, name="users"
        )
        self.films = de.keras.layers.HvdAllToAllEmbedding(
            embedding_size=8, key_dtype=tf.int64, initializer=start, name="films"
        )
        self.hidden = tf.keras.layers.Dense(16, activation="relu")
        self.out = tf.keras.layers.Dense(1)

    def call(self, inputs):
        both = tf.concat([self.users(inputs["user"]), self.films(inputs["film"])], axis=1)
        return self.out(self.hidden(both))


def part_of_the_mean(rating, expected):
    return tf.keras.losses.mean_squared_error(rating, expected) / hvd.size()


data = tf.data.Dataset.from_tensor_slices(({"user": user, "film": film}, rating))
data = data.shard(hvd.size(), hvd.rank()).batch(128 // hvd.size())
model = Ratings()
optimizer = tf.keras.optimizers.legacy.Adam(0.01)
model.compile(de.DynamicEmbeddingOptimizer(optimizer, synchronous=True), part_of_the_mean)
model(next(iter(data))[0])
record = Record()
dense = model.hidden.weights + model.out.weights
record.begin(dense)
callbacks = [
    de.keras.callbacks.DEHvdBroadcastGlobalVariablesCallback(root_rank=0),
    tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap),
]
history = model.fit(data, epochs=5, callbacks=callbacks, verbose=0)
losses = [hvd.allreduce(tf.constant(loss), op=hvd.Sum).numpy() for loss in history.history["loss"]]
record.end(dense, losses)
