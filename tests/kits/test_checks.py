"""Each check of the lifecycle has a fault that it alone sees."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import kits
from kits import errors
from kits.asking import Check, seeing, settle
from kits.invariants import metadata_check
from kits.pools import KVGroup
from kits.runners import common, cuda_graph
from kits.runners.graph import GraphRunner
from tests.kits.subtests import CHAIN, make


def blind(*_: Any, **__: Any) -> Check[Any]:
    """In the place of a check: it looks at nothing."""
    return seeing(())


V2 = {"mode": "DRAFT_EXTEND_V2", "prefix": (4, 7), "speculation": CHAIN, "dtype": "float16", "multiplier": 2}


def test_invariants_alone_see_the_missing_clamp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The founding bug: real rows stay right, so that only the metadata of the padded ones tell."""
    kits.run(make("tests.kits.breakers:NoClamp", pad_style="small_real", **V2))
    with pytest.raises(errors.MetadataError) as caught:
        kits.run(make("tests.kits.breakers:NoClamp", pad_style="prod_fill", **V2))
    message = str(caught.value)
    assert message.startswith("replay of ")
    assert "kv_indptr (B=4): decreases by 2 behind row 2" in message
    monkeypatch.setattr(cuda_graph, "metadata_check", blind)
    kits.run(make("tests.kits.breakers:NoClamp", pad_style="prod_fill", **V2))


def test_metadata_that_no_invariant_knows_are_refused() -> None:
    with pytest.raises(errors.KitError, match=r"my_cache_seqlens_int32.* name the tensors as engines do: .*page_table"):
        kits.run(make("tests.kits.breakers:NamesItsOwnWay"))


def test_pointer_guard_alone_sees_a_rebound_name(monkeypatch: pytest.MonkeyPatch) -> None:
    subtest = make("tests.kits.breakers:RebindsBesideCopying")
    with pytest.raises(errors.PointerError):
        kits.run(subtest)
    monkeypatch.setattr("kits.graphs.PointerGuard.check", lambda self: None)
    kits.run(subtest)


def test_scattered_tokens_alone_see_pages_written_out_as_slots() -> None:
    keywords = {"dtype": "float16", "pad_style": "small_real", "multiplier": 2}
    kits.run(make("tests.kits.breakers:ExpandsPagesAtReplay", **keywords))
    with pytest.raises(errors.MetadataError, match="kv_indices"):
        kits.run(make("tests.kits.breakers:ExpandsPagesAtReplay", layout="non_monotonic_extend", **keywords))


def test_kv_integrity_alone_sees_a_foreign_write(monkeypatch: pytest.MonkeyPatch) -> None:
    subtest = make("tests.kits.breakers:WritesForeignSlot")
    with pytest.raises(errors.KVIntegrityError, match="live request outside the batch"):
        kits.run(subtest)
    monkeypatch.setattr(common.SubtestRun, "kv_integrity_check", blind)
    kits.run(subtest)


@pytest.mark.parametrize("scales", [{}, {"k_scale": 0.375, "v_scale": 2.1}], ids=["unscaled", "scaled"])
def test_kv_integrity_asks_for_the_bits_that_were_written(scales: dict[str, float], monkeypatch: Any) -> None:
    subtest = make("tests.kits.breakers:RoundsWhatItStores", dtype="float16", **scales)
    monkeypatch.setattr(common.SubtestRun, "compare", lambda *_: None)
    with pytest.raises(errors.KVIntegrityError, match="do not hold the new tokens"):
        kits.run(subtest)


def test_neighbour_check_alone_sees_a_coupled_row(monkeypatch: pytest.MonkeyPatch) -> None:
    subtest = make("tests.kits.breakers:LooksAtNeighbours")
    with pytest.raises(errors.NeighbourError, match="bit for bit"):
        kits.run(subtest)
    monkeypatch.setattr(cuda_graph.GraphSubtest, "_check_neighbours", lambda *_: None)
    monkeypatch.setattr(cuda_graph.GraphSubtest, "_require_replayed", lambda *_: None)
    kits.run(subtest)


