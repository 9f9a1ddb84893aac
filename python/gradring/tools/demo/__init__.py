"""``gradring demo``: a training of two workers on real data, with a report.

====================  ===================================================================
``train``             the training script, as a user would write it; also elastic
``story``             the main demo: three trainings, checks and report
``rules``             the demo of another update rule
``trouble``           the demos of a slow rank and of a killed one
``results``           results of the processes, and the checks on them
``report``            the results as text, as a picture, and as a page, from ``page.html``
====================  ===================================================================

Only ``train`` imports TensorFlow; only the picture imports matplotlib.
"""
