"""An environment in which gradring is installed as by pip, with the packages of this one behind it.

``gradring_start.pth`` counts only among installed packages, and not for what is on PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from support.documents import ROOT

START = ROOT / "python" / "data" / "purelib" / "gradring_start.pth"


def environment_with_start_hook(directory: Path, *options: str, pip: bool = False) -> Path:
    """Makes the environment; returns its interpreter.

    Args:
        directory: Where.
        options: Of ``python -m venv``.
        pip: Whether it has pip, for packages of its own, and none of this environment's.
    """
    made = options if pip else (*options, "--without-pip")
    subprocess.run([sys.executable, "-m", "venv", *made, directory], check=True)
    (packages,) = directory.glob("lib/python3*/site-packages")
    behind = [ROOT / "python"] if pip else [ROOT / "python", sysconfig.get_path("purelib")]
    (packages / "developer.pth").write_text("".join(f"{path}\n" for path in behind))
    shutil.copy(START, packages)
    if not pip and "COVERAGE_PROCESS_CONFIG" in os.environ:  # in `make coverage`
        (packages / "measured.pth").write_text("import coverage; coverage.process_startup()\n")
    return directory / "bin" / "python"
