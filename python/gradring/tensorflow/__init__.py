"""gradring inside TensorFlow.

====================================  ==========================================================
name                                  what it does
====================================  ==========================================================
`CustomCollectiveStrategy`            `tf.distribute.MultiWorkerMirroredStrategy` over gradring
`GradientReducer`                     reduces a list of gradients, without any strategy
`all_reduce`                          reduces a tensor or a nest of tensors
`broadcast_variables`                 gives every rank the root's variables
`measure_overlap`                     how much communication was hidden behind computation
`save`                                saves a model or a checkpoint once, called on every rank
====================================  ==========================================================

All but `save` and `measure_overlap` work eagerly and inside a `tf.function`. None works in code
compiled with `jit_compile=True`: XLA has no kernel for gradring's ops and says so ("No registered
... OpKernel for XLA_CPU_JIT"). Compile the forward and backward pass, and reduce outside of it.

A collective that fails raises `tf.errors.AbortedError`, or `tf.errors.DeadlineExceededError` when
its time is over; where gradring sees it pass, the exception is also the one of `gradring.errors`,
such as `PeerLostError`. The message names the rank.
"""

from gradring.tensorflow.gradient_reducer import GradientReducer
from gradring.tensorflow.ops import all_reduce, broadcast_variables
from gradring.tensorflow.overlap import Overlap, measure_overlap
from gradring.tensorflow.save import save
from gradring.tensorflow.strategy import CustomCollectiveStrategy

__all__ = [
    "CustomCollectiveStrategy",
    "GradientReducer",
    "Overlap",
    "all_reduce",
    "broadcast_variables",
    "measure_overlap",
    "save",
]
