"""End of a machine from inside: its kernel stops at once, and no socket or file is closed."""

from pathlib import Path


def cut_power(when: str) -> None:
    """Ends the machine on which this runs, as a cut of its power does; its console says when."""
    Path("/dev/kmsg").write_text(f"<1>the power is cut: {when}\n")
    Path("/proc/sysrq-trigger").write_text("b")
