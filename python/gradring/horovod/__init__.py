"""Horovod's interface, for programs written for Horovod, with one changed import or none.

=====================  ====================================================================
module                 stands for
=====================  ====================================================================
``tensorflow``         ``horovod.tensorflow``
``tensorflow.keras``   ``horovod.tensorflow.keras``, for Keras 3 and for `tf_keras`
``tensorflow.data``    ``horovod.tensorflow.data``
=====================  ====================================================================

Names and semantics are Horovod's; docs/coming-from-horovod.md lists the differences. Horovod itself
is never imported. ``python -m gradring.horovod PROGRAM ...`` starts a program that imports
``horovod``; ``gradring run --as-horovod`` starts its ranks.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["__version__", "run"]
__dir__ = __all__.copy

#: Version of Horovod whose interface this is.
__version__ = "0.28.1"


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises an error: unlike Horovod's function, it cannot start ranks.

    Raises:
        NotImplementedError: Always; the message has the ways to start ranks.
    """
    raise NotImplementedError(
        "horovod.run is not there: start the ranks of a program by gradring run, srun or mpirun; "
        "gradring.testing.run_ranks runs a function on ranks of this host"
    )
