"""scikeras: a grid search of scikit-learn over a network."""

import keras
import numpy as np
from record import Record
from scikeras.wrappers import KerasRegressor
from sklearn.model_selection import GridSearchCV

keras.utils.set_random_seed(1)
record = Record()
draw = np.random.default_rng(0)
x = draw.normal(size=(360, 6)).astype("float32")
y = x[:, 0] * x[:, 1] + x[:, 2]


def make_model(width):
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(width, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    record.begin(model)
    return model


regressor = KerasRegressor(
    make_model,
    model__width=8,
    loss="mse",
    optimizer="adam",
    optimizer__learning_rate=0.01,
    batch_size=60,
    epochs=4,
    fit__shuffle=False,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: record.lap())],
    verbose=0,
)
search = GridSearchCV(regressor, {"model__width": [8, 32]}, cv=2, error_score="raise").fit(x, y)
best = search.best_estimator_
record.end(best.model_, [*best.history_["loss"], *search.cv_results_["mean_test_score"]])
