"""DeepXDE, backend tensorflow.compat.v1: Poisson's equation, with its own support of Horovod."""

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
    return -dde.grad.hessian(y, x) - np.pi**2 * tf.sin(np.pi * x)


interval = dde.geometry.Interval(-1, 1)
bounds = dde.icbc.DirichletBC(interval, lambda x: 0, lambda x, on_boundary: on_boundary)
data = dde.data.PDE(interval, equation, bounds, 64, 2, train_distribution="pseudo")
# The initializers that DeepXDE has names for drew their seeds when it was imported.
start = keras.initializers.GlorotUniform(seed=1)
model = dde.Model(data, dde.nn.FNN([1, 32, 32, 1], "tanh", start))
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
