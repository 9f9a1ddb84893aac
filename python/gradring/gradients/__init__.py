"""Parts that every front end needs to reduce gradients, whatever framework computes them.

* `buckets`: which tensors travel together;
* `names`: what collectives are called, in messages and in the comparison between ranks;
* `checks`: what is done about gradients that are not finite;
* `reduction`: the description of a reduction, which has all of these;
* `replicas`: whether the ranks still have the same weights.
"""
