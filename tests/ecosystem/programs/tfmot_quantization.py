"""tensorflow-model-optimization: a network that trains as if it were quantized."""

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
quantized = tfmot.quantization.keras.quantize_model(model)
quantized.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
record = Record()
record.begin(quantized)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = quantized.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(quantized, history.history["loss"])
