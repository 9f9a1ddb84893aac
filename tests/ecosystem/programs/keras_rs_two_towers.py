"""keras-rs: two towers with sampled negatives, and retrieval of the best candidates."""

import keras
import keras_rs
import numpy as np
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
users, films = 60, 40
x = {"user": draw.integers(0, users, 1024), "film": draw.integers(0, films, 1024)}
y = ((x["user"] + x["film"]) % 4 == 0).astype("float32")

user = keras.layers.Input((), dtype="int32", name="user")
film = keras.layers.Input((), dtype="int32", name="film")
user_tower = keras.Sequential([keras.layers.Embedding(users, 32), keras.layers.Dense(16)])
film_tower = keras.Sequential([keras.layers.Embedding(films, 32), keras.layers.Dense(16)])
score = keras.layers.Dot(axes=1)([user_tower(user), film_tower(film)])
model = keras.Model({"user": user, "film": film}, score)
model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=128, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])

candidates = film_tower(keras.ops.arange(films))
retrieval = keras_rs.layers.BruteForceRetrieval(candidates, k=5)
scores, found = retrieval(user_tower(keras.ops.arange(3)))
assert found.shape == (3, 5)
