"""This machine: its resources, interfaces, free ports, packages, and this process's streams."""
