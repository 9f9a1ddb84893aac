"""Parts that every front end needs to reduce gradients, whatever framework computes them.

* `buckets`: groups of tensors that travel together.
* `names`: names of collectives, for messages and for the comparison between ranks.
* `checks`: checks of gradients for NaN and infinity, and of arguments.
* `reduction`: the description of a reduction, which combines these.
* `replicas`: the comparison of the ranks' weights.
"""
