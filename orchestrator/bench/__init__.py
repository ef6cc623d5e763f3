"""How long the matrix takes, by number of GPUs and of workers on each, and what the time goes to.

``python -m orchestrator.bench`` (``nox -s bench``) runs every setting several times, in turns, and writes medians.
"""
