"""keras-rs: ratings from embeddings and feature crosses, a deep and cross network."""

import keras
import keras_rs
import numpy as np
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
names = ("user", "film", "hour")
x = {name: draw.integers(0, 50, 1024) for name in names}
y = (x["user"] % 5 + x["film"] % 3).astype("float32") / 6

inputs = {name: keras.layers.Input((), dtype="int32", name=name) for name in names}
embedded = [keras.layers.Embedding(50, 16)(each) for each in inputs.values()]
together = keras.layers.Concatenate()(embedded)
crossed = keras_rs.layers.FeatureCross()(together, together)
crossed = keras_rs.layers.FeatureCross(projection_dim=8)(together, crossed)
hidden = keras.layers.Dense(32, activation="relu")(crossed)
model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
model.compile(optimizer=keras.optimizers.Adagrad(0.05), loss="mse")
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=128, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
