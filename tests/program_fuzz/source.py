"""Source text of a program, as a user would write it, which `python FILE` runs.

What a program finds is in its variable `result`. With `is_reference`, or by the door `given`, the
text knows of no gradring.
"""

from __future__ import annotations

import random
from textwrap import indent

from program_fuzz.catalogue import ATTENTION, FIRST, JOINS, LAYERS, SAME, TARGETS
from program_fuzz.features import OWN_LOOPS, Program, has
from program_fuzz.steps import CLASSES, GAN, LOOPS, OWN_LOSSES, STEPS

HEAD = """\
import os, sys, tempfile
import keras, numpy as np, tensorflow as tf
from keras import layers
"""
SETTINGS = """\
keras.config.set_floatx({floatx!r})
keras.config.set_dtype_policy({policy!r})
keras.utils.set_random_seed({seed})
rng = np.random.default_rng({seed})
directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
path = lambda name: os.path.join(directory, name)
samples, batch, epochs = {samples}, {batch}, {epochs}
seen, result = [], {{}}
"""
DOORS = {
    "strategy": "import gradring\nfrom gradring import updates\n"
    "from gradring.tensorflow import CustomCollectiveStrategy\n",
    "loop": "from gradring.tensorflow import CustomCollectiveStrategy\n",
    "reducer": "import gradring\nfrom gradring.tensorflow import GradientReducer, "
    "broadcast_variables\n",
    "horovod": "import gradring.horovod.tensorflow.keras as hvd\n",
}
#: The data, and the shape that `keras.Input` has.
INPUTS = {
    "flat": ("rng.normal(size=(samples, 16))", "(16,)"),
    "seq": ("rng.normal(size=(samples, 6, 4)) * (rng.uniform(size=(samples, 6, 1)) > 0.3)",
            "(6, 4)"),
    "image": ("rng.normal(size=(samples, 6, 6, 2))", "(6, 6, 2)"),
    "volume": ("rng.normal(size=(samples, 4, 4, 4, 2))", "(4, 4, 4, 2)"),
    "tokens": ("rng.integers(0, 12, (samples, 6))", "(6,), dtype='int64'"),
    "numbers": ("rng.normal(size=(samples, 5))", "(5,)"),
    "text": ("tf.constant(rng.choice(['a b', 'a', 'c b a', 'd'], (samples, 1)))",
             "(1,), dtype='string'"),
    "sparse": ("tf.sparse.from_dense(rng.normal(size=(samples, 8)) * "
               "(rng.uniform(size=(samples, 8)) > 0.5))", "(8,), sparse=True"),
    "ragged": ("tf.RaggedTensor.from_row_lengths(rng.normal(size=(samples * 3, 4)), "
               "[2 + 2 * (i % 2) for i in range(samples - samples % 2)] + [3] * (samples % 2))",
               "(None, 4), ragged=True"),
}  # fmt: skip
TARGET_DATA = {
    "number": ("rng.normal(size=(samples, *SHAPE))", 2),
    "positive": ("np.exp(rng.normal(size=(samples, *SHAPE)))", 2),
    "binary": ("rng.integers(0, 2, (samples, *SHAPE)).astype(FLOAT)", 1),
    "sign": ("rng.choice([-1.0, 1.0], (samples, *SHAPE))", 1),
    "one_hot": ("np.eye(3)[rng.integers(0, 3, samples)]", 3),
    "class": ("rng.integers(0, 3, samples)", 3),
}
FLAT_OF = {"seq": ("seq", "Flatten()"), "image": ("image", "GlobalAveragePooling2D()"),
           "volume": ("volume", "GlobalAveragePooling3D()")}  # fmt: skip


