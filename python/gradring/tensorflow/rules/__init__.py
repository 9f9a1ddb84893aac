"""The update rules of `gradring.updates` under TensorFlow.

====================  ===========================================================================
``updates``           `Updates`, the hooks of a rule: this is all that Keras' optimizers know
``compression/``      `AllReduce.compression`
``accumulation``      ``sync_every``: adds gradients up before another rule has them
``local``             `LocalSGD`
``parameter_server``  `ParameterServer` in a worker; `cluster/serving.py` is a server
``primary``           `Primary`
``factory``           the `Updates` of a rule
``replicas``          `sync_replicas`, and what else finds the rule of variables
====================  ===========================================================================
"""
