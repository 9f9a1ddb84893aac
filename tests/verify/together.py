"""Several programs in one process, as each start costs seconds: ``together.py PROGRAM...``."""

import runpy
import sys

for path in sys.argv[1:]:
    runpy.run_path(path)
