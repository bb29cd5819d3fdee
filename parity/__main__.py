"""`python -m parity ...`, the same as the installed `parity` command; works from a bare checkout."""

import sys

from parity.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
