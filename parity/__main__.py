"""`python -m parity ...`, the same as the installed `parity` command; works from a bare checkout."""

import os
import sys

# `python -m` puts the current folder first, where a user's `impl.py` or `torch.py` would be taken for another module.
if sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    sys.path.append(sys.path.pop(0))

from parity.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
