"""The machine: its resources, interfaces, free ports, packages, and the streams of this process."""
