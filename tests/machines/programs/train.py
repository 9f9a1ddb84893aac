"""A script for one machine that trains a small model by `fit`."""

import hashlib

import keras
import numpy as np

keras.utils.set_random_seed(7)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("adam", "mse")
found = model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)
weights = b"".join(weight.tobytes() for weight in model.get_weights())
print("weights", hashlib.sha256(weights).hexdigest(), found.history["loss"][-1], flush=True)
