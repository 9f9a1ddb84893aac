"""keras-rs: clicks from categories and numbers, with dot interactions (DLRM)."""

import keras
import keras_rs
import numpy as np
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
numbers = draw.normal(size=(1024, 8)).astype("float32")
categories = draw.integers(0, 100, (1024, 4))
y = (numbers[:, 0] + categories[:, 0] % 2 > 0.5).astype("float32")


class Dlrm(keras.Model):
    def __init__(self):
        super().__init__()
        self.bottom = keras.Sequential(
            [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(16)]
        )
        self.embeddings = [keras.layers.Embedding(100, 16) for _ in range(4)]
        self.interact = keras_rs.layers.DotInteraction()
        self.top = keras.Sequential(
            [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
        )

    def call(self, inputs):
        numbers, categories = inputs
        dense = self.bottom(numbers)
        sparse = [embed(categories[:, i]) for i, embed in enumerate(self.embeddings)]
        crossed = self.interact([dense, *sparse])
        return self.top(keras.ops.concatenate([dense, crossed], axis=1))


model = Dlrm()
model.compile("adam", "binary_crossentropy", metrics=["auc"])
model((numbers[:2], categories[:2]))
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(
    (numbers, categories), y, batch_size=128, epochs=5, shuffle=False, callbacks=[laps], verbose=0
)
record.end(model, history.history["loss"])
