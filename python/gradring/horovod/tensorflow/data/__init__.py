"""`horovod.tensorflow.data`: the interface of Horovod's compute service, for `--input-workers`."""
