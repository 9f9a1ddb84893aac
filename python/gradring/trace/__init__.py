"""What ranks recorded about their collectives, and what it means.

====================  ===================================================================
``records``           the file that each rank writes
``places``            where it is
``timeline``          the records of all ranks as one timeline, in Chrome's trace format
``explanation``       the records of all ranks as sentences: who did not come, who waits for it
====================  ===================================================================
"""