def source_of(program: Program, is_reference: bool = False) -> str:
    """The text of a program."""
    door = "given" if is_reference else program["door"]
    policy = program["precision"]
    samples, batch = program["size"]
    floatx = "float64" if policy == "float64" else "float32"
    settings = SETTINGS.format(
        floatx=floatx, policy=policy, seed=program["seed"] + 1, samples=samples, batch=batch,
        epochs=program["epochs"],
    )  # fmt: skip
    parts = [HEAD + DOORS.get(door, ""), settings]
    if program["step"] == "gan":
        return "\n".join([*parts, GAN.format(optimizer=_optimizer(program))])
    parts += [_classes(program), _model(program), _data(program, floatx)]
    if program["door"] in OWN_LOOPS:
        door_is_loop = program["door"] == "loop"
        loss = f"keras.losses.{_loss(program)}(reduction='none')"
        text = LOOPS["given" if is_reference else door]
        text = text.replace("LOSS", loss).replace("OPTIMIZER", _optimizer(program))
        # A strategy's loop divides by the batch size, the others by the samples that there are.
        parts.append(text.replace("SIZE", "batch" if door_is_loop else "tf.shape(y)[0]"))
    else:
        parts += [_compiled(program, door), _trained(program)]
    return "\n".join([*parts, RESULT])


RESULT = """\
result["weights"] = [keras.ops.convert_to_numpy(v) for v in model.variables]
# Gradients that are not applied yet are each rank's own (docs/checkpoints.md).
kept = [v for v in model.optimizer.variables if "gradient_accumulator" not in v.path]
result["optimizer"] = [keras.ops.convert_to_numpy(v) for v in kept]
"""


# The model


def layers_of(program: Program) -> tuple[list[str], str]:
    """What is applied to the data, one after the other, and what the last gives."""
    chance = random.Random(program["first"])
    kind = program["input"]
    applied: list[str] = []
    if kind in FIRST and (kind not in ("flat", "seq", "image", "volume") or chance.random() < 0.2):
        expression, kind = chance.choice(FIRST[kind])
        applied += _parts(expression)
    for (token,) in program["body"]:
        own = random.Random(token)
        choice = own.random()
        if choice < 0.2:
            same = own.choice(SAME)
            # Keras adds activity losses of 16 bits to those of 32.
            is_refused = "mixed" in program["precision"] and same.startswith("ActivityReg")
            # Without a strategy, statistics are those of a rank's part (docs/numerics.md).
            is_refused |= program["door"] in ("reducer", "horovod") and same.startswith("BatchNorm")
            applied.append(
                "Identity()" if is_refused else _without_hidden_sum(same, applied, program)
            )
        elif choice < 0.3:
            name = own.choice((*JOINS, "Dot") if kind == "flat" else JOINS)
            given = "1" if name == "Dot" else ""
            applied.append(f"{name}({given})([x, layers.Activation('tanh')(x)])")
        elif choice < 0.4 and kind == "seq":
            call = own.choice(ATTENTION)
            applied.append(call.replace("TWICE", "[x, x]").replace("ONE", "x"))
        elif kind in LAYERS:
            expression, kind = own.choice(LAYERS[kind])
            applied.append(expression)
    if (kind == "seq" and not program["per_step"]) or kind in ("image", "volume"):
        ends = [text for text, gives in LAYERS[kind] if gives == "flat"]
        applied.append(chance.choice(ends) if program["body"] else FLAT_OF[kind][1])
        kind = "flat"
    return applied, kind


def _without_hidden_sum(layer: str, before: list[str], program: Program) -> str:
    """A mean for a sum over samples that a replica or a graph does not tell (docs/numerics.md)."""
    is_untold = program["input"] in ("sparse", "ragged") or any(
        name in each for each in before for name in ("RNN", "LSTM", "GRU")
    )
    if layer in ("Added('sum')", "Added('each')") and (is_untold or program["door"] == "strategy"):
        return "Added('mean')"
    return layer


