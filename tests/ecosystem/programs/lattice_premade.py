"""tensorflow-lattice: a premade calibrated lattice with a category."""

import numpy as np
import tensorflow as tf
import tensorflow_lattice as tfl
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
age, kind = draw.uniform(20, 80, 512).astype("float32"), draw.integers(0, 3, 512)
y = (age / 40 + kind).astype("float32")

config = tfl.configs.CalibratedLatticeConfig(
    feature_configs=[
        tfl.configs.FeatureConfig(
            name="age",
            lattice_size=3,
            monotonicity="increasing",
            pwl_calibration_num_keypoints=5,
            pwl_calibration_input_keypoints=[20.0, 35.0, 50.0, 65.0, 80.0],
        ),
        tfl.configs.FeatureConfig(name="kind", num_buckets=3),
    ],
    output_initialization=[0.0, 4.0],
)
model = tfl.premade.CalibratedLattice(config)
model.compile(loss="mse", optimizer=tf.keras.optimizers.Adam(0.05))
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(
    [age[:, None], kind[:, None].astype("float32")],
    y,
    batch_size=64,
    epochs=5,
    shuffle=False,
    callbacks=[laps],
    verbose=0,
)
record.end(model, history.history["loss"])
