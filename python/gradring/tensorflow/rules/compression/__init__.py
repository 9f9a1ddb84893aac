"""The methods of `gradring.updates.AllReduce.compression` under TensorFlow.

==================  =============================================================================
``compressed``      `CompressedUpdates`: which gradients are compressed, and in which buckets.
``bucket``          `Bucket`: gradients compressed together, and their kept compression errors.
``owners``          Sums of encoded parts by their owners, for ``int8`` and ``bits16``.
``int8``            Bytes with a scale for each block.
``bits16``          Floats of 16 bits.
``top_k``           The largest elements.
``power_sgd``       Products of small matrices.
==================  =============================================================================

A compression is one generator, ``reduce(bucket)``. It yields the tensors of collectives that it has
started, is sent their results, and returns the sum over all ranks. So the collectives of all
buckets start before any is awaited.
"""
