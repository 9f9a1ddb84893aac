"""keras-hub: a small BERT that classifies texts, from its configuration."""

import keras
import keras_hub
import numpy as np
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
tokens = draw.integers(0, 100, (128, 16))
x = {
    "token_ids": tokens,
    "segment_ids": np.zeros_like(tokens),
    "padding_mask": np.ones_like(tokens, dtype=bool),
}
y = (tokens < 50).sum(axis=1) // 6

backbone = keras_hub.models.BertBackbone(
    vocabulary_size=100,
    num_layers=2,
    num_heads=4,
    hidden_dim=64,
    intermediate_dim=128,
    dropout=0.0,
    max_sequence_length=16,
)
model = keras_hub.models.BertTextClassifier(backbone, num_classes=3, dropout=0.0)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.AdamW(1e-3),
    metrics=["accuracy"],
)
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=32, epochs=4, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
