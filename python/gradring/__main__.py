"""``python -m gradring`` is the ``gradring`` command."""

import sys

from gradring.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
