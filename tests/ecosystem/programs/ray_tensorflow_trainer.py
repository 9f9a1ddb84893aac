"""Ray's own `TensorflowTrainer`: a function with a `MultiWorkerMirroredStrategy`, as in its guide.

Ray has its workers use Keras 2 (`tf_keras`), and tells them of each other by TF_CONFIG.
"""

import os

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config):
    import numpy as np
    import tensorflow as tf
    from record import Record

    tf.keras.utils.set_random_seed(1)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(512, 10)).astype("float32")
    y = np.sin(x).sum(axis=1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((10,)),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(1),
            ]
        )
        model.compile(tf.keras.optimizers.SGD(config["rate"]), "mse")
    record = Record()
    record.begin(model)
    laps = tf.keras.callbacks.LambdaCallback(on_epoch_end=record.lap)
    history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, callbacks=[laps], verbose=0)
    record.end(model, history.history["loss"])
    ray.train.report({"loss": history.history["loss"][-1]})


here = os.path.dirname(os.path.abspath(__file__))
variables = {"PYTHONPATH": here, "ECOSYSTEM_RECORD": os.environ.get("ECOSYSTEM_RECORD", "")}
ray.init(include_dashboard=False, runtime_env={"env_vars": variables}, num_cpus=2)
trainer = TensorflowTrainer(
    train,
    train_loop_config={"rate": 0.01},
    scaling_config=ScalingConfig(num_workers=int(os.environ["ECOSYSTEM_RANKS"])),
    run_config=RunConfig(storage_path=os.path.abspath("results")),
)
trainer.fit()
ray.shutdown()
