"""What makes the next run quick: caches in one place, imports before the fork, lanes that keep to what they know."""

from __future__ import annotations

import importlib.util
import itertools
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.caches import BYTECODE, cache_env
from orchestrator.campaign.fakesuite import passing, write_suite
from orchestrator.devices import Lanes
from orchestrator.durations import OUTLIER, estimate, load_durations
from orchestrator.errors import OrchestratorError
from orchestrator.folder import Run
from orchestrator.ledger import Attempt, Ledger
from orchestrator.planning import BACKEND_COST, LIBRARIES, Block, Plan, check_partition, digest, make_plan, queues_of
from orchestrator.running import Request, describe, prepare, remember, schedule
from orchestrator.scheduling import Job, Scheduler
from orchestrator.verdict import Result, Verdict
from tests.orchestrator.conftest import ROOT, planned


def test_caches_lie_in_one_place_and_leave_what_the_user_set(tmp_path: Path) -> None:
    added = cache_env({"ATTNMATRIX_CACHE": str(tmp_path), "TRITON_CACHE_DIR": "/mine"})
    assert "TRITON_CACHE_DIR" not in added
    folders = [value for name, value in added.items() if name.endswith(("_DIR", "_PATH", "_BASE"))]
    assert len(folders) == 5
    assert all(Path(folder).parent == tmp_path for folder in folders)
    assert cache_env({})["TRITON_CACHE_DIR"] == str(Path(".attnmatrix/cache/triton").resolve())


@pytest.fixture
def torch_without_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed torch whose compiler's source nobody has compiled, where Python may not write beside sources."""
    source = tmp_path / "site" / "torch" / "_inductor" / "compile_fx.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    (tmp_path / "site" / "torch-2.11.0.dist-info").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return source


