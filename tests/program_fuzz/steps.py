"""Text of classes, losses and steps that programs bring themselves."""

from __future__ import annotations

from textwrap import indent

CLASSES = {
    "Added": """\
class Added(layers.Layer):
    def __init__(self, kind, **more):
        super().__init__(**more)
        self.kind = kind
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")
    def get_config(self):
        return {**super().get_config(), "kind": self.kind}
    def call(self, x):
        y = x * self.w
        each = tf.reduce_mean(tf.reshape(tf.square(y), (tf.shape(y)[0], -1)), -1)
        losses = {
            "weights": lambda: tf.reduce_sum(tf.square(self.w)),
            "mean": lambda: tf.reduce_mean(tf.square(y)),
            "sum": lambda: tf.reduce_sum(tf.square(y)),
            "each": lambda: each,
        }
        self.add_loss(tf.cast(0.01 * losses[self.kind](), keras.config.floatx()))
        return y
""",
    "Whole": """\
class Whole(layers.Layer):
    def call(self, x):
        return x.to_tensor(shape=(None, 4, 4))
    def compute_output_shape(self, shape):
        return (shape[0], 4, 4)
""",
    "Outer": """\
class Outer(keras.Model):
    def __init__(self, inner, **more):
        super().__init__(**more)
        self.inner = inner
        self.scale = layers.Rescaling(0.5)
    def call(self, x):
        return self.scale(self.inner(x))
    def get_config(self):
        return {"inner": keras.saving.serialize_keras_object(self.inner)}
    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["inner"], globals(), False))
""",
}
OWN_LOSSES = {
    "mean": "def own_loss(y, p):\n    y = tf.cast(tf.reshape(y, (tf.shape(p)[0], -1)), p.dtype)\n"
    "    return tf.reduce_mean(tf.square(y - p))\n",
    "sum": "def own_loss(y, p):\n    y = tf.cast(tf.reshape(y, (tf.shape(p)[0], -1)), p.dtype)\n"
    "    return 0.05 * tf.reduce_sum(tf.square(y - p))\n",
    "each": "def own_loss(y, p):\n    y = tf.cast(tf.reshape(y, (tf.shape(p)[0], -1)), p.dtype)\n"
    "    return tf.reduce_sum(tf.abs(y - p), axis=-1)\n",
    "average": "def own_loss(y, p):\n"
    "    y = tf.cast(tf.reshape(y, (tf.shape(p)[0], -1)), p.dtype)\n"
    "    return tf.nn.compute_average_loss(tf.reduce_sum(tf.square(y - p), axis=-1))\n",
    "called": "class OwnLoss(keras.losses.Loss):\n"
    "    def __call__(self, y, p, sample_weight=None):\n"
    "        y = tf.cast(tf.reshape(y, (tf.shape(p)[0], -1)), p.dtype)\n"
    "        return tf.reduce_mean(tf.square(y - p))\n",
}


def _step(loss: str, *, before: str = "", gradients: str = "tape.gradient(loss, weights)") -> str:
    return f"""\
class Own(keras.Model):
    def train_step(self, data):
        x, y = data[:2]
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            p = tf.cast(self(x, training=True), y.dtype)
{indent(before, " " * 12)}            loss = {loss}
        gradients = {gradients}
        self.optimizer.apply_gradients(zip(gradients, weights))
        return {{"loss": loss, "norm": tf.linalg.global_norm(gradients)}}
"""


