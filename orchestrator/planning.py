"""Cut a selection into shards: longest first, module by module, the cost of opening a module counted.

A shard is a list of blocks. A block is a run of subtests of one module, small enough to balance with, and is what a
worker is handed at a time. The plan depends on its arguments only, so that several runners cut alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.errors import OrchestratorError
from orchestrator.manifest import Planned

SHARDS = 4
MODULE_COST = 0.3
"""Seconds to import and collect one more module, as measured on two slow cores."""
LIBRARIES = {
    "flex_attention": ("inductor", 3.0),
    "fa4": ("flash_attn.cute", 1.5),
    "flashinfer": ("flashinfer", 1.5),
    "trtllm_mha": ("flashinfer", 1.5),
}
"""Backends that begin with a slow library: its name, and the seconds until a process can run the first of its subtests
on a GPU, for the import and its kernels. Measured on an H200 with warm caches."""
BACKEND_COST = 0.5
"""The same for a backend whose library is there at once."""
WORTH = 0.15
"""The least work, as a share of what a library costs, for which another shard opens it."""
BLOCKS_PER_SHARD = 16
MAX_BLOCK = 50
"""Subtests in one order to a worker: it must fit into a socket's buffer."""
MAX_SHARDS = 256


@dataclass(slots=True)
class Block:
    shard: int
    file: str
    subtests: list[Planned]
    cost: float


@dataclass(slots=True)
class Plan:
    """``shards[i]`` holds the blocks of shard ``i`` (counted from 0); ``cost`` is in seconds, start-up left out."""

    shards: list[list[Block]]
    sha256: str
    sweeps: list[str] = field(default_factory=list)
    """In the order of the spec, for tables."""
    backends: list[str] = field(default_factory=list)
    """``method.backend`` in the order of the spec."""

    @property
    def subtests(self) -> list[Planned]:
        return [planned for blocks in self.shards for block in blocks for planned in block.subtests]

    def cost(self, shard: int) -> float:
        return sum(block.cost for block in self.shards[shard])


def make_plan(subtests: Sequence[Planned], seconds: Mapping[str, float], shards: int, libraries: bool = False) -> Plan:
    """Spread subtests over shards. ``seconds`` gives the expected time of each id. With ``libraries``, backends are
    kept together, since a process needs seconds to begin with one."""
    if not 1 <= shards <= MAX_SHARDS:
        raise OrchestratorError("O115", f"{shards} shards; from 1 to {MAX_SHARDS} are possible")
    shared = spread(subtests, seconds, shards, libraries)
    for shard, placed in enumerate(shared):
        for block in placed:
            block.shard = shard
    sweeps = list(dict.fromkeys(planned.sweep for planned in subtests))
    backends = list(dict.fromkeys(f"{planned.method}.{planned.backend}" for planned in subtests))
    plan = Plan(shared, "", sweeps, backends)
    check_partition(plan, subtests, shards)
    plan.sha256 = digest(plan)
    return plan


def spread(subtests: Sequence[Planned], seconds: Mapping[str, float], parts: int, libraries: bool) -> list[list[Block]]:
    """Subtests in so many parts that take equally long, as lists of blocks."""
    modules: dict[str, list[Planned]] = {}
    for planned in subtests:
        modules.setdefault(planned.file, []).append(planned)
    total = sum(seconds[planned.id] for planned in subtests)
    limit = total / parts / BLOCKS_PER_SHARD
    blocks = [block for rows in modules.values() for block in cut(rows, seconds, limit)]
    out = cut_in_runs(blocks, parts) if libraries else longest_first(blocks, parts)
    order = {file: number for number, file in enumerate(modules)}
    place = {planned.id: number for number, planned in enumerate(subtests)}
    for placed in out:  # in the manifest's order, module by module, so that a worker opens each of them once
        placed.sort(key=lambda block: (order[block.file], place[block.subtests[0].id]))
    return out