def test_bytecode_that_cannot_lie_beside_its_source_is_kept_with_the_caches(torch_without_bytecode: Path) -> None:
    home = torch_without_bytecode.parents[3] / "home"
    env = {"ATTNMATRIX_CACHE": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= cache_env(env) | {"PYTHONPATH": str(torch_without_bytecode.parents[2])}
    subprocess.run([sys.executable, "-c", "import torch._inductor.compile_fx"], env={**os.environ, **env}, check=True)
    assert [path.parts[-2] for path in home.glob("bytecode/*/**/compile_fx.*.pyc")] == ["_inductor"]
    assert not list(torch_without_bytecode.parents[1].rglob("*.pyc"))


def test_python_is_left_alone_where_it_keeps_bytecode(torch_without_bytecode: Path, monkeypatch) -> None:
    assert BYTECODE in cache_env({})
    assert not {BYTECODE, "PYTHONDONTWRITEBYTECODE"} & set(cache_env({BYTECODE: "/mine"}))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert BYTECODE not in cache_env({}), "it can be written"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert BYTECODE in cache_env({})
    py_compile.compile(str(torch_without_bytecode))
    assert BYTECODE not in cache_env({}), "it is there"
    shutil.rmtree(torch_without_bytecode.parent / "__pycache__")
    torch_without_bytecode.unlink()
    assert BYTECODE not in cache_env({}), "another torch"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert BYTECODE not in cache_env({}), "none"


def test_another_installation_has_other_bytecode(torch_without_bytecode: Path) -> None:
    """Its sources may have the same size and time."""
    before = cache_env({})
    assert cache_env({}) == before
    info = torch_without_bytecode.parents[2] / "torch-2.11.0.dist-info"
    (info / "RECORD").write_text("torch/__init__.py,sha256=abc,0")
    built_again = cache_env({})
    info = info.rename(info.with_name("torch-2.12.0.dist-info"))
    assert len({env[BYTECODE] for env in (before, built_again, cache_env({}))}) == 3


def test_an_entry_of_the_path_that_cannot_be_read_is_passed_over(torch_without_bytecode: Path, monkeypatch) -> None:
    before = cache_env({})
    monkeypatch.syspath_prepend("a" * 5000)
    assert cache_env({}) == before


def test_importing_before_the_fork_touches_no_device_and_starts_no_thread() -> None:
    code = "import kits.preload, sys, threading, torch; "
    code += "assert not torch.cuda.is_initialized() and threading.active_count() == 1; "
    code += "assert {'kits.runners', 'kits.backends.triton', 'kits.backends.flashinfer'} <= set(sys.modules); "
    code += "assert not {'flashinfer', 'sgl_kernel', 'flash_attn', 'torch._inductor'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "ATTNMATRIX_DEVICE": "cpu"}, check=True)


PATIENT = """
import sys, threading, time
import triton.runtime.cache

done = []

def patient():
    for _ in range(6000):
        if "kits.backends.triton" in sys.modules:
            time.sleep(1)
            return done.append("hashed")
        time.sleep(0.01)

triton.runtime.cache.triton_key = patient
import kits.preload
assert done == ["hashed"] and threading.active_count() == 1
"""
"""Hashes Triton once everything else is imported."""


def test_triton_is_hashed_beside_the_imports_and_before_any_fork() -> None:
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # set here by some tests
    subprocess.run([sys.executable, "-c", PATIENT], cwd=ROOT, env=env | {"ATTNMATRIX_DEVICE": "cuda"}, check=True)


def test_workers_find_pytest_imported_and_nothing_to_collect() -> None:
    code = "import gc, sys; from orchestrator.launcher import preload; preload(['pytest']); "
    code += "assert {'_pytest.junitxml', '_pytest.skipping', 'orchestrator.worker_plugin'} <= set(sys.modules); "
    code += "assert 'conftest' not in sys.modules and gc.isenabled() and gc.get_freeze_count() > len(gc.get_objects())"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_first_subtest_of_a_process_does_not_count_for_its_imports() -> None:
    rows = [planned(number) for number in range(5)]
    seconds = estimate(rows, {row.id: 9.0 if row is rows[0] else 0.1 for row in rows})
    assert seconds[rows[0].id] == OUTLIER * 0.1
    assert seconds[rows[1].id] == 0.1


def test_the_first_subtest_of_a_backend_in_a_process_is_not_remembered(tmp_path: Path) -> None:
    """It takes long for its library's sake, and the plan counts that already."""
    rows = [planned(number, backend) for backend in ("aa", "bb") for number in range(3)]
    attempts = [
        Attempt(row.id, 0, "passed", f"w{n % 3 // 2}", seconds=9.0 if n % 3 != 1 else 0.1, started=float(n))
        for n, row in enumerate(rows)
    ]
    again = Attempt(rows[0].id, 1, "passed", "w0", seconds=0.3, started=9.0)
    results = [Result(row, 0, "passed", [attempt]) for row, attempt in zip(rows, attempts, strict=True)]
    results[0].attempts.append(again)
    run = Run(
        tests="", profile="ci", spec_sha256="", manifest_sha256="", plan_sha256="", commit="", selection=[],
        device_kind="NVIDIA H200",
    )  # fmt: skip
    remember(run, Verdict(run, Plan([], ""), results), tmp_path / "durations.json")
    known = load_durations("NVIDIA H200", [tmp_path / "durations.json"])
    assert known == {rows[0].id: 0.3, rows[1].id: 0.1, rows[4].id: 0.1}


@pytest.mark.parametrize(("count", "shards"), [(32, 4), (32, 8), (1, 8), (200, 8), (3, 1)])
def test_backends_with_libraries_are_kept_together(count: int, shards: int) -> None:
    backends = ("aa", "bb", "cc")
    rows = [planned(number, backend) for backend in backends for number in range(count)]
    plan = make_plan(rows, {row.id: 0.05 for row in rows}, shards, libraries=True)
    opened = [{block.subtests[0].backend for block in blocks} for blocks in plan.shards]
    assert sum(map(len, opened)) <= len(backends) + shards - 1
    loads = [plan.cost(shard) + BACKEND_COST * len(opened[shard]) for shard in range(shards)]
    assert max(loads) <= sum(loads) / shards + BACKEND_COST + 0.05 * 50


@pytest.mark.parametrize(("count", "openings"), [(8, 1), (20, 2)])
def test_a_slow_library_is_opened_for_what_is_worth_it(count: int, openings: int) -> None:
    """Many lanes alone are no reason: each would pay three seconds for a fraction of one."""
    rows = [planned(n, "flex_attention") for n in range(count)] + [planned(n, "triton") for n in range(200)]
    plan = make_plan(rows, {row.id: 0.05 for row in rows}, 16, libraries=True)
    opened = [blocks for blocks in plan.shards if any(b.subtests[0].backend == "flex_attention" for b in blocks)]
    assert len(opened) == openings


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_plan_has_as_many_shards_as_were_asked_for(shards: int) -> None:
    """Also where sums of the same costs differ in their last bit; a shard too many would be nobody's."""
    rows = [planned(0, "triton"), planned(1, "flex_attention")]
    for first, second in itertools.product((0.896, 0.1, 0.7), (2.025, 0.2, 0.3)):
        plan = make_plan(rows, {rows[0].id: first, rows[1].id: second}, shards, libraries=True)
        assert len(plan.shards) == shards
    with pytest.raises(OrchestratorError, match="has 2 shards, 1 were asked for"):
        check_partition(Plan([[], []], ""), [], 1)


def test_what_a_dead_worker_gives_back_stays_module_by_module() -> None:
    scheduler = Scheduler([[]], 1, False, lambda *_: False)
    scheduler.put_back([Job(planned(n, backend), 0) for n, backend in enumerate(("aa", "aa", "bb"))])
    assert [[job.planned.backend for job in scheduler.take(0)] for _ in range(2)] == [["aa", "aa"], ["bb"]]


def test_backends_of_one_library_share_processes() -> None:
    """FlashInfer is imported once for its own backend and for TRT-LLM's, whatever lies between their names."""
    backends = ("flashinfer", "triton", "trtllm_mha")
    rows = [planned(number, backend) for backend in backends for number in range(20)]
    plan = make_plan(rows, {row.id: 0.05 for row in rows}, 3, libraries=True)
    opened = [{block.subtests[0].backend for block in blocks} for blocks in plan.shards]
    assert sum("triton" in names for names in opened) == 1
    assert sum(bool(names & {"flashinfer", "trtllm_mha"}) for names in opened) == 2
    assert LIBRARIES["flashinfer"][0] == LIBRARIES["trtllm_mha"][0]


@pytest.mark.parametrize("part", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("kind", "lanes"), [("NVIDIA H200", 8), ("NVIDIA H200", 16), ("cpu", 4)])
def test_a_runner_cuts_its_shard_for_its_own_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: tuple[int, int], kind: str, lanes: int
) -> None:
    """``--shard 1/1`` is as fast as a run without it: as many queues as lanes, and few backends opened twice."""
    monkeypatch.chdir(tmp_path)
    suite = write_suite(tmp_path / "suite", passing(60, ("aa", "bb", "cc", "dd")))
    request = Request(tests=suite, part=part)
    manifest, plan = prepare(request, kind)
    run = describe(request, manifest, plan, Lanes(["x"] * lanes, kind, ""))
    before = plan.sha256
    scheduler = schedule(run, plan, Ledger(manifest.subtests), lanes, {})
    assert [bool(queue) for queue in scheduler.queues] == [True] * lanes
    mine = [row.id for block in plan.shards[part[0] - 1] for row in block.subtests]
    assert sorted(job.planned.id for queue in scheduler.queues for block in queue for job in block) == sorted(mine)
    if kind != "cpu":
        opened = [{block[0].planned.backend for block in queue} for queue in scheduler.queues]
        assert sum(map(len, opened)) <= len({id.split(".")[1] for id in mine}) + lanes - 1
    assert digest(plan) == before, "what the lanes make of a shard changes no label"


