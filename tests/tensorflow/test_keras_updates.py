"""Updates that the server's optimizers are compared with are those of the installed Keras."""

from __future__ import annotations

import json

import pytest
from keras_updates import FILE, OPTIMIZERS, updates

from support.chosen import marked

#: One of each class.
QUICK = (
    *("SGD Nesterov", "Adagrad", "Adam amsgrad", "AdamW", "RMSprop centered", "Adadelta"),
    *("Adamax", "Nadam", "Lion", "Ftrl other"),
)


@pytest.mark.parametrize("name", marked(OPTIMIZERS, QUICK))
def test_the_core_is_compared_with_what_keras_does(name: str) -> None:
    written = json.loads(FILE.read_text())[name]
    computed = json.loads(json.dumps(updates(name)))
    assert computed == written, "look at what Keras changed, then run keras_updates.py"
