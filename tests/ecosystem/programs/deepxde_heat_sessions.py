"""DeepXDE, backend tensorflow.compat.v1: the heat equation, with its own support of Horovod."""

import os

os.environ["DDE_BACKEND"] = "tensorflow.compat.v1"

import deepxde as dde
import keras
import numpy as np
from record import Record

dde.config.set_random_seed(1)
dde.config.set_parallel_scaling("strong")
tf = dde.backend.tf


def equation(x, y):
    return dde.grad.jacobian(y, x, i=0, j=1) - 0.4 * dde.grad.hessian(y, x, i=0, j=0)


domain = dde.geometry.GeometryXTime(dde.geometry.Interval(0, 1), dde.geometry.TimeDomain(0, 1))
conditions = [
    dde.icbc.DirichletBC(domain, lambda x: 0, lambda x, on_boundary: on_boundary),
    dde.icbc.IC(domain, lambda x: np.sin(np.pi * x[:, :1]), lambda x, on_initial: on_initial),
]
data = dde.data.TimePDE(
    *(domain, equation, conditions),
    num_domain=128,
    num_boundary=16,
    num_initial=16,
    train_distribution="pseudo",
)
# The initializers that DeepXDE has names for drew their seeds when it was imported.
start = keras.initializers.GlorotNormal(seed=1)
model = dde.Model(data, dde.nn.FNN([2, 32, 32, 1], "tanh", start))
model.compile("adam", lr=1e-3)
record = Record()


class Begin(dde.callbacks.Callback):
    def on_train_begin(self):
        record.begin(weights())


def weights():
    return model.sess.run(tf.trainable_variables())


def mean(loss):
    together = dde.config.comm
    return together.allreduce(loss) / dde.config.world_size if together else loss


losses = []
for epoch in range(4):
    watch = [] if epoch else [Begin()]
    history, _ = model.train(50, display_every=50, callbacks=watch, verbose=0)
    losses.append(mean(float(np.sum(history.loss_train[-1]))))
    record.lap()
record.end(weights(), losses)