def test_all_of_a_plan_without_shards_stays_as_it_was_cut(tmp_path: Path) -> None:
    blocks = [[Block(n, "test_dense_aa.py", [planned(n)], 1.0)] for n in range(4)]
    assert queues_of(blocks, {}, 4, libraries=True) == blocks
    assert queues_of([[], blocks[1]], {planned(1).id: 1.0}, 1, libraries=True) == [blocks[1]]
    assert queues_of([[]], {}, 4, libraries=True) == [[]], "a shard may be empty"


def test_a_lane_opens_no_library_for_less_than_twice_its_cost() -> None:
    def schedule(cost: float) -> Scheduler:
        mine = [Block(0, "test_dense_aa.py", [planned(0, "aa")], 1.0)]
        theirs = [Block(1, "test_dense_bb.py", [planned(n, "bb")], 1.0) for n in range(3)]
        scheduler = Scheduler([mine, theirs], 1, False, lambda id, attempt: False, lambda planned: cost)
        assert len(scheduler.take(0)) == len(scheduler.take(1)) == 1
        return scheduler

    assert schedule(0.9).take(0), "two seconds are left there"
    scheduler = schedule(1.1)
    assert not scheduler.take(0)
    scheduler.put_back(scheduler.take(1))
    scheduler.leave(1)
    assert scheduler.take(0), "nobody is there any more"


