"""keras.applications: an architecture, two steps, with random weights.

The second half of a batch has the images of the first half, and other labels. So the statistics of
each half are those of the batch, and what a `BatchNormalization` does on a rank, with its half, is
what it does in one process; gradients differ all the same.
"""

import sys

import keras
import numpy as np
from record import Record

# In smaller images the last layers see one pixel, and normalise two values: each multiplies the
# gradient by hundreds then, and that of DenseNet121 overflows. ConvNeXt normalises channels.
SIDE, OTHER_SIDES = 96, {"InceptionV3": 139}
SIDE_OF_CONVNEXT = 32


def without_dropping(layer):
    config = layer.get_config()
    if "Dropout" in type(layer).__name__:
        config["rate"] = 0.0
    return type(layer).from_config(config)


keras.utils.set_random_seed(1)
(name,) = sys.argv[1:]
side = SIDE_OF_CONVNEXT if name.startswith("ConvNeXt") else OTHER_SIDES.get(name, SIDE)
draw = np.random.default_rng(0)
images = draw.uniform(0, 255, size=(2, side, side, 3)).astype("float32")
x, y = np.concatenate([images, images]), np.array([1, 2, 3, 4])

model = getattr(keras.applications, name)(weights=None, classes=10, input_shape=(side, side, 3))
if any("Dropout" in type(layer).__name__ for layer in model.layers):
    model = keras.models.clone_model(model, clone_function=without_dropping)
model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"], parameters=model.count_params())
