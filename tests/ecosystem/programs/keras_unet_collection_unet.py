"""keras-unet-collection: a U-Net that finds bright squares."""

import keras
import numpy as np
from keras_unet_collection import models
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
y = np.zeros((64, 32, 32, 1), "float32")
for image in y:
    row, column = draw.integers(0, 24, 2)
    image[row : row + 8, column : column + 8] = 1
x = (y + draw.normal(scale=0.5, size=y.shape)).astype("float32")

model = models.unet_2d(
    (32, 32, 1),
    [8, 16, 32],
    n_labels=1,
    stack_num_down=1,
    stack_num_up=1,
    activation="ReLU",
    output_activation="Sigmoid",
    batch_norm=False,
    name="unet",
)
model.compile("adam", "binary_crossentropy")
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=16, epochs=4, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
