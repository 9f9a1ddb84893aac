"""Update rules: how the ranks of a training update their variables.

====================  ===========================================================================
`AllReduce`           each step applies the sum of all ranks' gradients, on every rank.
`Primary`             the chief applies this sum alone, and sends its variables to all.
`Sharded`             each rank applies it to its part of the variables; all gather them.
`LocalSGD`            ranks train alone for some steps, and then average their variables.
`ParameterServer`     servers keep the variables; workers push gradients and pull variables.
`Nesterov`            for `LocalSGD`: an optimizer applies the average, as in DiLoCo.
`Int8`, `Bits16`      for `AllReduce`: gradients are sent as numbers of 8 or 16 bits.
`TopK`, `PowerSGD`    for `AllReduce`: their largest elements are sent, or matrices of low rank.
====================  ===========================================================================

A rule is an argument of a strategy, ``CustomCollectiveStrategy(update=updates.Primary())``, and
imports no framework. docs/choosing-an-update-rule.md compares the rules.
"""

from gradring.updates.compression import Bits16, Compression, Int8, PowerSGD, TopK
from gradring.updates.rules import (
    AllReduce,
    LocalSGD,
    Nesterov,
    ParameterServer,
    Primary,
    Rule,
    Sharded,
    agree,
)

__all__ = [
    "AllReduce",
    "Bits16",
    "Compression",
    "Int8",
    "LocalSGD",
    "Nesterov",
    "ParameterServer",
    "PowerSGD",
    "Primary",
    "Rule",
    "Sharded",
    "TopK",
    "agree",
]
__dir__ = __all__.copy
