"""A connected group: its collectives over arrays and objects, and how a process gets one."""
