"""``gradring demo``: two workers train on real data, and what came of it.

====================  ===================================================================
``train``             the training script, as a user would write it
``elastic_train``     the same, elastic
``trainings``         the three ways in which the demo runs it, and how
``results``           what the processes left behind, as numbers
``verdict``           what must be true of the results; the exit code
``tables``            the results as text
``picture``           the results as a picture
``page``              the same as a page of HTML, from ``page.html``
``story``             the whole demo, from the first run to the last line
``rules``             instead: another update rule
``trouble``           instead: a slow rank or a killed one, and what is said about it
====================  ===================================================================

Only ``train`` imports TensorFlow; only ``picture`` imports matplotlib.
"""

from gradring.tools.demo.story import demo

__all__ = ["demo"]
