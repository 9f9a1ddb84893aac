"""``gradring demo``: two workers train on real data, and what came of it.

====================  ===================================================================
``train``             the training script, as a user would write it
``recorder``          what one process of it measures and leaves behind
``variants``          the three ways in which the demo runs it, and how
``progress``          the live line while it runs
``machine``           how busy other programs keep the processors
``results``           what the processes left behind, as numbers
``verdict``           what must be true of the results; the exit code
``tables``            the results as text
``picture``           the results as a picture
``page``              the results as a page of HTML
``story``             the whole demo, from the first run to the last line
``trouble``           instead: a slow rank or a killed one, and what is said about it
``trouble_train``     the training script with such a rank
====================  ===================================================================

Only ``train`` and ``trouble_train`` import TensorFlow; only ``picture`` imports matplotlib.
"""

from gradring.demo.story import demo

__all__ = ["demo"]
