"""tensorflow-model-optimization: half of the weights are pruned while a network trains."""

import numpy as np
import tensorflow as tf
import tensorflow_model_optimization as tfmot
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
y = draw.integers(0, 4, 256)
x = (draw.normal(size=(256, 12, 12, 1)) + y[:, None, None, None]).astype("float32")

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(12, 12, 1)),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(4),
    ]
)
schedule = tfmot.sparsity.keras.PolynomialDecay(0.0, 0.5, begin_step=0, end_step=16, frequency=4)
pruned = tfmot.sparsity.keras.prune_low_magnitude(model, pruning_schedule=schedule)
pruned.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
record = Record()
record.begin(pruned)
callbacks = [
    tfmot.sparsity.keras.UpdatePruningStep(),
    tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap),
]
history = pruned.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=callbacks, verbose=0)
record.end(pruned, history.history["loss"])
stripped = tfmot.sparsity.keras.strip_pruning(pruned)
kernel = stripped.layers[-1].get_weights()[0]
assert abs(np.mean(kernel == 0) - 0.5) < 0.1
