"""A suite that misbehaves on purpose, and the runs that prove the orchestrator loses nothing to it."""
