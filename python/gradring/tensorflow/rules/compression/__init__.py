"""The methods of `gradring.updates.AllReduce.compression` under TensorFlow.

==================  =============================================================================
``compressed``      `CompressedUpdates`, the rule: which gradients are compressed, and together
``bucket``          `Bucket`: gradients that travel together, and what they have lost so far
``owners``          sums of encoded parts, by their owners: for ``int8`` and ``bits16``
``int8``            bytes with a scale for each block
``bits16``          floats of 16 bits
``top_k``           the largest elements
``power_sgd``       products of small matrices
==================  =============================================================================

A compression is one function, ``reduce(bucket)``, a generator: it yields what it has started, is
sent the outcome, and returns the sum over all ranks. So all buckets start before any is waited for.
"""
