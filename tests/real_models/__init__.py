"""Real models, trained by two ranks as users train them, against one process.

=================  ===============================================================================
module             what it has
=================  ===============================================================================
`catalogue`        all models, by name
`applications`     those of `keras.applications`
`vision`           images and volumes: U-Net, ViT, branches, transposed convolutions, ...
`sequences`        texts and signals: BERT, GPT, LSTM, GRU, masks, ...
`pairs_and_sizes`  several networks at once (towers, GAN, VAE), and layers in extreme numbers, sizes
`real_model`       what the catalogue says of a model
`ways`             the ways of training: `fit`, loops, `GradientReducer`, Horovod
`alone`            the same training by one process, and how far rounding carries it
`grid`             which model is trained in which way, with which dtype and bucket size
`training`         one rank's part of a cell
`run`              the pairs of processes that go through the cells
`record`           what was found, in a file for each version of TensorFlow
`report`           the table of `docs/internals/conformance.md`
=================  ===============================================================================
"""
