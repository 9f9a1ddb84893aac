"""keras-tuner: a hypermodel of a class of its own, by Hyperband."""

import keras
import keras_tuner
import numpy as np
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
y = draw.integers(0, 3, 384)
x = (draw.normal(size=(384, 8, 8, 1)) + y[:, None, None, None]).astype("float32")


class Network(keras_tuner.HyperModel):
    def build(self, hp):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.layers.Input((8, 8, 1))])
        model.add(keras.layers.Conv2D(hp.Choice("filters", [4, 8]), 3, activation="relu"))
        if hp.Boolean("pool"):
            model.add(keras.layers.MaxPooling2D())
        model.add(keras.layers.Flatten())
        model.add(keras.layers.Dense(3, activation="softmax"))
        rate = hp.Choice("rate", [1e-2, 1e-3])
        model.compile(
            keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        return model


record = Record()
tuner = keras_tuner.Hyperband(
    Network(), "val_loss", max_epochs=4, factor=2, seed=3, directory="tuning", project_name="band"
)
fitted = dict(batch_size=64, shuffle=False, verbose=0)
tuner.search(x[:256], y[:256], validation_data=(x[256:], y[256:]), **fitted)
model = tuner.get_best_models()[0]
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, epochs=5, callbacks=[laps], **fitted)
record.end(model, history.history["loss"])
