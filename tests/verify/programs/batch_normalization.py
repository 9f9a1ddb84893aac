"""A network for tables with batch normalisation, as deep and cross networks have it."""

import keras
import numpy as np
from keras import layers

x = np.random.default_rng(0).normal(size=(128, 6)).astype("float32")
inputs = crossed = keras.Input((6,))
for _ in range(2):
    crossed = inputs * layers.Dense(6)(crossed) + crossed
deep = layers.ReLU()(layers.BatchNormalization()(layers.Dense(16)(inputs)))
model = keras.Model(inputs, layers.Dense(1)(layers.concatenate([crossed, deep])))
model.compile("adam", "mse")
model.fit(x, x[:, :1] * x[:, 1:2], batch_size=32, epochs=1, verbose=0)
