"""keras-hub: a small vision transformer that classifies images, from its configuration."""

import keras
import keras_hub
import numpy as np
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
y = draw.integers(0, 4, 128)
x = draw.normal(size=(128, 32, 32, 3)).astype("float32") + y[:, None, None, None]

backbone = keras_hub.models.ViTBackbone(
    image_shape=(32, 32, 3),
    patch_size=8,
    num_layers=2,
    num_heads=4,
    hidden_dim=64,
    mlp_dim=128,
    dropout_rate=0.0,
    attention_dropout=0.0,
)
model = keras_hub.models.ViTImageClassifier(backbone, num_classes=4, dropout=0.0)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
    metrics=["accuracy"],
)
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=32, epochs=4, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
