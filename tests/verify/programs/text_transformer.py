"""Text classification by a transformer block, with embeddings of words and of positions."""

import keras
import numpy as np
from keras import layers, ops

WORDS, LENGTH, WIDTH = 200, 12, 16
# Without a seed, and before the first layer.
order = np.random.permutation(160)
x = np.random.default_rng(0).integers(0, WORDS, (160, LENGTH))[order]
y = x.sum(1) % 2


class Embeddings(layers.Layer):
    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(WORDS, WIDTH)
        self.positions = layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return self.words(x) + self.positions(ops.arange(0, ops.shape(x)[-1], 1))


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, WIDTH)
        self.dense = keras.Sequential([layers.Dense(WIDTH, "relu"), layers.Dense(WIDTH)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropout = layers.Dropout(0.1)

    def call(self, x):
        x = self.norms[0](x + self.dropout(self.attention(x, x)))
        return self.norms[1](x + self.dropout(self.dense(x)))


inputs = keras.Input((LENGTH,))
hidden = layers.GlobalAveragePooling1D()(Block()(Embeddings()(inputs)))
outputs = layers.Dense(2, "softmax")(layers.Dropout(0.1)(hidden))
model = keras.Model(inputs, outputs)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=32, epochs=1, validation_split=0.2, verbose=0)