def queues_of(
    shards: Sequence[Sequence[Block]], seconds: Mapping[str, float], lanes: int, libraries: bool
) -> list[list[Block]]:
    """The blocks of a runner's shards as its workers take them: a queue for each lane at least.

    ``--shard`` leaves a runner one shard, whose blocks are as large as all runners must cut them alike. What its own
    lanes make of it is its own matter: the labels stay.
    """
    filled_shards = [list(blocks) for blocks in shards if blocks] or [[]]
    if len(filled_shards) >= lanes:
        return filled_shards
    out: list[list[Block]] = []
    for blocks in filled_shards:
        subtests = [planned for block in blocks for planned in block.subtests]
        label = {planned.id: block.shard for block in blocks for planned in block.subtests}
        parts = max(1, min(-(-lanes // len(filled_shards)), len(subtests)))
        for queue in spread(subtests, seconds, parts, libraries):
            for block in queue:
                block.shard = label[block.subtests[0].id]
            out.append(queue)
    return out


def longest_first(blocks: Sequence[Block], shards: int) -> list[list[Block]]:
    """Each block to the shard that is done with it first, the opening of its module counted."""
    shared: list[list[Block]] = [[] for _ in range(shards)]
    opened: list[set[str]] = [set() for _ in range(shards)]
    loads = [0.0] * shards

    def done(shard: int, block: Block) -> float:
        return loads[shard] + (0.0 if block.file in opened[shard] else MODULE_COST)

    for block in sorted(blocks, key=lambda block: (-block.cost, block.subtests[0].id)):
        shard = min(range(shards), key=lambda shard: (done(shard, block), shard))
        loads[shard] = done(shard, block) + block.cost
        opened[shard].add(block.file)
        shared[shard].append(block)
    return shared


def cut_in_runs(blocks: Sequence[Block], shards: int) -> list[list[Block]]:
    """Neighbouring blocks together, in the order of their backends: so few shards open a backend twice. The load up to
    which shards are filled is about as low as so many shards allow."""
    # Stable, so that a module stays in order.
    row = sorted(blocks, key=lambda b: (library_of(b.subtests[0]), b.subtests[0].backend, b.file))
    low, high = 0.0, sum(block.cost + library_cost(block.subtests[0]) for block in row)
    best = filled(row, math.inf)
    for _ in range(40):
        middle = (low + high) / 2
        tried = filled(row, middle)
        if len(tried) > shards:
            low = middle
        else:
            best, high = tried, middle
    return best + [[] for _ in range(shards - len(best))]


def library(planned: Planned) -> tuple[str, float]:
    """What a process must have opened to run a subtest on a GPU, and the seconds that takes; the backend itself where
    its library is no matter."""
    return LIBRARIES.get(planned.backend, (planned.backend, BACKEND_COST))


def library_of(planned: Planned) -> str:
    return library(planned)[0]


def library_cost(planned: Planned) -> float:
    return library(planned)[1]


def filled(row: Sequence[Block], limit: float) -> list[list[Block]]:
    """Shards filled one after the other up to a load. Whoever opens a library does with it what is worth the cost, and
    what is less than that is left to nobody else."""
    ahead: dict[str, float] = {}
    for block in row:
        name = library_of(block.subtests[0])
        ahead[name] = ahead.get(name, 0.0) + block.cost
    out: list[list[Block]] = []
    load, opened, done = limit, "", 0.0
    for block in row:
        name, cost = library(block.subtests[0])
        stays = name == opened and min(done, ahead[name]) < cost * WORTH
        if not out or (load + block.cost + (name != opened) * cost > limit and not stays):
            out.append([])
            load, opened = 0.0, ""
        if name != opened:
            load, opened, done = load + cost, name, 0.0
        load, done = load + block.cost, done + block.cost
        ahead[name] -= block.cost
        out[-1].append(block)
    return out


def cut(rows: list[Planned], seconds: Mapping[str, float], limit: float) -> list[Block]:
    """Runs of one module's subtests, each up to ``limit`` seconds and ``MAX_BLOCK`` long, or a single subtest."""
    blocks: list[Block] = []
    for planned in rows:
        cost = seconds[planned.id]
        if blocks and blocks[-1].cost + cost <= limit and len(blocks[-1].subtests) < MAX_BLOCK:
            blocks[-1].subtests.append(planned)
            blocks[-1].cost += cost
        else:
            blocks.append(Block(-1, planned.file, [planned], cost))
    return blocks


def check_partition(plan: Plan, subtests: Sequence[Planned], shards: int) -> None:
    """Every selected subtest lies in exactly one of so many shards: the planner proves its own work before anything
    runs."""
    if len(plan.shards) != shards:
        raise OrchestratorError("O118", f"the plan has {len(plan.shards)} shards, {shards} were asked for")
    planned = [row.id for row in plan.subtests]
    if len(planned) != len(subtests) or set(planned) != {row.id for row in subtests}:
        raise OrchestratorError("O118", f"the shards hold {len(planned)} subtests, selected were {len(subtests)}")


def digest(plan: Plan) -> str:
    """Names the plan: which ids, in which shard. Two runners that cut differently have different digests."""
    text = "\n".join(f"{block.shard} {row.id}" for blocks in plan.shards for block in blocks for row in block.subtests)
    return hashlib.sha256(text.encode()).hexdigest()
