"""All models, by name."""

from __future__ import annotations

from real_models import applications, pairs_and_sizes, sequences, vision
from real_models.real_model import RealModel

MODELS: dict[str, RealModel] = (
    applications.MODELS | vision.MODELS | sequences.MODELS | pairs_and_sizes.MODELS
)
