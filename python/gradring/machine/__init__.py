"""The machine: its resources, network interfaces and free ports."""
