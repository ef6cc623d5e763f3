"""Run with ``python -m orchestrator.power``."""

import os
import sys

from orchestrator.power.cli import main

code = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # without the clean-up of the libraries that were imported, which is slow and noisy
