"""Tests of TensorFlow's multi-worker training and of Keras, run against gradring's strategy.

Their files are no part of this repository: `python -m conformance DIRECTORY` takes them from a
checkout of TensorFlow. They find our strategy where they look for MultiWorkerMirroredStrategy.

===============  =================================================================================
`suite`          which files, which of their tests, and how many workers each test needs
`run`            starts the workers, notices what hangs, collects the verdicts
`worker`         one worker: runs the tests of a file in step with the others
`stand_ins`      what a test file finds instead of TensorFlow's test runner and strategy
`report`         the tables of `docs/internals/conformance.md`
`keras`          Keras' own tests, plain and by ``gradring run --with-strategy``
`keras_plugin`   a rank of these, as a plugin of pytest
`keras_left`     tests that pass plain and not on ranks, with reasons
===============  =================================================================================
"""
