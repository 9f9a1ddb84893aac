"""``gradring demo``: a training of two workers on real data, with a table and a picture.

====================  ===================================================================
``train``             the training script, as a user would write it; also elastic
``launched``          a launch of this script, whose output is shown
``story``             the main demo: three trainings and their comparison
``rules``             the demo of another update rule
``trouble``           the demos of a slow rank and of a killed one
``report``            results of the three trainings: checks, table, comparison, picture
====================  ===================================================================

Only ``train`` imports TensorFlow; only the picture imports matplotlib.
"""
