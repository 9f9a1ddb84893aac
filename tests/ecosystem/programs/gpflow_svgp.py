"""gpflow: a sparse variational Gaussian process by minibatches, in float64."""

import gpflow
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras
from record import Record

hvd.init()
draw = np.random.default_rng(0)
x = draw.uniform(size=(512, 1))
y = np.sin(12 * x) + draw.normal(scale=0.1, size=x.shape)

model = gpflow.models.SVGP(
    gpflow.kernels.SquaredExponential(lengthscales=0.2),
    gpflow.likelihoods.Gaussian(),
    np.linspace(0, 1, 10)[:, None],
    num_data=len(x),
)
rows = 64 // hvd.size()
first = hvd.rank() * rows
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
data = data.map(lambda x, y: (x[first : first + rows], y[first : first + rows]))
optimizer = tf_keras.optimizers.Adam(0.02)


@tf.function
def step(batch):
    with tf.GradientTape() as tape:
        loss = model.training_loss(batch)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return hvd.allreduce(loss)


record = Record()
record.begin(model.trainable_variables)
losses = []
for _ in range(5):
    losses.append(np.mean([step(batch) for batch in data]))
    record.lap()
record.end(model.trainable_variables, losses)