def test_a_lane_that_has_helped_opens_no_library_either() -> None:
    """It works there now, but whoever came before it has the library already."""
    mine = [Block(0, "test_dense_aa.py", [planned(0, "aa")], 1.0)]
    theirs = [Block(1, "test_dense_bb.py", [planned(n, "bb")], 1.0) for n in range(4)]
    theirs.append(Block(1, "test_dense_cc.py", [planned(9, "cc")], 1.0))
    scheduler = Scheduler([mine, theirs], 1, False, lambda *_: False, lambda job: 9.0 if job.backend == "bb" else 0.0)
    assert [lane_takes[0].planned.backend for lane_takes in map(scheduler.take, (1, 0, 0))] == ["bb", "aa", "cc"]
    assert not scheduler.take(0)
    assert [len(scheduler.take(1)) for _ in range(4)] == [1, 1, 1, 0], "and nothing is left behind"


def test_whoever_came_first_takes_what_nobody_would_pay_for() -> None:
    """Also where that is no lane's own queue."""
    queues = [[], [], [Block(2, "test_dense_bb.py", [planned(n, "bb")], 1.0) for n in range(4)]]
    scheduler = Scheduler(queues, 1, False, lambda *_: False, lambda job: 9.0)
    assert [len(scheduler.take(lane)) for lane in (0, 1, 0, 1, 0)] == [1, 0, 1, 0, 1]
    scheduler.leave(0)
    assert scheduler.take(1)


def test_a_helper_takes_what_it_knows_first() -> None:
    files = ["aa", "bb", "aa", "cc"]
    blocks = [Block(0, f"test_dense_{b}.py", [planned(n, b)], 1.0) for n, b in enumerate(files)]
    other = [Block(1, "test_dense_aa.py", [planned(9)], 1.0)]
    scheduler = Scheduler([blocks, other], 1, False, lambda id, attempt: False)

    def take(lane: int) -> str:
        (job,) = scheduler.take(lane)
        return job.planned.id.split(".", 1)[1]

    assert take(0) == "aa.eager.case_0"
    assert take(1) == "aa.eager.case_9"
    assert take(1) == "aa.eager.case_2", "of another's shard, the module that this lane has opened"
    assert take(1) == "cc.eager.case_3", "then from its end"
    assert take(0) == "bb.eager.case_1"
    assert scheduler.take(0) == []
