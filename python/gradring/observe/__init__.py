"""Views of a rank and its training, and records for later.

====================  ===================================================================
``monitor``           the use of time in training steps, while they run
``step_report``       counters of a monitor, and its lines, table and verdict
``step_log``          the lines as a file of JSON
``metrics``           counters for Prometheus
``observer``          starts the views that the settings ask for
``explanation``       sentences on missing and waiting ranks, from the ranks' records
====================  ===================================================================
"""
