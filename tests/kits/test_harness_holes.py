"""Why tests of others stayed green (catalogue T01-T11): each hole is made here, and this suite refuses to have it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch

import kits
from kits import backends, reference
from kits.backends.flash_attention import FA3Backend
from kits.errors import MismatchError
from kits.faults import find, planted
from kits.faults.registry import Changes
from kits.faults.trial import Trial, attempt
from kits.faults.weaken import weakened
from kits.kernels import _attend
from kits.pools import KVPool
from kits.runners import common
from kits.runners.cuda_graph import GraphSubtest
from kits.runners.graph import GraphRunner
from kits.runners.plan import plan_of
from kits.subtest import Subtest
from orchestrator.power.planning import read_matrix
from tests.kits.generated import GENERATED, planned

ENTRIES = read_matrix(GENERATED).entries
GRAPHS = {subtest_id: subtest for subtest_id, subtest in planned().items() if subtest.runner != "eager"}


@pytest.fixture
def changes() -> Iterator[Changes]:
    made = Changes("test")
    yield made
    made.undo()


def plan(subtest: Subtest) -> Any:
    return plan_of(subtest, random.Random(subtest.seed))


def outcome(subtest_id: str) -> Trial:
    return attempt(planned()[subtest_id])


# --- T01: padding more polite than production's, and only real rows compared ---------------------------------------


def test_t01_every_padded_cell_has_productions_padding_too() -> None:
    polite = {subtest_id for subtest_id in planned() if ".small_real." in subtest_id}
    assert polite
    assert {subtest_id.replace(".small_real.", ".prod_fill.") for subtest_id in polite} <= set(planned())


def test_t01_polite_padding_or_real_rows_alone_would_miss_it() -> None:
    rough = "dense.triton.draft_extend_v2_cg.eagle_chain.total.prod_fill.x2"
    with planted("F01") as plant:
        assert outcome(rough.replace("prod_fill", "small_real")).outcome == "passed"
        with weakened("real rows"):
            assert outcome(rough).outcome == "passed"
            assert plant.changed, "the fault is there, and nobody looks"
        assert outcome(rough).check == "metadata_invariants"


# --- T02: one capture, one replay, one size -------------------------------------------------------------------------


@pytest.mark.parametrize("subtest_id", GRAPHS)
def test_t02_every_plan_switches_sizes_and_comes_back(subtest_id: str) -> None:
    made = plan(GRAPHS[subtest_id])
    sizes = [step.size for step in made.steps]
    captured = [size for size, _ in made.captures]
    assert captured == sorted(set(captured), reverse=True), "the largest is captured first, each once"
    assert set(sizes) <= set(captured)
    turns = [first != second for first, second in itertools.pairwise(sizes)]
    assert sum(turns) >= 2, f"replays of {sizes} never leave a size and return"
    assert sizes[0] in sizes[1:]


def test_t02_one_replay_of_one_size_would_miss_it() -> None:
    subtest_id = "dense.trtllm_mha.decode_cg.decode3_free.prod_fill.x2"
    with planted("F16"):
        with weakened("one replay"):
            assert outcome(subtest_id).outcome == "passed"
        assert outcome(subtest_id).killed


# --- T03: what is replayed is what was captured ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "subtest_id", ["dense.fa3.verify_cg.eagle_chain.prod_fill.x1", "swa.triton.split_op.ragged3.pcg"]
)
def test_t03_captures_and_replays_share_no_request(subtest_id: str, changes: Changes) -> None:
    seen: dict[str, list[Any]] = {"capture": [], "prepare": []}
    subtest = planned()[subtest_id]

    def spy(name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def method(self: Any, size: int, requests: Sequence[Any], *rest: Any) -> Any:
                seen[name] += [(id(r), r.total_len, tuple(r.slots["full"].tolist())) for r in requests]
                return original(self, size, requests, *rest)

            return method

        return make

    from kits.runners.split_op import SplitRunner

    for runner in (GraphRunner, SplitRunner):
        changes.replace(runner, "capture", spy("capture"))
        changes.replace(runner, "prepare", spy("prepare"))
    kits.run(subtest)
    captured, replayed = ({slots for _, _, slots in seen[name]} for name in ("capture", "prepare"))
    assert captured
    assert not captured & replayed
    assert max(length for _, length, _ in seen["capture"]) < max(length for _, length, _ in seen["prepare"])


def test_t03_capturing_what_is_replayed_would_miss_it(changes: Changes) -> None:
    """Memoised metadata (F21) are right for as long as nothing changes."""
    subtest_id = "dense.fa3.verify_cg.eagle_chain.prod_fill.x1"
    own: list[Any] = []

    def remember(original: Any) -> Any:
        def _eager_leg(self: GraphSubtest, requests: Sequence[Any]) -> Any:
            own[:] = requests
            return original(self, requests)

        return _eager_leg

    def capture_own(_original: Any) -> Any:
        def _capture_all(self: GraphSubtest) -> None:
            for size, _ in self.plan.captures:
                self.runner.capture(size, own)
                self.suite.notes.captures += self.runner.captured[size].graph.captures

        return _capture_all

    with planted("F21"):
        assert outcome(subtest_id).killed
        with weakened("one replay"):
            changes.replace(GraphSubtest, "_eager_leg", remember)
            changes.replace(GraphSubtest, "_capture_all", capture_own)
            assert outcome(subtest_id).outcome == "passed"


# --- T04: fixture and production disagree about what a length means -------------------------------------------------


def test_t04_every_cell_states_its_convention() -> None:
    by_mode: dict[str, set[str]] = {}
    for subtest in planned().values():
        by_mode.setdefault(subtest.case.mode, set()).add(subtest.seq_lens)
    production = {"EXTEND": "total", "TARGET_VERIFY": "prefix", "DRAFT_EXTEND": "total", "DRAFT_EXTEND_V2": "total"}
    assert all(convention in by_mode[mode] for mode, convention in production.items())


def test_t04_bending_the_backend_to_a_fixture_turns_fourteen_red() -> None:
    """Adding the new tokens in the backend satisfies the prefix fixture, and breaks all that follow production."""
    total = [
        subtest
        for subtest in planned().values()
        if subtest.case.mode == "DRAFT_EXTEND_V2" and subtest.adapter.startswith("kits.backends.flash_attention:")
        and subtest.seq_lens == "total"
    ]  # fmt: skip
    assert len(total) == 14
    with planted("F12"):
        assert [attempt(subtest).outcome for subtest in total] == ["failed"] * 14
        fixture = attempt(planned()["dense.fa3.draft_extend_v2.eagle_chain.prefix"])
    assert fixture.outcome == "unexpected_pass", "and the known failure that it mends is noticed as well"


# --- T05: a graph test that replays nothing, or always full ---------------------------------------------------------


@pytest.mark.parametrize("subtest_id", [name for name, subtest in GRAPHS.items() if subtest.pad_style is not None])
def test_t05_every_padded_plan_replays_fewer_rows_than_it_captured(subtest_id: str) -> None:
    assert any(len(step.lens) < step.size for step in plan(GRAPHS[subtest_id]).steps)


def test_t05_a_graph_that_runs_the_model_again_is_refused(changes: Changes) -> None:
    """Its answers are right, and nothing was captured."""

    class Pretender:
        captures = replays = 0

    def capture(original: Any) -> Any:
        def pretend(self: GraphRunner, size: int, requests: Sequence[Any], **options: Any) -> Any:
            outputs = original(self, size, requests, **options)
            self.captured[size].graph = Pretender()  # type: ignore[assignment]
            return outputs

        return pretend

    def run(_original: Any) -> Any:
        def run_again(self: GraphRunner, captured: Any, requests: Sequence[Any]) -> Any:
            self.forward(captured.batch)
            return self._outputs(requests)

        return run_again

    changes.replace(GraphRunner, "capture", capture)
    changes.replace(GraphRunner, "run", run)
    assert outcome("dense.fa3.decode_cg.decode3_free.prod_fill.x2").check == "replay_count"


# --- T06: the key of a lookup is not the key of the capture ---------------------------------------------------------


@pytest.mark.parametrize("missing", ["smallest", "largest"])
def test_t06_one_size_that_is_not_found_and_runs_eagerly_is_refused(missing: str, changes: Changes) -> None:
    def make(original: Any) -> Any:
        def run(self: GraphRunner, captured: Any, requests: Sequence[Any]) -> Any:
            size = (min if missing == "smallest" else max)(self.captured)
            if captured is not self.captured[size]:
                return original(self, captured, requests)
            self.forward(captured.batch)
            return self._outputs(requests)

        return run

    changes.replace(GraphRunner, "run", make)
    assert outcome("dense.fa3.decode_cg.decode3_free.prod_fill.x2").check == "replay_count"


def test_t06_a_graph_chosen_by_shape_is_refused() -> None:
    with planted("F35") as plant:
        found = outcome("dense.flashinfer.decode_cg.decode3_free.prod_fill.x2")
        assert plant.changed
    assert found.killed


# --- T07: a skip whose condition is the failure ---------------------------------------------------------------------


class SkipsItsFailures(FA3Backend):
    """Finds its answer wrong and calls that a reason not to be tested."""

    reason: type[BaseException] = SkipTest

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        raise self.reason("all keys are masked here")


@pytest.mark.parametrize("reason", [SkipTest, pytest.skip.Exception])
def test_t07_the_code_under_test_cannot_skip(reason: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SkipsItsFailures, "reason", reason)
    subtest = planned()["dense.fa3.eager.decode3"]
    found = attempt(dataclasses.replace(subtest, adapter=f"{__name__}:SkipsItsFailures"))
    assert (found.outcome, found.check) == ("failed", "skip")
    assert "no known failure says that it may be" in found.message


def test_t07_pytest_reports_such_a_skip_as_a_failure(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["kits.pytest_plugin"]\n')
    (tmp_path / "test_dense_fa3.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from tests.kits.generated import planned

            @pytest.mark.parametrize("subtest", [planned()["dense.fa3.eager.decode3"]], ids=str)
            def test_eager(subtest):
                pytest.skip("as if nothing were wrong")
            """
        )
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=GENERATED.parent, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert "no known failure says that it may be: as if nothing were wrong" in done.stdout


