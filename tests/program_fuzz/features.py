"""Features of a program, each with a plain value: a seed draws them, and shrinking takes them away.

A program is a dict of them. `settled` makes those plain that do not go with others; the pages of
the documentation say why where the reason is gradring's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from program_fuzz import catalogue

Program = dict[str, Any]
OWN_LOOPS = ("loop", "reducer", "horovod")


@dataclass(frozen=True)
class Feature:
    """What a program may have; `draw` gives a value, which is the plain one in most programs."""

    plain: Any
    draw: Callable[[random.Random], Any]


def _often(*values: Any) -> Callable[[random.Random], Any]:
    return lambda chance: chance.choice(values)


def _rarely(share: float, plain: Any, *values: Any) -> Callable[[random.Random], Any]:
    return lambda chance: chance.choice(values) if chance.random() < share else plain


def _body(chance: random.Random) -> list[list[str]]:
    """Layers of a kind each, from the data's to `flat`; `settled` begins it by the input."""
    return [[str(chance.random())] for _ in range(chance.choice((0, 1, 1, 2, 2, 3)))]


def _some(values: tuple[str, ...], most: int) -> Callable[[random.Random], list[str]]:
    return lambda chance: chance.sample(values, chance.randint(0, min(most, len(values))))


FEATURES: dict[str, Feature] = {
    # How it comes to ranks.
    "door": Feature("given", _often(*["given"] * 6, "strategy", "strategy", *OWN_LOOPS)),
    "rule": Feature(None, _rarely(0.6, None, "bucket_bytes=64", "update=updates.Primary()",
                                  "update=updates.AllReduce()", "check_gradients='raise'")),
    # Data and model.
    "input": Feature("flat", _often("flat", "flat", "seq", "seq", "image", "volume", "tokens",
                                    "tokens", "numbers", "text", "sparse", "ragged")),
    "form": Feature("arrays", _often("arrays", "arrays", "dataset", "dict", "mapped", "generator")),
    "size": Feature((24, 12), _often((24, 12), (44, 12), (31, 8), (13, 6), (25, 12), (26, 8),
                                     (7, 3), (36, 12), (10, 16))),
    "epochs": Feature(1, _often(1, 2, 2, 3)),
    "body": Feature([], _body),
    "first": Feature(0.0, lambda chance: chance.random()),
    "wiring": Feature("chain", _rarely(0.6, "chain", "shared", "nested", "frozen", "two inputs",
                                       "sequential", "subclass", "tied", "two outputs")),
    "initial": Feature(None, _rarely(0.2, None, "'he_normal'", "'orthogonal'", "'glorot_normal'")),
    "penalty": Feature(None, _rarely(0.2, None, "kernel_regularizer='l2'",
                                     "activity_regularizer='l2'", "kernel_constraint='unit_norm'",
                                     "bias_regularizer=keras.regularizers.L1(0.01)",
                                     "kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02)")),
    # Loss, metrics, weights.
    "target": Feature("number", _often(*catalogue.TARGETS, "number", "number")),
    "per_step": Feature(False, _rarely(0.3, False, True)),
    "loss": Feature(0.0, lambda chance: chance.random()),
    "reduction": Feature(None, _rarely(0.25, None, "sum", "mean", "mean_with_sample_weight")),
    "own_loss": Feature(None, _rarely(0.2, None, "mean", "sum", "each", "called", "average")),
    "metrics": Feature([], lambda chance: [chance.random() for _ in range(chance.randint(0, 2))]),
    "weighted_metrics": Feature(False, _rarely(0.3, False, True)),
    "weights": Feature(None, _rarely(0.35, None, "sample", "class", "zeros")),
    # Optimizer.
    "optimizer": Feature("SGD(RATE", _often(*catalogue.OPTIMIZERS, "SGD(RATE", "Adam(RATE")),
    "clip": Feature(None, _rarely(0.3, None, "clipnorm=0.2", "clipvalue=0.05",
                                  "global_clipnorm=0.3")),
    "schedule": Feature(None, _rarely(0.3, None, *catalogue.SCHEDULES)),
    "ema": Feature(None, _rarely(0.15, None, "use_ema=True, ema_momentum=0.9",
                                 "use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2")),
    "accumulation": Feature(None, _rarely(0.15, None, 2, 3)),
    "decay": Feature(None, _rarely(0.15, None, 0.01)),
    "scaling": Feature(False, _rarely(0.1, False, True)),
    "precision": Feature("float64", _rarely(0.2, "float64", "float32", "mixed_bfloat16",
                                            "mixed_float16")),
    # Loop.
    "step": Feature(None, _rarely(0.35, None, *catalogue.STEPS)),
    "loop": Feature("fit", _rarely(0.3, "fit", "train_on_batch", "fit twice", "validation")),
    "per_execution": Feature(1, _rarely(0.15, 1, 2, 3)),
    "xla": Feature(False, _rarely(0.1, False, True)),
    "eager": Feature(False, _rarely(0.1, False, True)),
    "callbacks": Feature([], lambda chance: _some(catalogue.CALLBACKS, 2)(chance)
                         if chance.random() < 0.35 else []),
    "saving": Feature(None, _rarely(0.2, None, "weights", "model", "checkpoint", "export",
                                    "clone")),
    "after": Feature([], _some(("evaluate", "predict", "predict_on_batch", "test_on_batch"), 2)),
}  # fmt: skip


