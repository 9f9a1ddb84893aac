"""DeepXDE, backend tensorflow: the heat equation, bounds and start by construction."""

import os

os.environ["DDE_BACKEND"] = "tensorflow"

import deepxde as dde
import horovod.tensorflow as hvd
import keras
import numpy as np
from record import Record

hvd.init()
# The initializers that DeepXDE has names for drew their seeds when it was imported.
start = keras.initializers.GlorotNormal(seed=1)


def equation(x, y):
    return dde.grad.jacobian(y, x, i=0, j=1) - 0.4 * dde.grad.hessian(y, x, i=0, j=0)


def bounded(x, y):
    space, time = x[:, :1], x[:, 1:]
    return dde.backend.tf.sin(np.pi * space) + space * (1 - space) * time * y


domain = dde.geometry.GeometryXTime(dde.geometry.Interval(0, 1), dde.geometry.TimeDomain(0, 1))
points = np.random.default_rng(0).uniform(size=(128, 2)).astype("float32")
points = points[hvd.rank() :: hvd.size()]
data = dde.data.TimePDE(
    domain, equation, [], num_domain=0, num_boundary=0, num_initial=0, anchors=points
)
network = dde.nn.FNN([2, 32, 32, 1], "tanh", start)
network.apply_output_transform(bounded)
model = dde.Model(data, network)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)))
model.predict(points)
hvd.broadcast_variables(network.trainable_variables, root_rank=0)
record = Record()
record.begin(network.trainable_variables)
losses = []
for _ in range(4):
    history, _ = model.train(iterations=50, display_every=50, verbose=0)
    losses.append(float(hvd.allreduce(np.sum(history.loss_train[-1]))))
    record.lap()
record.end(network.trainable_variables, losses)
