"""``python -m gradring`` is the ``gradring`` command."""

import sys

from gradring.cli import main

if __name__ == "__main__":
    sys.exit(main())