# --- T08: values and tolerances that a constant satisfies -----------------------------------------------------------


CONSTANTS: dict[str, Callable[..., Any]] = {
    "zeros": lambda original, q, k, v, **rest: (lambda out, lse: (out * 0, lse))(*original(q, k, v, **rest)),
    "mean of all visible values": lambda original, q, k, v, **rest: original(q, k, v, **(rest | {"scale": 0.0})),
    "keys of another head": lambda original, q, k, v, **rest: original(q, k.roll(1, dims=-1), v, **rest),
}


@pytest.mark.parametrize("wrong", CONSTANTS)
@pytest.mark.parametrize("module", ["dense.fa3", "dense.flashinfer", "swa.fa3", "mla.flashinfer", "mla.flashmla"])
def test_t08_every_case_tells_attention_from_a_wrong_baseline(wrong: str, module: str, changes: Changes) -> None:
    def make(original: Any) -> Any:
        return lambda q, k, v, **rest: CONSTANTS[wrong](original, q, k, v, **rest)

    changes.replace_everywhere(_attend.attend, make)
    cases = [subtest for name, subtest in planned().items() if name.startswith(f"{module}.eager.")]
    assert cases
    for subtest in cases:
        with pytest.raises(MismatchError) as caught:
            kits.run(subtest)
        assert caught.value.margin > 5, subtest.id
        assert caught.value.wrong > 0.05, subtest.id


