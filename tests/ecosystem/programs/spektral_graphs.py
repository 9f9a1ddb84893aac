"""spektral: graphs are classified by graph convolutions and a global pool."""

import numpy as np
import tensorflow as tf
from record import Record
from spektral.data import BatchLoader, Dataset, Graph
from spektral.layers import GCNConv, GlobalSumPool
from spektral.transforms import GCNFilter

tf.keras.utils.set_random_seed(1)


class Rings(Dataset):
    def read(self):
        draw = np.random.default_rng(0)
        return [self.graph(draw) for _ in range(128)]

    def graph(self, draw):
        label = draw.integers(0, 2)
        adjacency = np.roll(np.eye(8), 1, axis=1) if label else np.ones((8, 8)) - np.eye(8)
        nodes = draw.normal(size=(8, 4)).astype("float32")
        return Graph(x=nodes, a=np.maximum(adjacency, adjacency.T), y=np.eye(2)[label])


class Network(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.convolution = GCNConv(16, activation="relu")
        self.pool = GlobalSumPool()
        self.dense = tf.keras.layers.Dense(2, activation="softmax")

    def call(self, inputs):
        nodes, adjacency = inputs
        return self.dense(self.pool(self.convolution([nodes, adjacency])))


data = Rings(transforms=GCNFilter())
loader = BatchLoader(data, batch_size=32, epochs=5, shuffle=False)
model = Network()
model.compile("adam", "categorical_crossentropy")
inputs, _ = next(iter(BatchLoader(data, batch_size=32, shuffle=False)))
model(inputs)
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(
    loader.load(), steps_per_epoch=loader.steps_per_epoch, epochs=5, callbacks=[laps], verbose=0
)
record.end(model, history.history["loss"])
