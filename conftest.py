"""Makes a bare checkout's tests see the pytest plugin that an installed package registers by its entry point."""

import os

# Read by the test processes when they import torch: with two threads each they would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = ["parity.suite.plugin"]
