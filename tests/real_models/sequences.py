"""Texts and signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from real_models.real_model import RealModel, arrays, words

VOCABULARY, LENGTH, WIDTH = 8000, 32, 256


def embedded(tokens: Any, **options: Any) -> tuple[Any, Any]:
    """Words and their positions; and the table of the words."""
    import keras

    class Positions(keras.layers.Layer):  # type: ignore[misc]
        def build(self, _: Any) -> None:
            self.table = self.add_weight(shape=(LENGTH, WIDTH), name="positions")

        def call(self, x: Any) -> Any:
            return x + self.table

    table = keras.layers.Embedding(VOCABULARY, WIDTH, **options)
    return Positions()(table(tokens)), table


def transformed(x: Any, layers_of: int = 4, **attention: Any) -> Any:
    """Layers of attention and feed-forward networks, normalised behind each."""
    import keras

    layers = keras.layers
    for _ in range(layers_of):
        x = layers.LayerNormalization()(
            layers.Add()([x, layers.MultiHeadAttention(4, WIDTH // 4)(x, x, **attention)])
        )
        y = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    return x


def bert() -> Any:
    """Attention both ways, without the padding; the first word's state is classified."""
    import keras

    tokens = keras.Input((LENGTH,), dtype="int32")
    x, _ = embedded(tokens)
    seen = keras.layers.Lambda(lambda t: (t != 0)[:, None, :], output_shape=(1, LENGTH))(tokens)
    first = transformed(x, attention_mask=seen)[:, 0]
    pooled = keras.layers.Dense(WIDTH, activation="tanh")(first)
    return keras.Model(tokens, keras.layers.Dense(10)(pooled))


def gpt() -> Any:
    """Attention backwards; the table of the words is the last layer, too."""
    import keras

    class Words(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, table: Any) -> None:
            super().__init__()
            self.table = table

        def call(self, x: Any) -> Any:
            weights = keras.ops.cast(self.table.embeddings, x.dtype)
            return keras.ops.matmul(x, keras.ops.transpose(weights))

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape[:-1], VOCABULARY)

    tokens = keras.Input((LENGTH,), dtype="int32")
    x, table = embedded(tokens)
    return keras.Model(tokens, Words(table)(transformed(x, use_causal_mask=True)))


def next_words(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Texts, and the same texts one word later."""
    texts = draw.integers(0, VOCABULARY, (count, LENGTH + 1)).astype(np.int32)
    return texts[:, :-1], texts[:, 1:]


def recurrent(name: str, bidirectional: bool = False) -> Callable[[], Any]:
    """Two layers of LSTM or GRU, which leave out the padding."""

    def build() -> Any:
        import keras

        layers = keras.layers

        def layer(**options: Any) -> Any:
            made = getattr(layers, name)(WIDTH, **options)
            return layers.Bidirectional(made) if bidirectional else made

        return keras.Sequential(
            [
                layers.Input((LENGTH,), dtype="int32"),
                layers.Embedding(VOCABULARY, 64, mask_zero=True),
                layer(return_sequences=True),
                layer(),
                layers.Dense(10),
            ]
        )

    return build


def signal() -> Any:
    """Causal, dilated Conv1D in residual blocks."""
    import keras

    layers = keras.layers
    x = inputs = keras.Input((64, 8))
    x = layers.Conv1D(256, 3, padding="causal")(x)
    for dilation in (1, 2, 4):
        y = layers.Conv1D(256, 3, padding="causal", dilation_rate=dilation, activation="relu")(x)
        x = layers.Add()([x, layers.Conv1D(256, 1)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def masked_attention() -> Any:
    """A question attends to a text; both are padded, and their masks travel with them."""
    import keras

    layers = keras.layers
    text, question = (keras.Input((LENGTH,), dtype="int32") for _ in range(2))
    table = layers.Embedding(VOCABULARY, 128, mask_zero=True)
    encode = layers.Bidirectional(layers.GRU(128, return_sequences=True))
    states, asked = encode(table(text)), encode(table(question))
    met = layers.Concatenate()(
        [
            layers.Attention(use_scale=True)([asked, states]),
            layers.AdditiveAttention()([asked, states]),
        ]
    )
    pooled = layers.GlobalAveragePooling1D()(met)
    return keras.Model([text, question], layers.Dense(10)(pooled))


def questions(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Texts and questions of different lengths, and the answers' classes."""
    text, label = words(VOCABULARY, LENGTH, padded=True)(draw, count)
    question, _ = words(VOCABULARY, LENGTH, padded=True)(draw, count)
    return (text, question), label


padded = words(VOCABULARY, LENGTH, padded=True)

MODELS = {
    "BERT": RealModel(bert, padded),
    "GPT, tied embeddings": RealModel(gpt, next_words),
    "LSTM": RealModel(recurrent("LSTM"), padded),
    "GRU": RealModel(recurrent("GRU"), padded),
    "bidirectional LSTM": RealModel(recurrent("LSTM", bidirectional=True), padded),
    "Conv1D": RealModel(signal, arrays((64, 8))),
    "attention with masks": RealModel(masked_attention, questions),
}
