"""deepctr: the click-through rate of synthetic advertisements, by DeepFM."""

import numpy as np
import tensorflow as tf
from deepctr.feature_column import DenseFeat, SparseFeat, get_feature_names
from deepctr.models import DeepFM
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
rows = 1024
columns = [SparseFeat(f"category{i}", 20, embedding_dim=4) for i in range(4)]
columns += [DenseFeat(f"number{i}", 1) for i in range(3)]
inputs = {
    name: draw.integers(0, 20, rows) if "category" in name else draw.normal(size=rows)
    for name in get_feature_names(columns)
}
clicks = (inputs["category0"] % 3 + inputs["number0"] > 1).astype("float32")

model = DeepFM(columns, columns, dnn_hidden_units=(32, 32), task="binary")
model.compile("adam", "binary_crossentropy")
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(
    inputs, clicks, batch_size=128, epochs=5, shuffle=False, callbacks=[laps], verbose=0
)
record.end(model, history.history["loss"])
