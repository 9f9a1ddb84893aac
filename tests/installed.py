"""An environment in which gradring is installed as by pip, with the packages of this one behind it.

``gradring_start.pth`` counts only among installed packages, and not for what is on PYTHONPATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from documents import ROOT

START = ROOT / "python" / "data" / "purelib" / "gradring_start.pth"


def environment_with_start_hook(directory: Path) -> Path:
    """Makes the environment; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (packages,) = directory.glob("lib/python3*/site-packages")
    behind = [ROOT / "python", sysconfig.get_path("purelib")]
    (packages / "developer.pth").write_text("".join(f"{path}\n" for path in behind))
    shutil.copy(START, packages)
    return directory / "bin" / "python"