@pytest.mark.parametrize("runner", ["cuda_graph", "pcg"])
def test_a_repeated_batch_alone_sees_other_bits(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens: dict[str, Any] = {"mode": "EXTEND", "prefix": (15, 4), "extend": (2, 3)} if runner == "pcg" else {}
    subtest = make("tests.kits.breakers:RoundsByTurns", runner=runner, **lens)
    with pytest.raises(errors.RepeatError, match="other bits the second time"):
        kits.run(subtest)
    monkeypatch.setattr(cuda_graph.GraphSubtest, "_require_repeated", lambda *_: None)
    monkeypatch.setattr(cuda_graph.GraphSubtest, "_check_neighbours", lambda *_: None)
    monkeypatch.setattr(cuda_graph.GraphSubtest, "_require_replayed", lambda *_: None)
    kits.run(subtest)


def test_poison_alone_sees_a_read_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    subtest = make("tests.kits.breakers:LoadsTail")
    with pytest.raises(errors.MismatchError, match="nan"):
        kits.run(subtest)

    def zeros(self: KVGroup, slots: Any, value: float = 0.0) -> None:
        for layer, buffer in self.k.items():
            buffer[slots] = 0.0
            self.v[layer][slots] = 0.0

    def zeroed_buffer(self: KVGroup, *arguments: Any) -> Any:
        view = original(self, *arguments)
        view.zero_()
        return view

    original = KVGroup._buffer
    monkeypatch.setattr(KVGroup, "_buffer", zeroed_buffer)
    monkeypatch.setattr(KVGroup, "poison", zeros)
    monkeypatch.setattr("kits.runners.graph.GraphRunner._load_values", _load_zeros)
    monkeypatch.setattr(cuda_graph.GraphSubtest, "_check_neighbours", lambda *_: None)
    monkeypatch.setattr(cuda_graph.GraphSubtest, "_require_replayed", lambda *_: None)
    kits.run(subtest)


def _load_zeros(self: Any, batch: Any, requests: Any) -> None:
    tokens = sum(request.extend_len for request in requests)
    import torch

    for layer in self.world.layers:
        index = layer.index
        for name in ("q", "k", "v", "out"):
            self.buffers[f"{name}.{index}"].zero_()
        self.buffers[f"q.{index}"][:tokens] = torch.cat([r.q[index] for r in requests])
        self.buffers[f"k.{index}"][:tokens] = torch.cat([r.k[index][r.prefix_len :] for r in requests])
        self.buffers[f"v.{index}"][:tokens] = torch.cat([r.v[index][r.prefix_len :] for r in requests])


def test_grown_replay_alone_sees_a_captured_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that fits all but the grown lengths: without that replay nothing fails."""
    subtest = make("tests.kits.breakers:BoundsByOwn")
    with pytest.raises(errors.MismatchError, match="own grown") as caught:
        kits.run(subtest)
    assert "replay of own (" not in str(caught.value)


def test_input_check_alone_sees_a_scaled_query(monkeypatch: pytest.MonkeyPatch) -> None:
    subtest = make("tests.kits.breakers:ScalesQueryInPlace")
    with pytest.raises(errors.InputError, match="changed q of layer 0"):
        kits.run(subtest)
    monkeypatch.setattr(common, "input_check", blind)
    with pytest.raises(errors.InputError, match=r"replay of own .* the forward changed q of layer 0"):
        kits.run(subtest)
    monkeypatch.setattr("kits.runners.graph.GraphRunner.inputs", lambda *_: {})
    kits.run(subtest)


@pytest.mark.parametrize(
    ("adapter", "error"),
    [
        ("WritesForeignSlot", errors.KVIntegrityError("eager DECODE: k[0] of KV group full changed")),
        ("ScalesQueryInPlace", errors.InputError("eager DECODE: the forward changed q of layer 0")),
        ("NamesItsOwnWay", errors.KitError("metadata() shows my_")),
    ],
    ids=["pool", "inputs", "metadata"],
)
def test_an_eager_forward_is_looked_at_too(adapter: str, error: Exception) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))):
        kits.run(make(f"tests.kits.breakers:{adapter}", runner="eager"))


def test_a_warm_up_is_looked_at_too() -> None:
    with pytest.raises(errors.KVIntegrityError, match=r"^warm-up of .* live request outside the batch"):
        kits.run(make("tests.kits.breakers:WritesForeignSlotOnce"))


def test_a_replay_is_looked_at_by_itself() -> None:
    """What is captured and not yet run writes nothing, and the eager leg and the warm-ups are right."""
    with pytest.raises(errors.KVIntegrityError, match=r"^replay of own .* live request outside the batch"):
        kits.run(make("tests.kits.breakers:WritesForeignSlotWhenReplayed"))


@pytest.mark.parametrize(
    ("adapter", "error"),
    [
        ("WritesForeignSlot", errors.KVIntegrityError("eager draft: k[0] of KV group full changed")),
        ("ShowsNegativeLengths", errors.MetadataError("metadata invariant(s) broken")),
    ],
    ids=["pool", "metadata"],
)
def test_an_eager_draft_is_looked_at_too(adapter: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphRunner, "capture", lambda *_: pytest.fail("too late"))
    with pytest.raises(type(error), match=re.escape(str(error))):
        kits.run(make(f"tests.kits.breakers:{adapter}", **DRAFT))


@pytest.mark.parametrize("field", ["positions", "input_ids"])
def test_what_the_model_is_given_is_looked_at(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured forward reads a copy made at capture, and no attention depends on it."""
    static_batch = GraphRunner.static_batch

    def stale(self: GraphRunner, size: int) -> Any:
        batch = static_batch(self, size)
        load = self.load

        def load_then_copy(given: Any, requests: Any) -> None:
            load(given, requests)
            if given is batch and size not in self.captured:
                forward_of[field] = getattr(batch, field).clone()

        forward_of: dict[str, Any] = {}
        self.load = load_then_copy  # type: ignore[method-assign]
        forward = self.forward

        def forward_on_copy(given: Any) -> None:
            forward(replace(given, **forward_of) if given is batch else given)

        self.forward = forward_on_copy  # type: ignore[method-assign]
        return batch

    monkeypatch.setattr(GraphRunner, "static_batch", stale)
    with pytest.raises(errors.InputError, match=r"replay of .*: the model was given"):
        kits.run(make("kits.backends.flash_attention:FA3Backend"))
    monkeypatch.setattr(cuda_graph.GraphSubtest, "_seen_check", blind)
    kits.run(make("kits.backends.flash_attention:FA3Backend"))


def test_padding_check_sees_what_a_larger_replay_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind the live ones keep the request and the write slots of an earlier batch."""
    monkeypatch.setattr("kits.runners.graph.GraphRunner._fill_tail", lambda *_: None)
    with pytest.raises(errors.MetadataError, match="the rest must be padding's"):
        kits.run(make("kits.backends.flash_attention:FA3Backend", pad_style="prod_fill", multiplier=2))


@pytest.mark.parametrize("field", ["seq_lens", "extend_seq_lens", "positions", "input_ids"])
def test_padding_check_alone_sees_lengths_that_a_larger_replay_left(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """One field of the padded rows is that of an earlier batch: nobody's pages are read, and real rows stay right."""
    subtest = make(
        "kits.backends.flash_attention:FA3Backend",
        mode="DRAFT_EXTEND",
        prefix=(14, 7),
        extend=(3, 1),
        speculation=CHAIN,
        pad_style="prod_fill",
        multiplier=2,
    )
    fill_tail = GraphRunner._fill_tail

    def stale(self: GraphRunner, batch: Any, rows: int, tokens: int) -> None:
        kept = self.buffers[field].clone()
        fill_tail(self, batch, rows, tokens)
        first = tokens if field in ("positions", "input_ids") else rows
        if self.captured:
            self.buffers[field][first:] = kept[first:]

    monkeypatch.setattr(GraphRunner, "_fill_tail", stale)
    with pytest.raises(errors.MetadataError, match=rf"(?m)^  {field} \(B=4\): .* the padding have"):
        kits.run(subtest)
    monkeypatch.setattr(cuda_graph, "padding_check", blind)
    kits.run(subtest)


def test_invariants_pass_over_what_is_missing() -> None:
    """Best effort: unknown and non-tensor fields are no violation."""

    class Batch:
        batch_size = 0
        seq_lens_sum = 0
        extend_seq_lens = None
        pool = type("Pool", (), {"groups": {}, "page_size": 1})

    import torch

    Batch.seq_lens = Batch.seq_lens_cpu = torch.zeros(0, dtype=torch.int32)
    known = {"cache_seqlens_int32": torch.zeros(0, dtype=torch.int32)}
    backend = SimpleNamespace(metadata=lambda: {"anything": 3, "kv_lens": None, **known})
    settle(metadata_check(backend, Batch, []))  # type: ignore[arg-type]


def test_a_list_of_the_draft_alone_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch's own list of new tokens is refreshed, its twin in the speculative info is not."""
    refresh = GraphRunner._refresh_host_mirrors

    def stale(self: GraphRunner, batch: Any) -> None:
        kept = batch.spec_info.extend_seq_lens_cpu
        refresh(self, batch)
        if self.captured:
            batch.spec_info.extend_seq_lens_cpu = kept

    monkeypatch.setattr(GraphRunner, "_refresh_host_mirrors", stale)
    with pytest.raises(errors.MetadataError, match=r"spec_info.extend_seq_lens_cpu \(B=2\)"):
        kits.run(
            make(
                "kits.backends.flash_attention:FA3Backend",
                mode="DRAFT_EXTEND",
                prefix=(14, 7),
                extend=(3, 1),
                speculation=CHAIN,
            )
        )


def test_outputs_stay_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner hands out its static buffers, which the next replay overwrites."""

    def views(self: GraphRunner, requests: Any) -> list[Any]:
        tokens = sum(request.extend_len for request in requests)
        return [self.buffers[f"out.{layer.index}"][:tokens] for layer in self.world.layers]

    subtest = make("kits.backends.flash_attention:FA3Backend")
    monkeypatch.setattr(GraphRunner, "_outputs", views)
    with pytest.raises(errors.OutputError, match="overwrote what the replay before had returned"):
        kits.run(subtest)
    nothing = property(lambda self: [], lambda self, value: None)
    monkeypatch.setattr(cuda_graph.GraphSubtest, "handed_out", nothing, raising=False)
    kits.run(subtest)


def test_shortest_captures_see_a_choice_made_by_length() -> None:
    """Production captures at the fill length; at the case's own lengths the right kernel would be captured."""
    with pytest.raises(errors.MismatchError, match=r"replay of own .* \(window\)"):
        kits.run(make("tests.kits.breakers:ChoosesByCapturedLength", method="swa", layers=("window", "full"), window=8))


@pytest.mark.parametrize("page_size", [16, 64])
def test_longest_row_leaves_no_column_to_spare(page_size: int) -> None:
    with pytest.raises(errors.MetadataError, match=r"page_table .* row \d needs \d pages"):
        kits.run(make("tests.kits.breakers:LeavesNoHeadroom", page_size=page_size))


DRAFT = {"prefix": (14, 7), "speculation": CHAIN, "seq_lens": "prefix", "runner": "cuda_graph_multi_step"}


@pytest.mark.parametrize("sweep", [{}, DRAFT], ids=["decode", "draft"])
def test_equal_lengths_are_replayed_on_other_requests(sweep: dict[str, Any]) -> None:
    with pytest.raises(errors.MetadataError, match="which its request does not own"):
        kits.run(make("tests.kits.breakers:SkipsEqualLengths", **sweep))


def test_one_replay_of_a_draft_is_padded() -> None:
    """Also where the sweep has no pad style."""
    subtest = make("tests.kits.breakers:StepsPaddedRowsBack", **DRAFT)
    with pytest.raises(errors.MetadataError, match=r"step0.cache_seqlens_int32 \(B=4\): worst value -1"):
        kits.run(subtest)
