"""tensorflow-lattice: monotonic calibrators and a lattice, by Keras layers."""

import numpy as np
import tensorflow as tf
import tensorflow_lattice as tfl
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
x = draw.uniform(size=(512, 2)).astype("float32")
y = (x[:, 0] ** 2 + np.sqrt(x[:, 1])).astype("float32")


def calibrated(name):
    given = tf.keras.layers.Input((1,), name=name)
    keypoints = np.linspace(0, 1, 5).astype("float32")
    calibrator = tfl.layers.PWLCalibration(
        input_keypoints=keypoints, output_min=0.0, output_max=1.0, monotonicity="increasing"
    )
    return given, calibrator(given)


(first, a), (second, b) = calibrated("first"), calibrated("second")
lattice = tfl.layers.Lattice([2, 2], monotonicities=["increasing", "increasing"])([a, b])
model = tf.keras.Model([first, second], lattice)
model.compile(tf.keras.optimizers.Adagrad(0.1), "mse")
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(
    [x[:, :1], x[:, 1:]],
    y,
    batch_size=64,
    epochs=5,
    shuffle=False,
    callbacks=[laps],
    verbose=0,
)
record.end(model, history.history["loss"])
