"""Views of a rank and its training, and records for later.

====================  ===================================================================
``monitor``           where the time of steps goes, while they run
``step_report``       what a monitor counts, and how it says so
``step_log``          the same as a file of JSON lines
``metrics``           counters for Prometheus
``observer``          what of it the settings ask for, from when a group is joined to its end
``paths``             where the files are that ranks write about their last collectives
``explanation``       the records of all ranks as sentences: who did not come, who waits for it
====================  ===================================================================
"""
