"""The suite's own test: plant each seeded fault of ``kits.faults`` and see which subtests catch it.

``python -m orchestrator.power`` (``nox -s power``) plans from ``generated_tests/manifest.json``, forks a process for
each fault, and writes ``POWER.md`` and ``results/power.json``.
"""
