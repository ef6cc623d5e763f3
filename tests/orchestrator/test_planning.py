"""Cutting a selection into shards, estimating durations, and choosing subtests."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import planning
from orchestrator.durations import estimate, load_durations, save_durations
from orchestrator.errors import OrchestratorError
from orchestrator.folder import bulk
from orchestrator.manifest import Planned, parse_manifest
from orchestrator.planning import check_partition, make_plan
from orchestrator.scheduling import Scheduler
from orchestrator.selection import Selection, parse_keyword, select


def subtest(id: str, weight: float = 1.0) -> Planned:
    method, backend, sweep, rest = id.split(".", 3)
    return Planned(id, f"test_{method}_{backend}.py", f"test_{sweep}[{rest}]", method, backend, sweep, weight)


def matrix(modules: int, each: int) -> list[Planned]:
    return [subtest(f"m{m % 3}.b{m:02}.s{n % 5}.case_{n}") for m in range(modules) for n in range(each)]


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    shards=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_every_subtest_lies_in_exactly_one_shard(counts, shards, seed):
    rng = random.Random(seed)
    subtests = [subtest(f"m.b{m}.s.c{n}") for m, count in enumerate(counts) for n in range(count)]
    seconds = {planned.id: rng.lognormvariate(0, 2) for planned in subtests}
    plan = make_plan(subtests, seconds, shards)
    placed = [planned.id for blocks in plan.shards for block in blocks for planned in block.subtests]
    assert sorted(placed) == sorted(planned.id for planned in subtests)
    assert len(plan.shards) == shards
    assert all(block.shard == n for n, blocks in enumerate(plan.shards) for block in blocks)
    assert make_plan(subtests, seconds, shards).sha256 == plan.sha256


def test_the_planner_checks_its_own_work(monkeypatch):
    """A planner that drops a subtest, or plans it twice, is stopped before anything runs."""
    subtests = matrix(2, 10)
    seconds = dict.fromkeys((planned.id for planned in subtests), 1.0)
    cut = planning.cut
    for damage in (lambda blocks: blocks[1:], lambda blocks: [*blocks, blocks[0]]):
        monkeypatch.setattr(planning, "cut", lambda *args, damage=damage: damage(cut(*args)))
        with pytest.raises(OrchestratorError) as caught:
            make_plan(subtests, seconds, 3)
        assert caught.value.code == "O118"


def test_recorded_durations_balance_within_a_tenth():
    """Times as skewed as in the real matrix: a module in the interpreter is ten times slower than the others."""
    rng = random.Random(3)
    subtests = matrix(15, 37)
    base = {planned.backend: rng.choice((0.05, 0.1, 0.3, 2.0)) for planned in subtests}
    seconds = {planned.id: base[planned.backend] * rng.lognormvariate(0, 0.8) for planned in subtests}
    plan = make_plan(subtests, seconds, 4)
    costs = [plan.cost(shard) for shard in range(4)]
    assert max(costs) <= 1.1 * sum(costs) / 4
    opened = sum(len({block.file for block in blocks}) for blocks in plan.shards)
    assert opened < 4 * 15, "modules are kept together where that costs no balance"


def test_one_heavy_subtest_gets_a_shard_of_its_own():
    subtests = matrix(1, 9)
    seconds = dict.fromkeys((planned.id for planned in subtests), 1.0)
    seconds[subtests[4].id] = 100.0
    plan = make_plan(subtests, seconds, 3)
    assert [subtests[4].id] in [[p.id for block in blocks for p in block.subtests] for blocks in plan.shards]


def test_unknown_durations_are_estimated_from_their_likes():
    subtests = [subtest(f"m.{b}.{s}.c{n}", 2.0) for b in "xy" for s in ("fast", "slow") for n in range(3)]
    known = {"m.x.slow.c0": 9.0, "m.x.slow.c1": 11.0, "m.x.fast.c0": 0.5}
    seconds = estimate(subtests, known)
    assert seconds["m.x.slow.c2"] == 10.0, "by backend and sweep"
    assert seconds["m.y.slow.c0"] == 10.0, "by sweep"
    assert seconds["m.x.fast.c0"] == 0.5
    assert estimate(subtests, {})["m.x.slow.c2"] == 2.0, "by weight, in seconds where nothing is known"


def test_durations_are_blended_and_survive_a_round_trip(tmp_path):
    path = tmp_path / "durations.json"
    save_durations(path, "cpu", {"a.b.c.d": 4.0})
    save_durations(path, "cpu", {"a.b.c.d": 2.0, "a.b.c.e": 1.0})
    save_durations(path, "NVIDIA H200", {"a.b.c.d": 0.1})
    assert load_durations("cpu", [path]) == {"a.b.c.d": 3.0, "a.b.c.e": 1.0}
    assert load_durations("cpu", [tmp_path / "none.json"]) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format":1,"seconds":{"cpu":{"x":"y"}}}', "[" * 99999])
def test_unusable_durations(tmp_path, text):
    path = tmp_path / "durations.json"
    path.write_text(text)
    with pytest.raises(OrchestratorError) as caught:
        load_durations("cpu", [path])
    assert caught.value.code == "O117"


def test_the_schedule_hands_out_each_job_once_and_takes_back_what_was_not_started():
    subtests = matrix(4, 20)
    plan = make_plan(subtests, dict.fromkeys((p.id for p in subtests), 1.0), 4)
    scheduler = Scheduler(plan.shards, 1, False, lambda id, attempt: False)
    rng, seen = random.Random(1), []
    while scheduler.waiting:
        block = scheduler.take(rng.randrange(3))
        back = [job for job in block if rng.random() < 0.3]
        scheduler.put_back(back)
        seen += [job for job in block if job not in back]
    assert sorted(job.planned.id for job in seen) == sorted(planned.id for planned in subtests)
    queue_of = {p.id: n for n, blocks in enumerate(plan.shards) for block in blocks for p in block.subtests}
    assert all(job.queue == queue_of[job.planned.id] for job in seen), "each goes back to where it came from"


def test_two_lanes_share_four_shards_without_meeting_before_they_must():
    subtests = matrix(8, 20)
    plan = make_plan(subtests, dict.fromkeys((p.id for p in subtests), 1.0), 4)
    scheduler = Scheduler(plan.shards, 1, False, lambda id, attempt: False)
    sizes = [len(blocks) for blocks in plan.shards]
    worked: list[set[int]] = [set(), set()]
    while scheduler.waiting:
        for lane in range(2):
            worked[lane] |= {job.queue for job in scheduler.take(lane)}
    assert [len(shards) for shards in worked] == [2, 2], (sizes, worked)
    assert not worked[0] & worked[1]


# Selection


@pytest.mark.parametrize(
    ("text", "matching"),
    [
        ("fa3", {"a.fa3.x.one", "a.fa3.y.two"}),
        ("fa3 and not x", {"a.fa3.y.two"}),
        ("(one or two) and triton", {"a.triton.x.one"}),
        ("fa*two", {"a.fa3.y.two"}),
        ("not fa3 and not triton", set()),
    ],
)
def test_keyword_expressions(text, matching):
    ids = ["a.fa3.x.one", "a.fa3.y.two", "a.triton.x.one"]
    matches = parse_keyword(text)
    assert {id for id in ids if matches(id)} == matching


@pytest.mark.parametrize("text", ["and", "(fa3", "fa3)", "fa3 or", "not", "fa3 fa4", "a & b", "()", "__import__('os')"])
def test_bad_keyword_expressions(text):
    with pytest.raises(OrchestratorError) as caught:
        parse_keyword(text)
    assert caught.value.code == "O114"


def test_selection_by_name_id_and_node():
    subtests = [subtest(id) for id in ("dense.fa3.eager.one", "dense.fa4.eager.one", "mla.fa3.decode.two")]
    assert select(subtests, Selection(backends=("fa3",), methods=("mla",))) == [subtests[2]]
    assert select(subtests, Selection(ids=("dense.fa4.eager.one",))) == [subtests[1]]
    assert select(subtests, Selection(ids=("generated_tests/test_dense_fa4.py::test_eager[one]",))) == [subtests[1]]
    for wrong in (Selection(sweeps=("eagre",)), Selection(ids=("dense.fa3.eager.onne",))):
        with pytest.raises(OrchestratorError) as caught:
            select(subtests, wrong)
        assert caught.value.code == "O113"
        assert caught.value.hint in ("did you mean eager?", "did you mean dense.fa3.eager.one?")
    with pytest.raises(OrchestratorError) as caught:
        select(subtests, Selection(keyword="nothing"))
    assert caught.value.code == "O112"


# Size


def test_a_hundred_thousand_subtests_are_planned_in_two_seconds():
    rows = [
        {
            "id": f"m.b{b:02}.s{s:02}.case_{n}",
            "node": f"generated_tests/test_m_b{b:02}.py::test_s{s:02}[case_{n}]",
            "method": "m",
            "backend": f"b{b:02}",
            "sweep": f"s{s:02}",
            "weight": 1.0 + n % 7,
        }
        for b in range(20)
        for s in range(20)
        for n in range(250)
    ]
    raw = {"format": 1, "profile": "big", "spec_sha256": "0", "subtests": rows}
    text = json.dumps(raw)
    began = time.process_time()
    with bulk():
        manifest = parse_manifest(json.loads(text), Path(), "0")
        plan = make_plan(manifest.subtests, estimate(manifest.subtests, {}), 4)
    spent = time.process_time() - began
    check_partition(plan, manifest.subtests, 4)
    assert spent < 2.0 * slowness(), spent


def slowness() -> float:
    """How much slower than an idle core this one is now (1 or more), so that a busy machine fails no test."""
    began = time.process_time()
    sum(range(3_000_000))
    return max(1.0, (time.process_time() - began) / 0.05)
