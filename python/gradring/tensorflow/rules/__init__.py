"""The update rules of `gradring.updates` under TensorFlow.

====================  ===========================================================================
``updates``           `Updates`, the hooks of a rule, which the replaced functions of Keras call.
``compression/``      `AllReduce.compression`.
``accumulation``      ``sync_every``: sums gradients of several steps for another rule.
``local``             `LocalSGD`.
``parameter_server``  `ParameterServer` in a worker; `cluster/serving.py` is a server.
``primary``           `Primary`.
``factory``           Maker of the `Updates` of a rule.
``replicas``          `sync_replicas`, and the search for the rule of given variables.
``unreduced``         Refusal of updates by gradients that were not reduced.
====================  ===========================================================================
"""
