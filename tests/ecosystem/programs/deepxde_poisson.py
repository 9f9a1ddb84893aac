"""DeepXDE, backend tensorflow: Poisson's equation in one dimension, bounds by construction."""

import os

os.environ["DDE_BACKEND"] = "tensorflow"

import deepxde as dde
import horovod.tensorflow as hvd
import keras
import numpy as np
from record import Record

hvd.init()
# The initializers that DeepXDE has names for drew their seeds when it was imported.
start = keras.initializers.GlorotUniform(seed=1)


def equation(x, y):
    second = dde.grad.hessian(y, x)
    return -second - np.pi**2 * dde.backend.tf.sin(np.pi * x)


interval = dde.geometry.Interval(0, 1)
points = np.linspace(0, 1, 66)[1:-1, None].astype("float32")
points = points[hvd.rank() :: hvd.size()]
data = dde.data.PDE(interval, equation, [], num_domain=0, num_boundary=0, anchors=points)
network = dde.nn.FNN([1, 32, 32, 1], "tanh", start)
network.apply_output_transform(lambda x, y: x * (1 - x) * y)
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
