"""What holds for every test."""

from __future__ import annotations

import os

# Where the tests run must not change what they see: nox and a CI service announce themselves to whatever the tests
# start, and a fault or a folder of leases that somebody has set is not meant for the suite's own tests.
ANNOUNCEMENTS = ("GITHUB_", "NOX_", "ATTNMATRIX_")
# A choice of device and of caches is.
CHOICES = {"ATTNMATRIX_DEVICE", "ATTNMATRIX_DEVICES", "ATTNMATRIX_CACHE"}


def pytest_configure() -> None:
    for name in set(os.environ) - CHOICES:
        if name.startswith(ANNOUNCEMENTS):
            del os.environ[name]
