"""The machine: its resources, network interfaces, free ports, and the streams of this process."""
