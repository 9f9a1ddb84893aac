"""dm-sonnet: a perceptron and an optimizer of Sonnet, in a loop."""

import horovod.tensorflow as hvd
import numpy as np
import sonnet as snt
import tensorflow as tf
from record import Record

hvd.init()
tf.random.set_seed(1)
draw = np.random.default_rng(0)
y = draw.integers(0, 4, 512)
x = (draw.normal(size=(512, 16)) + y[:, None]).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
data = data.map(lambda *batch: [part[hvd.rank() :: hvd.size()] for part in batch])

model = snt.nets.MLP([64, 4])
model(x[:1])
hvd.broadcast_variables(model.variables, 0)
optimizer = snt.optimizers.Adam(0.01)


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(loss)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return hvd.allreduce(loss)


record = Record()
record.begin(model.trainable_variables)
losses = []
for _ in range(5):
    losses.append(np.mean([step(*batch) for batch in data]))
    record.lap()
record.end(model.trainable_variables, losses)
