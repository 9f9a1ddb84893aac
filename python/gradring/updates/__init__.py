"""Update rules: how the ranks of a training update their variables.

====================  ===========================================================================
`AllReduce`           every step applies the sum of all ranks' gradients, on every rank
`Primary`             the chief applies it alone, and gives everybody its variables
`LocalSGD`            each rank trains alone for some steps; then they average their variables
`ParameterServer`     servers keep the variables; workers push gradients, and pull variables
`Nesterov`            for `LocalSGD`: what is done with an average, as in DiLoCo
`Int8`, `Bits16`      for `AllReduce`: gradients travel as numbers of 8 or 16 bits
`TopK`, `PowerSGD`    for `AllReduce`: their largest elements travel, or matrices of low rank
====================  ===========================================================================

A rule is a word for a strategy, ``CustomCollectiveStrategy(update=updates.Primary())``, and imports
no framework. docs/choosing-an-update-rule.md compares them.
"""

from gradring.updates.compression import Bits16, Compression, Int8, PowerSGD, TopK
from gradring.updates.rules import (
    AllReduce,
    LocalSGD,
    Nesterov,
    ParameterServer,
    Primary,
    Rule,
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
    "TopK",
    "agree",
]