def drawn(seed: int) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    program = {name: feature.draw(chance) for name, feature in FEATURES.items()}
    return settled({"seed": seed, **program})


def plain(name: str) -> Any:
    return FEATURES[name].plain


def has(program: Program, name: str) -> bool:
    """Whether a feature of a program is not the plain one."""
    return name in FEATURES and program[name] != FEATURES[name].plain


def settled(program: Program) -> Program:
    """A program whose features go together: those of `_conflicts` are plain."""
    before, program = program, dict(program)
    for applies, names in _conflicts():
        if applies(program):
            program |= {name: plain(name) for name in names if has(program, name)}
    if program["step"] not in (None, "compute_loss"):  # Keras' other loops take a loss of Keras
        program["after"] = [each for each in program["after"] if "predict" in each]
        program["loop"] = program["loop"].replace("validation", "fit")
    if program["input"] == "volume" and program["precision"] == "float64":
        # Pools of volumes have no kernel for float64.
        program |= {"precision": "float32", "optimizer": plain("optimizer")}
    if program["optimizer"].startswith("Muon"):
        program["precision"] = "float32"  # Keras multiplies its rate by a float32
    return program if program == before else settled(program)


def _conflicts() -> list[tuple[Callable[[Program], bool], tuple[str, ...]]]:
    """Where something is so, these features are plain; in this order."""
    of_models = ("wiring", "own_loss", "step", "weights", "metrics", "weighted_metrics", "penalty")
    of_fit = ("loop", "per_execution", "eager", "callbacks", "saving", "scaling", "form",
              "reduction", "per_step", "precision")  # fmt: skip
    return [
        # A loop of the program's own: what Keras' loops do for a program has no counterpart.
        (lambda p: p["door"] in OWN_LOOPS, (*of_models, *of_fit, "after")),
        # Ranks that take parts by themselves take equal ones.
        (lambda p: p["door"] == "horovod" and p["size"] not in ((24, 12), (36, 12)), ("size",)),
        (lambda p: p["door"] in OWN_LOOPS and p["input"] in ("sparse", "ragged", "text"),
         ("input",)),
        # TensorFlow's Conv3D of no samples has the channels of its input.
        (lambda p: p["door"] in OWN_LOOPS and p["input"] == "volume"
         and p["size"][0] % p["size"][1] in (1, 2), ("size",)),
        (lambda p: p["door"] != "strategy", ("rule",)),
        # docs/numerics.md#of-which-gradients: a mean of the program's own is that of a worker.
        (lambda p: p["door"] == "strategy", ("own_loss", "step")),
        # A model of one input, of a kind that the wiring and a step of its own can take.
        (lambda p: p["input"] in ("sparse", "ragged", "text"), ("wiring", "form", "saving")),
        # docs/input-pipelines.md#batches-without-samples: there are none of these.
        (lambda p: p["input"] in ("sparse", "ragged") and p["size"][0] % p["size"][1] in (1, 2),
         ("size",)),
        (lambda p: p["step"] in ("gan", "slope", "meta", "no tape", "draws", "while"),
         ("input", "first", "body", "wiring", "form", "target", "per_step", "own_loss", "reduction",
          "weights", "metrics", "weighted_metrics", "penalty", "precision")),
        (lambda p: p["step"] not in (None, "compute_loss"),
         ("own_loss", "reduction", "weights", "metrics", "weighted_metrics", "per_step",
          "penalty", "saving")),
        (lambda p: p["step"] not in (None, "compute_loss") and p["target"] == "class",
         ("target",)),
        (lambda p: p["step"] in ("gan", "draws"), ("callbacks", "saving", "after", "loop")),
        (lambda p: p["step"] is not None, ("wiring", "scaling")),
        # docs/numerics.md#limits: eager steps do not show that rows of a sparse batch are sums.
        (lambda p: p["input"] == "sparse", ("eager",)),
        # docs/coming-from-mwms.md: with run_eagerly only Keras' own sums are seen.
        (lambda p: p["eager"], ("step", "own_loss", "per_execution")),
        (lambda p: p["wiring"] == "two outputs", ("own_loss", "weights", "per_step",
                                                  "weighted_metrics", "metrics")),
        (lambda p: p["form"] == "generator", ("loop", "weights")),
        (lambda p: p["per_step"], ("weights", "metrics", "wiring", "target", "own_loss")),
        # docs/coming-from-mwms.md: a sum over samples is not added to a mean.
        (lambda p: p["own_loss"] == "sum" or p["reduction"] == "sum" or p["step"] is not None,
         ("penalty",)),
        (lambda p: p["own_loss"] is not None, ("reduction", "weights")),
        (lambda p: p["target"] not in ("class", "one_hot") and p["weights"] == "class",
         ("weights",)),
        (lambda p: p["form"] in ("dataset", "mapped") and p["weights"] == "class", ("weights",)),
        (lambda p: p["loop"] == "train_on_batch", ("callbacks", "per_execution")),
        (lambda p: p["weights"] is None, ("weighted_metrics",)),
        # Under a strategy, each rank gives these its own part of a batch, as with MirroredStrategy.
        (lambda p: p["door"] == "strategy" and p["loop"] == "train_on_batch", ("loop",)),
        (lambda p: p["door"] == "strategy" and any("on_batch" in each for each in p["after"]),
         ("after",)),
        # Rounding decides what these do with a gradient that is only rounding (docs/verify.md).
        (lambda p: p["optimizer"].startswith(("Lion", "Adafactor")), ("body", "loss")),
        (lambda p: p["precision"] != "float64" and not p["optimizer"].startswith("Muon"),
         ("optimizer", "accumulation", "ema")),
        (lambda p: "mixed" in p["precision"], ("scaling", "penalty")),
        # docs/coming-from-mwms.md: the graph of a recurrent layer does not show what is a sum.
        (lambda p: p["own_loss"] == "sum" or p["step"] in ("sum", "vector"), ("body",)),
        # The same page: rows of equal index make its variance negative.
        (lambda p: "centered" in p["optimizer"] and p["input"] in ("tokens", "numbers", "text"),
         ("optimizer",)),
        # Of Keras: no such argument.
        (lambda p: p["optimizer"].startswith("ScheduleFree"), ("schedule", "ema")),
        (lambda p: p["schedule"] is not None and any("Rate" in c or "LR" in c
                                                     for c in p["callbacks"]), ("callbacks",)),
        (lambda p: p["accumulation"] is not None, ("ema",)),
        (lambda p: p["optimizer"].startswith("Muon"), ("accumulation",)),
        (lambda p: p["eager"] or p["door"] in OWN_LOOPS, ("xla",)),
    ]  # fmt: skip
