"""Ray Train: a function that calls `fit`, on workers that Ray places."""

import os

import ray.train
from ray.train import RunConfig, ScalingConfig

from gradring.ray import GradringTrainer  # changed


def train(config):
    import keras
    import numpy as np
    from record import Record

    import gradring.tensorflow  # changed

    keras.utils.set_random_seed(1)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(512, 10)).astype("float32")
    y = np.sin(x).sum(axis=1)
    strategy = gradring.tensorflow.CustomCollectiveStrategy()  # changed
    with strategy.scope():  # changed
        model = keras.Sequential(
            [
                keras.layers.Input((10,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(config["rate"]), "mse")
    record = Record()
    record.begin(model)
    laps = keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
    history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
    record.end(model, history.history["loss"])
    ray.train.report({"loss": history.history["loss"][-1]})


here = os.path.dirname(os.path.abspath(__file__))
variables = {"PYTHONPATH": here, "ECOSYSTEM_RECORD": os.environ.get("ECOSYSTEM_RECORD", "")}
ray.init(include_dashboard=False, runtime_env={"env_vars": variables}, num_cpus=2)
trainer = GradringTrainer(
    train,
    train_loop_config={"rate": 0.01},
    scaling_config=ScalingConfig(num_workers=int(os.environ["ECOSYSTEM_RANKS"])),
    run_config=RunConfig(storage_path=os.path.abspath("results")),
)
trainer.fit()
ray.shutdown()
