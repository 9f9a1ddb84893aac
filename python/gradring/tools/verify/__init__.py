"""``gradring verify``: whether N ranks train a program as one process does.

====================  ===================================================================
``comparison``        two recorded trainings, step by step and variable by variable
``verdict``           what a comparison means, in plain words, and its likely cause
====================  ===================================================================

`gradring.records.trainings` has what the processes record, and
`gradring.tensorflow.stand_ins.recording` who records it.
"""
