"""bayesflow: the posterior of two means by a coupling flow, from simulations made before.

Its train_step takes the gradient of a mean, which a strategy would add up over the ranks; so the
program is one for Horovod. `fit_offline` shuffles in each rank's own order: this dataset does not.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import bayesflow as bf
import horovod.tensorflow.keras as hvd
import keras
import numpy as np
from record import Record

hvd.init()
keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)


def prior():
    return {"mean": draw.normal(size=2)}


def likelihood(mean):
    return {"x": draw.normal(mean, 0.5, size=(8, 2))}


workflow = bf.BasicWorkflow(
    simulator=bf.make_simulator([prior, likelihood]),
    inference_network=bf.networks.CouplingFlow(
        depth=2, subnet_kwargs={"widths": (32, 32), "dropout": 0.0}
    ),
    summary_network=bf.networks.DeepSet(summary_dim=4, depth=1, dropout=0.0),
    inference_variables=["mean"],
    summary_variables=["x"],
    standardize=None,
)
record = Record()


class Watch(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        record.begin(self.model)

    def on_epoch_end(self, epoch, logs=None):
        record.lap()


data = workflow.simulate(256)
own = {name: part[hvd.rank() :: hvd.size()] for name, part in data.items()}
dataset = bf.OfflineDataset(own, 64 // hvd.size(), workflow.adapter, shuffle=False)
model = workflow.approximator
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)))
averaged = hvd.callbacks.MetricAverageCallback()
history = model.fit(dataset=dataset, epochs=4, callbacks=[averaged, Watch()], verbose=0)
record.end(model, history.history["loss"])
posterior = workflow.sample(conditions={"x": data["x"][:2]}, num_samples=5)
assert posterior["mean"].shape == (2, 5, 2)