@pytest.mark.parametrize("method", ["dense", "swa", "mla"])
def test_t08_inputs_are_wide_and_of_both_signs(method: str, changes: Changes) -> None:
    seen: list[torch.Tensor] = []

    def make(original: Any) -> Any:
        def forward(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> Any:
            seen.extend(value.float() for value in (q, k, v))
            return original(self, q, k, v, *rest, **options)

        return forward

    from kits.backends.flashinfer import FlashInferBackend

    changes.replace(FlashInferBackend, "forward", make)
    kits.run(planned()[f"{method}.flashinfer.eager.zero_ragged"])
    for values in seen:
        assert abs(float(values.mean())) < 0.1
        assert float(values.std()) > 0.5
        assert 0.4 < float((values > 0).float().mean()) < 0.6


# --- T09: every parameter runs the backend that the first one chose -------------------------------------------------


def test_t09_a_backend_chosen_once_is_noticed(changes: Changes) -> None:
    first: list[Any] = []

    def cache(original: Any) -> Any:
        def load(adapter: str) -> Any:
            if not first:
                first.append(adapter)
            return original(first[0])

        return load

    changes.replace(backends, "load", cache)
    assert outcome("dense.fa3.eager.decode3").outcome == "passed"
    found = outcome("dense.triton.eager.cross2")
    assert (found.outcome, found.check) == ("failed", "backend_class")
    assert "kits.backends.triton:TritonBackend, but kits.backends.flash_attention.FA3Backend ran" in found.message


# --- T10: an axis whose every value gives the same answer -----------------------------------------------------------


def _without(**fields: Any) -> Callable[[Any], Any]:
    """A reference that leaves something out."""
    return lambda original: lambda *arguments, **options: original(*arguments, **(options | fields))


def _no_window(original: Any) -> Any:
    return lambda *arguments: original(*arguments[:-1], None)


def _chain(original: Any) -> Any:
    return lambda prefix, parents, window: original(prefix, tuple(range(-1, len(parents) - 1)), window)


AXES: dict[str, tuple[Callable[[Subtest], bool], str, Callable[[Any], Any]]] = {
    "window": (lambda s: s.model.window is not None and s.case.mode in ("EXTEND", "DECODE"), "causal_mask", _no_window),
    "softcap": (lambda s: s.model.softcap is not None, "attention", _without(softcap=None)),
    "sinks": (lambda s: s.model.sinks, "attention", _without(sinks=None)),
    "scale": (lambda s: True, "attention", _without(scale=1.0)),
    "tree": (lambda s: s.case.mode == "TARGET_VERIFY" and s.case.speculation.topk > 1, "tree_mask", _chain),  # type: ignore[union-attr]
}


def _carriers() -> dict[str, list[Subtest]]:
    """By axis and module, the subtests that have the axis on, those without a graph first."""
    found: dict[str, list[Subtest]] = {}
    for axis, (has, _, _) in AXES.items():
        for subtest in sorted(planned().values(), key=lambda subtest: subtest.runner != "eager"):
            method, backend, _ = subtest.id.split(".", 2)
            if has(subtest):
                found.setdefault(f"{axis}.{method}.{backend}", []).append(subtest)
    return found


@pytest.mark.parametrize("carrier", _carriers())
def test_t10_a_reference_without_the_axis_disagrees(carrier: str, changes: Changes) -> None:
    _, name, leave_out = AXES[carrier.split(".")[0]]
    changes.replace(common.reference, name, leave_out)
    assert any(attempt(subtest).check == "compare" for subtest in _carriers()[carrier])


def test_t10_a_pool_without_scales_disagrees(changes: Changes) -> None:
    def make(original: Any) -> Any:
        def write(self: KVPool, layer: Any, slots: Any, k: Any, v: Any) -> None:
            original(self, dataclasses.replace(layer, k_scale=1.0, v_scale=1.0), slots, k, v)

        return write

    scaled = [s for s in planned().values() if s.model.k_scale != 1.0 and s.runner == "eager"]
    assert all(s.model.k_scale != s.model.v_scale for s in scaled), "or K and V scales could be swapped"
    changes.replace(KVPool, "write", make)
    assert scaled
    assert all(attempt(subtest).killed for subtest in scaled)


# --- T11: an oracle that follows the backend ------------------------------------------------------------------------


def test_t11_the_reference_knows_no_backend_and_no_mode() -> None:
    folder = Path(inspect.getfile(reference)).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                assert node.module.split(".")[0] in ("torch", "__future__", "collections") or node.module.startswith(
                    "kits.reference"
                )
    for name in reference.__all__:
        parameters = set(inspect.signature(getattr(reference, name)).parameters)
        assert not parameters & {"mode", "backend", "backend_name", "metadata", "batch"}


@pytest.mark.parametrize("prefix", [0, 3, 7, 8, 9, 20])
def test_t11_one_window_for_decode_and_extend(prefix: int) -> None:
    extend = reference.causal_mask(prefix, 4, 8)
    for row in range(4):
        decode = reference.causal_mask(prefix + row, 1, 8)[0]
        assert torch.equal(extend[row, : prefix + row + 1], decode)
        assert not extend[row, prefix + row + 1 :].any()


def test_t11_a_window_that_differs_between_modes_shows_in_one_of_them() -> None:
    with planted("F31"):
        assert outcome("swa.triton.eager.decode3").check == "compare"
        assert outcome("swa.triton.eager.ragged3").outcome == "passed"
    assert find("F31").touches.modes == ("DECODE",)