_MEAN = "tf.reduce_mean(tf.square(y - p))"
STEPS = {
    "mean": _step(_MEAN),
    "sum": _step("0.05 * tf.reduce_sum(tf.square(y - p))"),
    "sum by size": _step("tf.reduce_sum((y - p) ** 2) / tf.cast(tf.shape(y)[0], y.dtype)"),
    "average": _step("tf.nn.compute_average_loss(tf.reduce_sum(tf.square(y - p), -1))"),
    "vector": _step("0.1 * tf.reduce_sum(tf.square(y - p), axis=-1)"),
    "keras sum": _step("0.05 * keras.losses.MeanSquaredError(reduction='sum')(y, p)"),
    "clipping": _step(
        _MEAN, gradients="tf.clip_by_global_norm(tape.gradient(loss, weights), 0.3)[0]"
    ),
    "slope": _step(
        "tf.reduce_mean(tf.square(y - p)) + tf.reduce_mean(tf.square(slope))",
        before="with tf.GradientTape() as inner:\n    inner.watch(x)\n    q = self(x) ** 2\n"
        "slope = inner.gradient(q, x)\n",
    ),
    "cond": _step(
        "tf.cond(self.optimizer.iterations % 2 == 0, lambda: tf.reduce_mean(tf.square(y - p)),"
        " lambda: tf.reduce_mean(tf.abs(y - p)))"
    ),
    "while": _step(
        _MEAN,
        before="_, p = tf.while_loop(lambda i, p: i < 3, "
        "lambda i, p: (i + 1, tf.tanh(p) + 0.1 * p), (0, p))\n",
    ),
    "meta": """\
class Own(keras.Model):
    def train_step(self, data):
        x, y = data[:2]
        w, b = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean((x @ w + b - y) ** 2)
            of_w, of_b = inner.gradient(loss, [w.value, b.value])
            after = tf.reduce_mean((x @ (w - 0.1 * of_w) + b - 0.1 * of_b - y) ** 2)
        gradients = outer.gradient(after, [w, b])
        self.optimizer.apply_gradients(zip(gradients, [w, b]))
        return {"loss": loss, "after": after}
""",
    "nested": """\
class Own(keras.Model):
    @tf.function
    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self(x, training=True), y.dtype) - y))
        return loss, tape.gradient(loss, [w.value for w in self.trainable_variables])
    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}
""",
    "compute_loss": """\
class Own(keras.Model):
    def train_step(self, data):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=p, sample_weight=w)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, p, w)
        return {metric.name: metric.result() for metric in self.metrics}
""",
    "no tape": """\
class Own(keras.Model):
    def train_step(self, data):
        x, y = data[:2]
        w, b = self.trainable_variables
        error = x @ w + b - y
        of_w = tf.linalg.matmul(x, error, transpose_a=True) / tf.cast(tf.shape(x)[0], y.dtype)
        self.optimizer.apply_gradients([(of_w, w), (tf.reduce_mean(error, 0), b)])
        return {"loss": tf.reduce_mean(error)}
""",
    "accumulating": """\
class Own(keras.Model):
    def train_step(self, data):
        x, y = data[:2]
        weights = self.trainable_variables
        if not hasattr(self, "sums"):
            with tf.init_scope():
                self.sums = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]
                self.steps = tf.Variable(0, trainable=False)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - tf.cast(self(x, training=True), y.dtype)))
        for total, gradient in zip(self.sums, tape.gradient(loss, weights)):
            total.assign_add(tf.convert_to_tensor(gradient))
        self.steps.assign_add(1)
        is_due = tf.cast(self.steps % 2 == 0, self.sums[0].dtype)
        self.optimizer.apply_gradients([(s * is_due, w) for s, w in zip(self.sums, weights)])
        for total in self.sums:
            total.assign(total * (1 - is_due))
        return {"loss": loss}
""",
    # Each sample has numbers of its own, on one process and on ranks.
    "draws": """\
generator = keras.random.SeedGenerator(7)
class Own(keras.Model):
    def train_step(self, data):
        x, y = data[:2]
        drawn = keras.random.uniform((tf.shape(x)[0],), seed=generator, dtype="float64")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x)))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss, "drawn": drawn + 0 * tf.reduce_sum(x, 1)}
    def train_on_batch(self, *args, **more):
        logs = super().train_on_batch(*args, **more)
        return {"loss": logs["loss"], "different": len(set(np.ravel(logs["drawn"]).tolist()))}
""",
}
GAN = """\
class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.g = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])
        self.d = keras.Sequential([keras.Input((2,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    def compile(self, g, d):
        super().compile()
        self.of_g, self.of_d = g, d
    def train_step(self, data):
        z, real = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                made = self.g(z)
                with tf.GradientTape() as inner:
                    inner.watch(made)
                    found = self.d(made)
                slope = inner.gradient(found, made)
                penalty = tf.reduce_mean((tf.norm(slope, axis=1) - 1) ** 2)
                loss = tf.reduce_mean(found) - tf.reduce_mean(self.d(real)) + penalty
            weights = self.d.trainable_variables
            self.of_d.apply_gradients(zip(tape.gradient(loss, weights), weights))
        with tf.GradientTape() as tape:
            of_g = -tf.reduce_mean(self.d(self.g(z)))
        weights = self.g.trainable_variables
        self.of_g.apply_gradients(zip(tape.gradient(of_g, weights), weights))
        return {{"d": loss, "g": of_g}}

x, y = rng.normal(size=(samples, 3)), rng.normal(size=(samples, 2))
model = Gan()
model.compile(keras.optimizers.SGD(0.01), {optimizer})
history = model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
result["history"] = history.history
result["weights"] = [keras.ops.convert_to_numpy(v) for v in model.variables]
optimizers = [*model.of_g.variables, *model.of_d.variables]
result["optimizer"] = [keras.ops.convert_to_numpy(v) for v in optimizers]
"""

