"""larq: a network of binary weights and activations."""

import larq as lq
import numpy as np
import tensorflow as tf
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
y = draw.integers(0, 4, 256)
x = (draw.normal(size=(256, 32)) + y[:, None]).astype("float32")
binary = dict(kernel_quantizer="ste_sign", kernel_constraint="weight_clip", use_bias=False)

model = tf.keras.Sequential(
    [
        lq.layers.QuantDense(64, input_shape=(32,), **binary),
        lq.layers.QuantDense(64, input_quantizer="ste_sign", **binary),
        lq.layers.QuantDense(4, input_quantizer="ste_sign", **binary),
        tf.keras.layers.Activation("softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy")
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
