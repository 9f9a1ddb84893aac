"""``gradring demo``: two workers train on real data, and what came of it.

====================  ===================================================================
``train``             the training script, as a user would write it; also elastic
``story``             the demo: runs the script in three ways, checks and shows the results
``rules``             instead: another update rule
``trouble``           instead: a slow rank or a killed one, and what is said about it
``results``           what the processes left behind, as numbers, and what must be true of them
``report``            the results as text, as a picture, and as a page, from ``page.html``
====================  ===================================================================

Only ``train`` imports TensorFlow; only the picture imports matplotlib.
"""
