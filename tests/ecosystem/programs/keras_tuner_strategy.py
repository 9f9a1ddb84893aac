"""keras-tuner: random search with its argument `distribution_strategy`, on several workers."""

import keras
import keras_tuner
import numpy as np
import tensorflow as tf
from record import Record

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
x = draw.normal(size=(512, 10)).astype("float32")
y = np.sin(x).sum(axis=1)
strategy = tf.distribute.MultiWorkerMirroredStrategy()


def make_model(hp):
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.layers.Input((10,)),
            keras.layers.Dense(hp.Int("units", 16, 64, step=16), activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    rate = hp.Float("rate", 1e-3, 1e-1, sampling="log")
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


record = Record()
tuner = keras_tuner.RandomSearch(
    make_model,
    objective="val_loss",
    max_trials=3,
    seed=3,
    distribution_strategy=strategy,
    directory="tuning",
    project_name="sines",
)
search = dict(batch_size=64, shuffle=False, verbose=0)
tuner.search(x[:384], y[:384], validation_data=(x[384:], y[384:]), epochs=2, **search)
with strategy.scope():
    model = tuner.hypermodel.build(tuner.get_best_hyperparameters()[0])
record.begin(model)
laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
history = model.fit(x, y, epochs=5, callbacks=[laps], **search)
trials = sorted(tuner.oracle.trials.values(), key=lambda trial: trial.trial_id)
record.end(model, [*history.history["loss"], *(trial.score for trial in trials)])
