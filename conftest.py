"""Loads the plugin that runs and reports subtests, for every test below this folder."""

pytest_plugins = ["kits.pytest_plugin"]
