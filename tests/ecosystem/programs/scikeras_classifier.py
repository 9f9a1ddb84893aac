"""scikeras: a network as a classifier of scikit-learn."""

import keras
from record import Record
from scikeras.wrappers import KerasClassifier
from sklearn.datasets import make_classification
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

keras.utils.set_random_seed(1)
record = Record()
x, y = make_classification(512, 20, n_informative=10, random_state=0)


def make_model(meta, width):
    model = keras.Sequential(
        [
            keras.layers.Input((meta["n_features_in_"],)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    record.begin(model)
    return model


classifier = KerasClassifier(
    make_model,
    model__width=64,
    loss="binary_crossentropy",
    optimizer="adam",
    batch_size=64,
    epochs=5,
    fit__shuffle=False,
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: record.lap())],
    verbose=0,
)
pipeline = make_pipeline(StandardScaler(), classifier).fit(x, y)
assert pipeline.score(x, y) > 0.7
record.end(classifier.model_, classifier.history_["loss"])