_LOOP = """\
loss_of = LOSS
MADE
weights = model.trainable_variables
model.optimizer.build(weights)
AROUND
# A rank may have no samples, and Keras' `add` takes a matrix of 0 rows for a bias.
@tf.function(reduce_retracing=True)
def train_step(x, y):
STEP
for _ in range(epochs):
    for i in range(0, samples, batch):
        PART
        train_step(tf.nest.map_structure(tf.constant, part(x)), tf.constant(part(y)))
"""
_MADE = "model = make()\nmodel.optimizer = OPTIMIZER"
_GRADIENTS = """\
    with tf.GradientTape() as tape:
        each = loss_of(y, model(x, training=True))
        loss = MEAN
    gradients = tape.gradient(loss, weights)
    APPLY
"""
_APPLY = "model.optimizer.apply_gradients(zip(gradients, weights))"
_WHOLE = "part = lambda v: v[i : i + batch]"
_OF_RANK = (
    "size = min(batch, samples - i)\n"
    "        begin, end = (i + (RANK + more) * size // SIZE for more in (0, 1))\n"
    "        part = lambda v: v[begin:end]"
)


def _loop(**parts: str) -> str:
    text = _LOOP
    for name, part in {"MADE": _MADE, "AROUND": "", "PART": _WHOLE, **parts}.items():
        text = text.replace(name, part)
    return text


def _gradients(mean: str, apply: str) -> str:
    return _GRADIENTS.replace("MEAN", mean).replace("APPLY", apply)


_OF_STRATEGY = """\
loss_of = LOSS
strategy = CustomCollectiveStrategy()
with strategy.scope():
    model = make()
    model.optimizer = OPTIMIZER
    weights = model.trainable_variables
    model.optimizer.build(weights)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
data = strategy.experimental_distribute_dataset(data)
def step(x, y):
    with tf.GradientTape() as tape:
        each = loss_of(y, model(x, training=True))
        loss = tf.nn.compute_average_loss(each, global_batch_size=batch)
    model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
@tf.function
def train_step(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
for _ in range(epochs):
    for each in data:
        train_step(*each)
"""
#: By door; of `given` it is what one process does, in which the last batch is short.
LOOPS = {
    "given": _loop(STEP=_gradients("tf.reduce_sum(each) / tf.cast(SIZE, each.dtype)", _APPLY)),
    "loop": _OF_STRATEGY,
    "reducer": _loop(
        AROUND="comm = gradring.init()\nreduce_gradients = GradientReducer()\n"
        "broadcast_variables(model.variables)",
        STEP=_gradients(
            "tf.math.divide_no_nan(tf.reduce_sum(each), tf.cast(tf.shape(each)[0], each.dtype))",
            "gradients = reduce_gradients(gradients, weights, samples=tf.shape(each)[0])\n"
            f"    {_APPLY}",
        ),
        PART=_OF_RANK.replace("RANK", "comm.rank").replace("SIZE", "comm.world_size"),
    ),
    "horovod": _loop(
        MADE="hvd.init()\nmodel = make()\nmodel.optimizer = hvd.DistributedOptimizer(OPTIMIZER)",
        STEP=_gradients("tf.reduce_mean(each)", _APPLY),
        PART=_OF_RANK.replace("RANK", "hvd.rank()").replace("SIZE", "hvd.size()"),
    ),
}
