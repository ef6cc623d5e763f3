"""suite.toml to test modules, manifest and tables. Never imports torch."""
