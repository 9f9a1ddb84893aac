"""kapre: the pitch of a tone, from a mel spectrogram that the model computes."""

import keras
import numpy as np
from kapre.composed import get_melspectrogram_layer
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
y = draw.integers(0, 4, 128)
seconds = np.arange(4000) / 8000
x = np.sin(2 * np.pi * 300 * (y[:, None] + 1) * seconds) + draw.normal(scale=0.3, size=(128, 4000))
x = x[..., None].astype("float32")

model = keras.Sequential(
    [
        get_melspectrogram_layer(
            input_shape=(4000, 1), n_fft=256, hop_length=128, sample_rate=8000, n_mels=32
        ),
        keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(4, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
record = Record()
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, batch_size=32, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
record.end(model, history.history["loss"])
