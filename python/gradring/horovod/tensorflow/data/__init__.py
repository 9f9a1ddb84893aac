"""`horovod.tensorflow.data`: the names of Horovod's compute service, for `--input-workers`."""
