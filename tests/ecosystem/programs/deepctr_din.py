"""deepctr: interest in what somebody has bought before, by DIN."""

import numpy as np
import tensorflow as tf
from deepctr.feature_column import DenseFeat, SparseFeat, VarLenSparseFeat, get_feature_names
from deepctr.models import DIN
from record import Record

tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
rows = 512
columns = [
    SparseFeat("user", 20, embedding_dim=4),
    SparseFeat("item", 30, embedding_dim=8),
    DenseFeat("price", 1),
    VarLenSparseFeat(
        SparseFeat("hist_item", 30, embedding_dim=8, embedding_name="item"),
        maxlen=4,
        length_name="seq_length",
    ),
]
inputs = {
    "user": draw.integers(0, 20, rows),
    "item": draw.integers(1, 30, rows),
    "price": draw.normal(size=rows),
    "hist_item": draw.integers(1, 30, (rows, 4)),
    "seq_length": draw.integers(1, 5, rows),
}
inputs = {name: inputs[name] for name in get_feature_names(columns)}
bought = (inputs["item"] % 3 == inputs["hist_item"][:, 0] % 3).astype("float32")

model = DIN(columns, ["item"], dnn_hidden_units=(32, 16), att_hidden_size=(16, 8))
model.compile("adam", "binary_crossentropy")
record = Record()
record.begin(model)
laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(
    inputs, bought, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0
)
record.end(model, history.history["loss"])
