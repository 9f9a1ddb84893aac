"""keras-tcn: the adding problem, of two marked numbers in a sequence."""

import keras
import numpy as np
from record import Record
from tcn import TCN

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
x = np.stack([draw.uniform(size=(256, 50)), np.zeros((256, 50))], axis=-1).astype("float32")
for row in x:
    row[draw.choice(50, 2, replace=False), 1] = 1
y = np.sum(x[..., 0] * x[..., 1], axis=1)

model = keras.Sequential(
    [
        keras.layers.Input((50, 2)),
        TCN(16, kernel_size=4, dilations=(1, 2, 4, 8)),
        keras.layers.Dense(1),
    ]
)
model.compile("adam", "mse")
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
