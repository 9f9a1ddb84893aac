"""Programs written for Horovod, with one changed import.

=====================  ====================================================================
module                 stands for
=====================  ====================================================================
``tensorflow``         ``horovod.tensorflow``
``tensorflow.keras``   ``horovod.tensorflow.keras``, for Keras 3 and for `tf_keras`
``tensorflow.data``    ``horovod.tensorflow.data``
=====================  ====================================================================

The names and meanings are Horovod's; docs/coming-from-horovod.md says what differs. Nothing of
Horovod is imported.
"""
