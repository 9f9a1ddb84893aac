"""Programs written for Horovod, with one changed import or none.

=====================  ====================================================================
module                 stands for
=====================  ====================================================================
``tensorflow``         ``horovod.tensorflow``
``tensorflow.keras``   ``horovod.tensorflow.keras``, for Keras 3 and for `tf_keras`
``tensorflow.data``    ``horovod.tensorflow.data``
=====================  ====================================================================

The names and meanings are Horovod's; docs/coming-from-horovod.md says what differs. Nothing of
Horovod is imported. ``python -m gradring.horovod PROGRAM ...`` starts a program that imports
``horovod``, and ``gradring run --as-horovod`` its ranks.
"""

from __future__ import annotations

from typing import Any, NoReturn

#: The Horovod whose names these are.
__version__ = "0.28.1"


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Starts no ranks, as Horovod's function would.

    Raises:
        NotImplementedError: Always; says what starts ranks.
    """
    raise NotImplementedError(
        "horovod.run is not there: start the ranks of a program by gradring run, srun or mpirun; "
        "gradring.testing.run_ranks runs a function on ranks of this host"
    )
