"""What a host lacks makes a subtest unavailable; what a backend states it can do is what its class says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import kits
from generator.matrix import Project
from kits import Native, backends, needs
from kits.errors import Unavailable
from tests.kits.subtests import make

CUDA = torch.device("cuda", 0)
SPEC = Project.open(Path(__file__).parents[2] / "suite.toml").spec
FA3 = "kits.backends.flash_attention:FA3Backend"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_a_missing_package_is_no_failure() -> None:
    """The adapter is not even imported: it may need the package for that."""
    subtest = dataclasses.replace(make("no.such.module:Backend"), requires=("no-such-package>=2", "torch<2"))
    with pytest.raises(
        Unavailable, match=r"no-such-package>=2 \(not installed\) and torch<2 \(installed is "
    ) as caught:
        kits.run(subtest)
    assert caught.value.kind == "package"


def test_a_cpu_needs_no_native_library() -> None:
    kits.run(
        dataclasses.replace(
            make(FA3, runner="eager"), native=Native(packages=("no-such-package",), capability=">=99.0")
        )
    )


@pytest.mark.parametrize(
    ("native", "kind"),
    [
        (Native(packages=("torch>=2",), capability="==9.0"), None),
        (Native(packages=(), capability=">=9.0,<11.0"), None),
        (Native(packages=(), capability=">=10.0,<11.0"), "architecture"),
        (Native(packages=("no-such-package",), capability=">=10.0"), "architecture"),
        (Native(packages=("no-such-package",), capability=">=8.0"), "package"),
    ],
)
def test_a_gpu_needs_it(native: Native, kind: str | None, hopper: None) -> None:
    subtest = dataclasses.replace(make(FA3), native=native)
    if kind is None:
        needs.require(subtest, CUDA)
        return
    with pytest.raises(Unavailable) as caught:
        needs.require(subtest, CUDA)
    assert caught.value.kind == kind


def test_a_capability_is_that_of_the_chosen_device(hopper: None) -> None:
    """A CPU run on a host with a GPU has none."""
    assert needs.has_capability("==9.0", CUDA)
    assert not needs.has_capability("==9.0", torch.device("cpu"))


@pytest.mark.parametrize("name", SPEC.backends)
def test_the_spec_states_what_the_class_says(name: str) -> None:
    stated, can = SPEC.backends[name], backends.load(SPEC.backends[name].adapter).capabilities
    assert set(stated.modes) == can.forward_modes
    assert set(stated.methods) == can.methods
    assert {stated.dtype, *stated.dtypes} <= can.dtypes
    assert can.page_sizes is None or set(stated.page_sizes) == can.page_sizes
    has = {"window": can.window, "softcap": can.softcap, "sinks": can.sinks, "kv_scales": can.kv_scales}
    assert set(stated.features) == {feature for feature, there in has.items() if there} | (
        {"tree"} if can.topk > 1 else set()
    )
    graphs = {"never": set(), "split": {"pcg", "bcg"}, "always": {"pcg", "bcg", "cuda_graph", "cuda_graph_multi_step"}}
    assert set(stated.runners) - {"eager"} <= graphs.get(can.graph, graphs["always"])


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "runs"),
    [("3.6.0", "2.4.6", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.4.6", True), ("3.9.0", "2.4.6", True)],
)
def test_an_interpreter_that_its_numpy_breaks_is_named(triton_version: str, numpy_version: str, runs: bool) -> None:
    """Each of these was tried."""
    problem = needs.interpreter_problem(triton_version, numpy_version)
    assert problem is None if runs else "install triton 3.7 or newer, or numpy older than 2.4" in str(problem)
