"""A replay is a replay: each backend that breaks one rule is caught, with a message that names the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import kits
from kits import errors
from kits.faults.sources import edited
from kits.graphs import Graph
from kits.runners import multi_step, split_op
from kits.runners.graph import CapturedGraph, GraphRunner
from kits.world import Request
from tests.kits.generated import planned
from tests.kits.subtests import CHAIN, TREE, make


def breaker(name: str, **keywords: object) -> kits.Subtest:
    return make(f"tests.kits.breakers:{name}", **keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("CallsItem", "host_read"),
        ("CallsTolist", "host_read"),
        ("BuildsFromList", "host_list"),
        ("IndexesByMask", "boolean_mask"),
        ("ReadsHostTensor", "pageable_copy"),
        ("LaunchesTriton", "raw_triton_launch"),
    ],
)
def test_what_a_capture_refuses(name: str, rule: str) -> None:
    with pytest.raises(errors.CaptureError) as caught:
        kits.run(breaker(name))
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"warm-up and capture of 6: {rule}: ")


def test_rebound_metadata() -> None:
    with pytest.raises(errors.PointerError, match="cache_seqlens_int32"):
        kits.run(breaker("Rebinds"))


def test_constant_freed_after_capture() -> None:
    with pytest.raises(errors.PointerError, match="one"):
        kits.run(breaker("DropsConstant"))


def test_host_scalar_kept_from_capture() -> None:
    with pytest.raises(errors.MismatchError, match="replay of own"):
        kits.run(breaker("KeepsHostScalar"))


@pytest.mark.parametrize("runner", ["eager", "cuda_graph"])
def test_result_of_another_dtype(runner: str) -> None:
    with pytest.raises(errors.ResultError, match="float32"):
        kits.run(breaker("ReturnsFloat32", runner=runner))


@pytest.mark.parametrize(("name", "runner"), [("OneTreeForAll", "eager"), ("KeepsFirstTree", "cuda_graph")])
def test_tree_of_another_row(name: str, runner: str) -> None:
    """Rows draft trees of other shapes, and the same row another one in the next batch."""
    shape = {"runner": runner, "mode": "TARGET_VERIFY", "prefix": (14, 7), "seq_lens": "prefix", "speculation": TREE}
    kits.run(make("kits.backends.flash_attention:FA3Backend", **shape))  # type: ignore[arg-type]
    with pytest.raises(errors.MismatchError):
        kits.run(breaker(name, **shape))


@pytest.mark.parametrize("runner", ["eager", "cuda_graph"])
def test_accepted_counts_taken_for_new_tokens(runner: str) -> None:
    """In DRAFT_EXTEND_V2 a row has all that was drafted, whatever was accepted of it."""
    shape = {"runner": runner, "mode": "DRAFT_EXTEND_V2", "prefix": (4, 7), "dtype": "float16", "speculation": CHAIN}
    kits.run(make("kits.backends.triton:TritonBackend", **shape))  # type: ignore[arg-type]
    with pytest.raises(errors.MetadataError, match="qo_indptr"):
        kits.run(breaker("OffsetsOfAccepted", **shape))


def test_mode_left_active() -> None:
    with pytest.raises(errors.ModeLeakError, match="Forgotten"):
        kits.run(breaker("LeavesModeActive"))


def test_the_unbroken_backend_passes() -> None:
    kits.run(make("kits.backends.flash_attention:FA3Backend"))


def test_silent_eager_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that does not find its graph and runs the batch eagerly gives right answers, and is refused."""

    def run_eagerly(self: GraphRunner, captured: CapturedGraph, requests: Sequence[Request]) -> list[torch.Tensor]:
        self.forward(captured.batch)
        return self._outputs(requests)

    monkeypatch.setattr(GraphRunner, "run", run_eagerly)
    with pytest.raises(errors.NothingReplayedError, match="ran eagerly"):
        kits.run(make("kits.backends.flash_attention:FA3Backend"))


def _keeps(name: str, load: Callable[..., object]) -> Callable[..., object]:
    """``load``, but for one buffer, which keeps what it held."""

    def stale(self: GraphRunner, *arguments: object) -> object:
        before = self.buffers[name].clone()
        loaded = load(self, *arguments)
        if self.captured:
            self.buffers[name].copy_(before)
        return loaded

    return stale


@pytest.mark.parametrize(
    "subtest_id",
    [
        "dense.fa3.decode_cg.decode3_free.prod_fill.x2",
        "dense.triton.verify_cg.eagle_tree.small_real.x1",
        "dense.triton.eagle_draft_cg.eagle_tree",
        "dense.fa3.split_op.ragged3.pcg",
    ],
)
@pytest.mark.parametrize("name", ["positions", "input_ids"])
def test_tokens_of_another_batch(subtest_id: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and slots are right, but the model embeds and rotates the tokens of an earlier batch."""
    for runner, method in ((GraphRunner, "load"), (split_op.SplitRunner, "_load")):
        monkeypatch.setattr(runner, method, _keeps(name, getattr(runner, method)))
    with pytest.raises(errors.CheckFailed, match=name):
        kits.run(planned()[subtest_id])


def test_draft_steps_that_stay_where_the_first_was(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = "step_tokens(positions, rows, draft, step)"
    stand_still = edited(multi_step.run_steps, (advance, advance.replace("step)", "0)")))
    monkeypatch.setattr(multi_step, "run_steps", stand_still)
    with pytest.raises(errors.InputError, match="positions"):
        kits.run(planned()["dense.fa3.eagle_draft_cg.eagle_chain"])


def _record_nothing(self: split_op.SplitGraph, pieces: Sequence[split_op.Piece], attention: Sequence[object]) -> None:
    self.parts = [*pieces[:1], *(part for pair in zip(attention, pieces[1:], strict=True) for part in pair)]


def _replay_nothing(self: split_op.SplitGraph) -> None:
    for part in self.parts:
        if not isinstance(part, Graph):
            part()


@pytest.mark.parametrize("runner", ["pcg", "bcg"])
@pytest.mark.parametrize(("name", "nothing"), [("record", _record_nothing), ("replay", _replay_nothing)])
def test_split_graphs_that_run_eagerly(
    runner: str, name: str, nothing: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that were never captured give right answers too; graphs that are not replayed are refused by any check."""
    for graph in (split_op.PiecewiseGraph, split_op.BreakableGraph):
        monkeypatch.setattr(graph, name, nothing)
    refusal = errors.NothingReplayedError if name == "record" else errors.KitError
    with pytest.raises(refusal):
        kits.run(planned()[f"dense.fa3.split_op.ragged3.{runner}"])


def test_a_break_that_puts_its_result_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture behind a break reads the first result's memory; a later one that lies elsewhere never gets there."""

    def rebind(self: split_op.SplitGraph, name: str, result: torch.Tensor, size: int) -> None:
        self.ready[name] = result.new_zeros(size, *result.shape[1:])
        self.ready[name][: len(result)] = result

    for runner, graph in (("pcg", split_op.PiecewiseGraph), ("bcg", split_op.BreakableGraph)):
        monkeypatch.setattr(graph, "hand_back", rebind)
        with pytest.raises((errors.PointerError, errors.ReplayError)):
            kits.run(planned()[f"dense.fa3.split_op.ragged3.{runner}"])
