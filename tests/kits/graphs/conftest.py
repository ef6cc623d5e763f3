"""These tests run on the device that ``ATTNMATRIX_DEVICE`` names; what only the recorder can show asks for ``cpu``."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from kits.graphs import device_session


@pytest.fixture(scope="session")
def device() -> torch.device:
    name = os.environ.get("ATTNMATRIX_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


@pytest.fixture
def cpu(device: torch.device) -> torch.device:
    if device.type != "cpu":
        pytest.skip("shows a property of the recorder")
    return device


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    gc.collect()  # a dead cycle may hold a tensor that the pointer guard should see as freed


@pytest.fixture(autouse=True)
def _session(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """A session and no autograd around each test, but for those that open their own."""
    if "own_session" in request.fixturenames:
        yield
        return
    with device_session(device), torch.no_grad():
        yield


@pytest.fixture
def own_session() -> None:
    """The test opens its session itself."""