def _parts(expression: str) -> list[str]:
    """Several layers behind each other; their names begin with a capital letter."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(expression):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(expression[begin:place].strip())
            begin = place + 1
    return [*parts, expression[begin:].strip()]


def _line(expression: str) -> str:
    """A layer that is applied to `x`."""
    own = "" if expression.startswith(("Added", "Whole")) else "layers."
    is_call = expression.endswith(("x)", "(x)])", "[x, x])"))
    return f"x = {own}{expression}" if is_call else f"x = {own}{expression}(x)"


def _model(program: Program) -> str:
    applied, _ = layers_of(program)
    wiring = program["wiring"]
    width = TARGET_DATA[program["target"]][1]
    activation = TARGETS[program["target"]][0]
    given = [f"{width}, activation={activation!r}", program["penalty"]]
    given.append(program["initial"] and f"kernel_initializer={program['initial']}")
    head = f"layers.Dense({', '.join(each for each in given if each)})"
    kind = "Own" if program["step"] else "keras.Model"
    shape = INPUTS[program["input"]][1]
    body = "\n".join([f"x = inputs = keras.Input({shape}, name='a')", *map(_line, applied)])
    can_be_sequential = all("x)" not in _line(each)[4:-3] for each in applied)
    if wiring == "sequential" and can_be_sequential:
        parts = [_line(each)[4:-3] for each in applied]
        all_of_it = ", ".join([f"keras.Input({shape}, name='a')", *parts, head])
        return f"def make():\n    return keras.Sequential([{all_of_it}])\n"
    ends = {
        "chain": f"return {kind}(inputs, {head}(x))",
        "shared": "shared = layers.Dense(4, activation='tanh')\nx = shared(layers.Dense(4)(x))\n"
        f"return {kind}(inputs, {head}(shared(x)))",
        "nested": f"inner = keras.Model(inputs, x)\nouter = keras.Input({shape}, name='a')\n"
        f"return {kind}(outer, {head}(inner(outer)))",
        "frozen": "frozen = layers.Dense(4, activation='tanh')\nx = frozen(x)\n"
        "frozen.trainable = False\n"
        f"return {kind}(inputs, {head}(x))",
        "two inputs": "other = keras.Input((2,), name='b')\n"
        "x = layers.Concatenate()([x, layers.Dense(2)(other)])\n"
        f"return {kind}([inputs, other], {head}(x))",
        "tied": f"inner = keras.Model(inputs, x)\nouter = keras.Input({shape}, name='a')\n"
        f"x = layers.Subtract()([inner(outer), layers.Activation('tanh')(inner(outer))])\n"
        f"return {kind}(outer, {head}(x))",
        "two outputs": f"outputs = [{head}(x), {head}(layers.Dense(3)(x))]\n"
        f"return {kind}(inputs, outputs)",
        "subclass": f"inner = keras.Model(inputs, {head}(x))\nreturn Outer(inner)",
    }
    end = ends.get(wiring, ends["chain"])
    return f"def make():\n{indent(f'{body}{chr(10)}{end}', '    ')}\n"


def _classes(program: Program) -> str:
    found = [CLASSES[name] for name in ("Added", "Whole") if name in str(layers_of(program)[0])]
    if program["wiring"] == "subclass":
        found.append(CLASSES["Outer"])
    if program["step"]:
        found.append(STEPS[program["step"]])
    if program["own_loss"]:
        found.append(OWN_LOSSES[program["own_loss"]])
    return "\n".join(found)


# The data


def _data(program: Program, floatx: str) -> str:
    name, own_form = program["input"], program["form"]
    data, _ = INPUTS[name]
    width = TARGET_DATA[program["target"]][1]
    _, kind = layers_of(program)
    is_per_step = program["per_step"] and kind == "seq"
    shape = "make().output_shape[1:]" if is_per_step else f"({width},)"
    target = TARGET_DATA[program["target"]][0].replace("SHAPE", shape).replace("FLOAT", "'float64'")
    lines = [f"x = {data}", f"y = {target}"]
    if name in ("flat", "seq", "image", "volume", "numbers"):
        lines.append(f"x = x.astype({floatx!r})")
    if program["target"] != "class":
        lines.append(f"y = y.astype({floatx!r})")
    weights = {"sample": "rng.uniform(0.1, 2.0, samples)", "zeros": "np.arange(samples) % 3 // 2"}
    if program["weights"] in weights:
        lines.append(f"w = ({weights[program['weights']]}).astype({floatx!r})")
    if program["wiring"] == "two inputs":
        lines.append(f"x = {{'a': x, 'b': rng.normal(size=(samples, 2)).astype({floatx!r})}}")
    elif own_form == "dict" and name not in ("sparse", "ragged", "text"):
        lines.append("x = {'a': x}")
    if program["wiring"] == "two outputs":
        lines.append("y = (y, y[::-1].copy())")
    return "\n".join(lines) + "\n"


def is_dataset(program: Program) -> bool:
    return program["form"] in ("dataset", "mapped") or program["input"] in (
        "sparse", "ragged", "text")  # fmt: skip


# Compiled and trained


def _loss(program: Program) -> str:
    losses = TARGETS[program["target"]][1]
    return losses[int(program["loss"] * len(losses))]


def _optimizer(program: Program) -> str:
    schedule = program["schedule"]
    rate = f"keras.optimizers.schedules.{schedule}" if schedule else "0.02"
    given = [program["optimizer"].replace("RATE", rate), program["clip"], program["ema"]]
    if program["accumulation"]:
        given.append(f"gradient_accumulation_steps={program['accumulation']}")
    if program["decay"] and "W(" not in program["optimizer"]:
        given.append(f"weight_decay={program['decay']}")
    text = f"keras.optimizers.{', '.join(each for each in given if each)})"
    if program["precision"] == "mixed_float16":
        # Keras' scale would overflow sooner on a rank, whose mean is over fewer samples.
        return f"keras.optimizers.LossScaleOptimizer({text}, initial_scale=64.0)"
    return f"keras.optimizers.LossScaleOptimizer({text})" if program["scaling"] else text


def _compiled(program: Program, door: str) -> str:
    names = TARGETS[program["target"]][2]
    chosen = dict.fromkeys(names[int(each * len(names))] for each in program["metrics"])
    metrics = ", ".join(f"keras.metrics.{each}" for each in chosen)
    reduction = f"reduction={program['reduction']!r}" if program["reduction"] else ""
    loss = "own_loss" if program["own_loss"] else f"keras.losses.{_loss(program)}({reduction})"
    if program["own_loss"] == "called":
        loss = "OwnLoss()"
    given = [_optimizer(program)]
    if program["step"] in (None, "compute_loss"):  # others take a loss of their own
        given += ["loss=loss", f"metrics=[{metrics}]"]
    if program["weighted_metrics"]:
        given.append(f"weighted_metrics=[{metrics}]")
    if has(program, "per_execution"):
        given.append(f"steps_per_execution={program['per_execution']}")
    given.append("run_eagerly=True" if program["eager"] else "")
    given.append("" if program["xla"] else "jit_compile=False")
    loss = f"[{loss}, {loss}]" if program["wiring"] == "two outputs" else loss
    compiled = f"model.compile({', '.join(each for each in given if each)})"
    lines = f"loss = {loss}\nmodel = make()\n{compiled}"
    if program["optimizer"].startswith("ScheduleFree"):
        # Built in a step, it begins with averages of 0 in one process: a defect of Keras.
        lines += "\nmodel.optimizer.build(model.trainable_variables)"
    if door == "strategy":
        made = f"strategy = CustomCollectiveStrategy({program['rule'] or ''})"
        return f"{made}\nwith strategy.scope():\n{indent(lines, '    ')}\n"
    return f"{lines}\n"


PY_DATASET = """\
class Data(keras.utils.PyDataset):
    def __len__(self):
        return -(-samples // batch)
    def __getitem__(self, i):
        part = lambda v: v[i * batch : (i + 1) * batch]
        return tf.nest.map_structure(part, x), tf.nest.map_structure(part, y)
"""
FIT = """\
def fit(**more):
    history = model.fit({given}, epochs=epochs, verbose=0{callbacks}, **more)
    result.setdefault("history", []).append(history.history)
"""
BY_BATCH = """\
def fit():
    for i in list(range(0, samples, batch)) * epochs:
        part = lambda v: v[i : i + batch]
        given = [tf.nest.map_structure(part, each) for each in ({given})]
        logs = model.train_on_batch(*given, {more}return_dict=True)
        result.setdefault("history", []).append(logs)
"""
SAVED = {
    "weights": "model.save_weights(path('a.weights.h5'))\nfit()\n"
    "model.load_weights(path('a.weights.h5'))\nfit()",
    "model": "model.save(path('a.keras'))\n"
    "model = keras.models.load_model(path('a.keras'), custom_objects=globals(), safe_mode=False)\n"
    "fit()",
    "checkpoint": "saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)\n"
    "name = saved.save(path('checkpoint'))\nfit()\nsaved.restore(name)\nfit()",
    "export": "model.export(path('served'), verbose=False)\nfit()",
    "clone": "values = model.get_weights()\nmodel.set_weights([v * 0.9 for v in values])\nfit()",
}
AFTER = {
    "evaluate": "result['evaluate'] = model.evaluate({given}, verbose=0, return_dict=True)",
    "predict": "result['predict'] = model.predict({x}, verbose=0)",
    "predict_on_batch": "result['predict on batch'] = model.predict_on_batch({some_x})",
    "test_on_batch": "result['test on batch'] = model.test_on_batch({some}, return_dict=True)",
}


def _trained(program: Program) -> str:
    has_weights = program["weights"] in ("sample", "zeros")
    arrays = "x, y, w" if has_weights else "x, y"
    lines, callbacks = [], ""
    if is_dataset(program):
        given = f"data = tf.data.Dataset.from_tensor_slices(({arrays}))"
        lines.append(f"{given}.batch(batch)")
        if program["form"] == "mapped":
            lines.append("data = data.map(lambda *parts: parts).cache().prefetch(2)")
        given = x = "data"
    elif program["form"] == "generator":
        lines.append(PY_DATASET + "data = Data()")
        given = x = "data"
    else:
        given = "x, y, batch_size=batch" + (", sample_weight=w" if has_weights else "")
        x = "x, batch_size=batch"
    more = "class_weight={0: 0.5, 1: 2.0, 2: 1.0}, " if program["weights"] == "class" else ""
    if program["step"] == "draws" or (
        program["loop"] == "train_on_batch" and not is_dataset(program)
    ):
        lines.append(BY_BATCH.format(given=arrays, more=more))
    else:
        if program["callbacks"]:
            made = ", ".join(f"keras.callbacks.{each}" for each in program["callbacks"])
            callbacks = f", callbacks=[{made}]"
        of_arrays = "" if given == "data" else ", shuffle=False"
        of_arrays += f", {more[:-2]}" if more else ""
        if program["loop"] == "validation":
            of_arrays += f", validation_data={given if given == 'data' else f'({arrays})'}"
        shuffled = ", shuffle=False" if program["form"] == "generator" else ""
        lines.append(FIT.format(given=given + of_arrays + shuffled, callbacks=callbacks))
    lines.append("fit()\nfit()" if program["loop"] == "fit twice" else "fit()")
    if program["saving"]:
        lines.append(SAVED[program["saving"]])
    for each in program["after"]:
        part = "tf.nest.map_structure(lambda v: v[:7], {})"
        some = "*next(iter(data))" if given == "data" else f"*{part.format(f'({arrays})')}"
        some_x = "next(iter(data))[0]" if given == "data" else part.format("x")
        if program["form"] == "generator":
            some, some_x = "*data[0]", "data[0][0]"
        lines.append(AFTER[each].format(given=given, x=x, some=some, some_x=some_x))
    lines.append("result['seen'] = seen")
    return "\n".join(lines) + "\n"
