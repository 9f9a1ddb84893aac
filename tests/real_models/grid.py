"""The grid of models and ways to train them: not every combination, but every value in several."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from real_models import applications
from real_models.catalogue import MODELS

KIB, MIB = 1 << 10, 1 << 20
DEFAULT_BUCKET_BYTES = 16 * MIB
STEPS, FEW_STEPS = 20, 5

AS_IT_IS = "TensorFlow's defaults"
WITH_ONEDNN = "with oneDNN"
WITHOUT_ONEDNN = "without oneDNN"
UNLIKE_PROCESSORS = "with oneDNN on one rank"
SHARED_CORES = "cores shared by gradring run"
WORLDS = {
    AS_IT_IS: {},
    WITH_ONEDNN: {"TF_ENABLE_ONEDNN_OPTS": "1"},
    WITHOUT_ONEDNN: {"TF_ENABLE_ONEDNN_OPTS": "0"},
    UNLIKE_PROCESSORS: {},
    SHARED_CORES: {},
}
"""What is set in the environment. By default nothing: each rank has all threads, as on a host.

TensorFlow itself uses oneDNN only on processors with AVX-512 VNNI or AVX-VNNI, so the defaults are
not the same graphs everywhere.
"""

MEMORY_GIB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
NEEDED_GIB = {"ConvNeXtXLarge": 40}
"""What two ranks and one process take at most, of models that do not fit everywhere."""

TOO_LARGE_FOR_FLOAT64 = ("layer of 300 MB",)


@dataclass(frozen=True)
class Cell:
    """One training."""

    model: str
    way: str
    policy: str = "float32"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    world: str = AS_IT_IS
    is_short: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """As pytest and the report write it."""
        parts = [self.model, self.way, self.policy]
        if self.bucket_bytes != DEFAULT_BUCKET_BYTES:
            parts.append(f"buckets of {self.bucket_bytes // KIB} KiB")
        if self.world != AS_IT_IS:
            parts.append(self.world)
        return ", ".join(parts)

    @property
    def steps(self) -> int:
        """How many; few in large models, unless their precision lets more be compared."""
        is_long = self.model in applications.MODELS and self.policy != "float64"
        is_few = self.is_short or is_long or self.model in TOO_LARGE_FOR_FLOAT64
        return FEW_STEPS if is_few else STEPS


_TRACED_IN_SECONDS = (
    Cell("two towers, synchronised BN", "fit", "float64"),
    Cell("U-Net", "loop", world=WITH_ONEDNN),
    Cell("LSTM", "Horovod's fit", "float64"),
    Cell("two convolutions with biases", "fit", world=UNLIKE_PROCESSORS),
    Cell("residual blocks, synchronised BN", "loop", "float64", 256 * KIB),
)

BY_VERSION = (
    Cell("ResNet50", "fit", world=WITH_ONEDNN),
    Cell("MobileNetV3Small", "loop", "float64"),
    Cell("BERT", "GradientReducer", "float64"),
    *_TRACED_IN_SECONDS,
)
"""Trained under each version of TensorFlow for the page, and every week in CI."""

QUICK = (
    Cell("VGG16", "fit", world=WITH_ONEDNN),
    Cell("embedding of 10 M parameters", "GradientReducer", "float64"),
    *_TRACED_IN_SECONDS[:-1],
)
"""The cells of `make test`, short: the same ways and worlds, of what is traced in seconds."""

CONVOLUTIONS = "two convolutions with biases"
BRANCHES = "residual blocks, synchronised BN"


def cells() -> list[Cell]:
    """All cells that fit into this machine, each once."""
    every = (*BY_VERSION, *QUICK, *_everywhere(), *_ways(), *_precisions(), *_bucket_sizes())
    fitting = (cell for cell in (*every, *_worlds()) if NEEDED_GIB.get(cell.model, 0) <= MEMORY_GIB)
    return list(dict.fromkeys(fitting))


def _everywhere() -> Iterable[Cell]:
    """Every model in fit as users have it, and in a loop in the precision that shows errors."""
    for model in MODELS:
        yield Cell(model, "fit", world=WITH_ONEDNN)
        if model in applications.LARGER_SIZES:
            continue
        yield Cell(model, "fit")
        yield Cell(model, "loop", "float32" if model in TOO_LARGE_FOR_FLOAT64 else "float64")


def _ways() -> Iterable[Cell]:
    """Every way with several models, in both precisions where the graph differs."""
    for model in (CONVOLUTIONS, BRANCHES):
        yield Cell(model, "fit, steps_per_execution=4")
        yield Cell(model, "fit, run_eagerly")
        yield Cell(model, 'fit, jit_compile="auto"')
        yield Cell(model, "fit, gradients accumulated", "float64")
        yield Cell(model, "fit, gradients clipped", "float64")
        yield Cell(model, "loop, gradients accumulated", "float64")
        yield Cell(model, "loop")
    for model in (BRANCHES, "GRU"):
        yield Cell(model, "loop in a function")
        yield Cell(model, "loop, reduce_retracing")
        yield Cell(model, "loop with tf.cond", "float64")
        yield Cell(model, "loop with tf.while_loop")
        yield Cell(model, "loop with tf.map_fn")
    for model in (CONVOLUTIONS, "GPT, tied embeddings"):
        yield Cell(model, "loop, tf.recompute_grad")
        yield Cell(model, "GradientReducer, tf.recompute_grad", "float64")
        yield Cell(model, "loop, tape in a tape", "float64")
        yield Cell(model, "loop, persistent tape")
        yield Cell(model, "loop, forward pass by XLA")
    for model in (CONVOLUTIONS, BRANCHES):
        yield Cell(model, "loop, every pass of Grappler on")
        yield Cell(model, "loop, every pass of Grappler off")
        yield Cell(model, "loop, auto mixed precision")
    for model in ("ViT", "GPT, tied embeddings", "GAN", "embedding of 10 M parameters"):
        yield Cell(model, "GradientReducer", "float64")
        yield Cell(model, "Horovod's tape", "float64")
    for model in ("MobileNetV3Small", "U-Net"):
        yield Cell(model, "GradientReducer")
        yield Cell(model, "Horovod's tape")
        yield Cell(model, "Horovod's fit")


def _precisions() -> Iterable[Cell]:
    """Sixteen bits, where TensorFlow rewrites graphs in yet other ways."""
    for policy in ("mixed_float16", "mixed_bfloat16"):
        for model in (CONVOLUTIONS, BRANCHES, "BERT"):
            yield Cell(model, "fit", policy)
        yield Cell("BERT", "loop", policy)
    yield Cell("ResNet50", "fit", "mixed_bfloat16")
    for model in ("ResNet50", "two towers, synchronised BN", "LSTM"):
        yield Cell(model, "fit", "float64")


def _bucket_sizes() -> Iterable[Cell]:
    """From one gradient in each to all in one."""
    for bucket_bytes in (64 * KIB, 1 * MIB, 64 * MIB):
        for model in (CONVOLUTIONS, "VGG16", "GPT, tied embeddings"):
            yield Cell(model, "fit", bucket_bytes=bucket_bytes)
        yield Cell("U-Net", "GradientReducer", "float64", bucket_bytes)


def _worlds() -> Iterable[Cell]:
    """What users set, or the launcher sets for them."""
    for world in (WITHOUT_ONEDNN, SHARED_CORES):
        for model in ("ResNet50", "U-Net", BRANCHES):
            yield Cell(model, "fit", world=world)
        yield Cell(CONVOLUTIONS, "loop", world=world)
    # Larger ones amplify the difference of two kernels' roundings to the size of the training.
    yield Cell(BRANCHES, "fit", world=UNLIKE_PROCESSORS)
    yield Cell(CONVOLUTIONS, "loop", world=UNLIKE_PROCESSORS)
