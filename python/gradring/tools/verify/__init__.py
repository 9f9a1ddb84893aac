"""``gradring verify``: comparison of a training on N ranks and on one process.

====================  ===================================================================
``comparison``        two recorded trainings, step by step and variable by variable
``verdict``           the result in plain words, with the likely cause of a difference
====================  ===================================================================

`gradring.records.trainings` defines the records of the processes, and
`gradring.tensorflow.stand_ins.recording` writes them.
"""
