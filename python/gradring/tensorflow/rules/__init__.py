"""What the update rules of `gradring.updates` do under TensorFlow.

==================  =============================================================================
``updates``         `Updates`, the hooks of a rule: this is all that Keras' optimizers know
``accumulation``    ``sync_every``: adds gradients up before another rule has them
``local``           `LocalSGD`
``primary``         `Primary`
``making``          the `Updates` of a rule
``replicas``        `sync_replicas`, and what else finds the rule of variables
==================  =============================================================================
"""
