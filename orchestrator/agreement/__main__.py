"""Run with ``python -m orchestrator.agreement``."""

from orchestrator.agreement.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
