"""keras-hub: a small GPT-2 that learns the next token, from its configuration."""

import keras
import keras_hub
import numpy as np
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
tokens = (draw.integers(0, 64, (128, 1)) + 3 * np.arange(17)) % 64
x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((128, 16), dtype=bool)}

backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=64,
    num_layers=2,
    num_heads=4,
    hidden_dim=64,
    intermediate_dim=128,
    dropout=0.0,
    max_sequence_length=16,
)
model = keras_hub.models.GPT2CausalLM(backbone)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
)
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(
    x, tokens[:, 1:], batch_size=32, epochs=4, shuffle=False, callbacks=[laps], verbose=0
)
record.end(model, history.history["loss"])
