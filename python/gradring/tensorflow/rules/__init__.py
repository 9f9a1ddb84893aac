"""What the update rules of `gradring.updates` do under TensorFlow.

====================  ===================================================================="""
