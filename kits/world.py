"""The fixture of one subtest: requests with their history, the pool they live in, and the weights.

The suite owns all of it. History reaches the pool without the code under test; the reference reads the requests'
own copies and never the pool.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kits.graphs import unobserved
from kits.layers import DTYPES, Layer, build_layers
from kits.layouts import assign_slots
from kits.pools import TAIL_VALUE, KVPool
from kits.record import phase
from kits.subtest import Model, Speculation, Subtest
from kits.transfer import fetch, send, upload

HOST = torch.device("cpu")

SHARED_KEY = 3.0
"""What the last channel of every key holds."""

SHARED_SCORE = 200.0
"""The size of the score that it gives to the first and to the last head."""


Values = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v."""


@dataclass(eq=False)
class Request:
    """One request: ``prefix_len`` cached tokens and ``extend_len`` new ones.

    Per layer, ``k`` is ``(prefix_len + extend_len, kv_heads, head_dim)``, ``v`` alike with ``v_head_dim``, and ``q``
    ``(extend_len, q_heads, head_dim)``; all in the model's dtype, on the device. ``slots[group]`` is int64, the slot of
    each position, and ``slot_ids[group]`` the same on the host; ``index`` is the request's row in ``req_to_token``.
    ``on_host`` holds q, k and v of each layer once more, for the reference.
    """

    index: int
    prefix_len: int
    extend_len: int
    slots: dict[str, torch.Tensor]
    slot_ids: dict[str, list[int]]
    pages: dict[str, list[int]]
    q: list[torch.Tensor] = field(repr=False)
    k: list[torch.Tensor] = field(repr=False)
    v: list[torch.Tensor] = field(repr=False)
    on_host: list[Values] = field(repr=False)
    parents: tuple[int, ...] = ()
    """The verify tree of its draft, where it has one."""

    @property
    def total_len(self) -> int:
        return self.prefix_len + self.extend_len

    def new_slot_ids(self, group: str) -> list[int]:
        """The slots that the new tokens are written to."""
        return self.slot_ids[group][self.prefix_len :]


@dataclass(frozen=True)
class Projections:
    """``nn.Linear`` weights of a model with a hidden state, in its dtype on the device; ``output`` is float32 and
    on the host, where outputs are compared."""

    q: list[torch.nn.Linear]
    k: list[torch.nn.Linear]
    v: list[torch.nn.Linear]
    output: list[torch.nn.Linear]


class World:
    """Builds and frees requests; every number it draws comes from the subtest's seed."""

    def __init__(
        self, subtest: Subtest, device: torch.device, *, max_len: int, pages: int, requests: int, reads_tail: bool
    ) -> None:
        self.model: Model = subtest.model
        self.device = device
        self.dtype = DTYPES[subtest.model.dtype]
        self.layout = subtest.layout
        self.page_size = subtest.case.page_size
        self.max_len = max_len
        self.reads_tail = reads_tail
        self.generator = torch.Generator().manual_seed(subtest.seed)
        self.rng = random.Random(subtest.seed)
        self.layers: tuple[Layer, ...] = build_layers(self.model, device, self.generator)
        self.projections = self._build_projections() if self.model.hidden else None
        self.pool = KVPool(
            self.model,
            self.layers,
            pages=pages,
            page_size=self.page_size,
            requests=requests,
            max_len=max_len,
            device=device,
        )
        self._free_pages = {name: list(range(1, pages)) for name in self.pool.groups}
        self._trees = draft_trees(subtest.case.speculation)
        self._tree_rng = random.Random(subtest.seed)
        self._free_rows = list(range(1, requests))
        self.rng.shuffle(self._free_rows)
        self.bystander = self._add_bystander()

    def _build_projections(self) -> Projections:
        model, hidden = self.model, self.model.hidden
        assert hidden is not None

        def linear(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Linear:
            made = torch.nn.Linear(inputs, outputs, bias=False)
            bound = inputs**-0.5
            with torch.no_grad():
                made.weight.copy_((torch.rand(made.weight.shape, generator=self.generator) * 2 - 1) * bound)
            return made.to(device, dtype).requires_grad_(False)

        count = range(len(self.layers))
        return Projections(
            q=[linear(hidden, model.q_heads * model.head_dim, self.dtype, self.device) for _ in count],
            k=[linear(hidden, model.kv_heads * model.head_dim, self.dtype, self.device) for _ in count],
            v=[linear(hidden, model.kv_heads * model.v_head_dim, self.dtype, self.device) for _ in count],
            output=[linear(model.q_heads * model.v_head_dim, hidden, torch.float32, HOST) for _ in count],
        )

    def _add_bystander(self) -> Request:
        """A live request that is in no batch and owns the last page, where wrapped and overrun writes land."""
        for group, free in self._free_pages.items():
            last = self.pool.groups[group].num_pages - 1
            free.remove(last)
            free.insert(0, last)
        slots = {
            name: [[(group.num_pages - 1) * self.page_size + offset for offset in range(self.page_size)]]
            for name, group in self.pool.groups.items()
        }
        pages = {name: [[free.pop(0)]] for name, free in self._free_pages.items()}
        (bystander,) = self._new_requests([(self.page_size, 0)], pages, slots)
        return bystander

    def add_requests(self, lens: Sequence[tuple[int, int]]) -> list[Request]:
        """New requests of ``lens = [(prefix, extend), ...]``, laid out together, their history written to the pool."""
        if not lens:
            return []
        slots, pages = {}, {}
        for name in self.pool.groups:
            slots[name], pages[name] = assign_slots(self.layout, lens, self._free_pages[name], self.page_size, self.rng)
        with phase("fixture"):
            return self._new_requests(lens, pages, slots)

    def _new_requests(
        self, lens: Sequence[tuple[int, int]], pages: dict[str, list[list[int]]], slots: dict[str, list[list[int]]]
    ) -> list[Request]:
        """Requests over these pages and slots. What they hold is made on the host and reaches the device together."""
        for total in map(sum, lens):
            if total > self.max_len:
                raise ValueError(f"a request of {total} tokens exceeds the fixture's max_len {self.max_len}")
        with unobserved():
            drawn, on_host = self._draw([(prefix + extend, extend) for prefix, extend in lens])
            # In no order: a value cached under a row's index meets the row's next owner as well as rows nobody owns.
            rows = [self._free_rows.pop(self.rng.randrange(len(self._free_rows))) for _ in lens]
            on_device = {name: self._fill_table(name, rows, of_group) for name, of_group in slots.items()}
            requests = [
                Request(
                    index=rows[row],
                    prefix_len=prefix,
                    extend_len=extend,
                    slots={name: of_group[row] for name, of_group in on_device.items()},
                    slot_ids={name: of_group[row] for name, of_group in slots.items()},
                    pages={name: of_group[row] for name, of_group in pages.items()},
                    q=[values[0] for values in drawn[row]],
                    k=[values[1] for values in drawn[row]],
                    v=[values[2] for values in drawn[row]],
                    on_host=on_host[row],
                )
                for row, (prefix, extend) in enumerate(lens)
            ]
            self._draft(requests)
            self._store_history(requests)
        return requests

    def _draft(self, requests: Sequence[Request]) -> None:
        """A verify tree for each: a draft model's differ from row to row, and from one batch to the next."""
        first = self._tree_rng.randrange(len(self._trees))
        for row, request in enumerate(requests):
            request.parents = self._trees[(first + row) % len(self._trees)]

    def _fill_table(self, group: str, rows: Sequence[int], slots: Sequence[list[int]]) -> list[torch.Tensor]:
        """Write the slots of the requests of these rows into the request table; returns them on the device."""
        lens = list(map(len, slots))
        flat = [
            [slot for of_row in slots for slot in of_row],
            [row for row, length in zip(rows, lens, strict=True) for _ in range(length)],
            [position for length in lens for position in range(length)],
        ]
        values, at_rows, at_positions = upload(flat, torch.int64, self.device)
        self.pool.groups[group].req_to_token.index_put_((at_rows, at_positions), values.int())
        return list(values.split(lens))

    def _draw(self, lens: Sequence[tuple[int, int]]) -> tuple[list[list[Values]], list[list[Values]]]:
        """Per request of ``(total, extend)`` tokens, per layer: q of the last ``extend`` of them, k and v of all; on
        the device, and once more on the host.

        Zero-mean, unit-variance values in the model's dtype; with projections, those of such hidden states.
        """
        model, linear = self.model, self.projections
        shapes: list[tuple[int, ...]] = [
            shape
            for total, extend in lens
            for _ in self.layers
            for shape in (
                [(total, model.hidden or 0)]
                if linear is not None
                else [
                    (extend, model.q_heads, model.head_dim),
                    (total, model.kv_heads, model.head_dim),
                    (total, model.kv_heads, model.v_head_dim),
                ]
            )
        ]
        on_host, on_device = self._randn(shapes, shared_scores=linear is None)
        if linear is not None:
            on_device = [
                projected
                for (total, extend), of_request in zip(lens, grouped(on_device, len(self.layers)), strict=True)
                for layer, hidden in zip(self.layers, of_request, strict=True)
                for projected in (
                    linear.q[layer.index](hidden[total - extend :]).view(extend, model.q_heads, model.head_dim),
                    linear.k[layer.index](hidden).view(total, model.kv_heads, model.head_dim),
                    linear.v[layer.index](hidden).view(total, model.kv_heads, model.v_head_dim),
                )
            ]
            fetched = fetch(dict(enumerate(on_device)))
            on_host = [fetched[number] for number in range(len(on_device))]
        return self._by_request(on_device), self._by_request(on_host)

    def _by_request(self, flat: Sequence[torch.Tensor]) -> list[list[Values]]:
        """q, k and v of each layer of each request; in latent attention v is a view of k."""
        return [
            [(q, k, k[..., : self.model.v_head_dim] if self.model.method == "mla" else v) for q, k, v in of_request]
            for of_request in grouped(grouped(flat, 3), len(self.layers))
        ]

    def _randn(
        self, shapes: Sequence[tuple[int, ...]], *, shared_scores: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Drawn one by one on the host, in the model's dtype; there, and on the device."""
        drawn = [torch.randn(shape, generator=self.generator) for shape in shapes]
        if shared_scores:
            for q, k, _ in grouped(drawn, 3):
                self._share_scores(q, k)
        flat = torch.cat([values.view(-1) for values in drawn]).to(self.dtype)
        host, device = (
            [part.view(shape) for part, shape in zip(x.split(list(map(math.prod, shapes))), shapes, strict=True)]
            for x in (flat, send(flat, self.device))
        )
        return host, device

    def _share_scores(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Give all keys of the first head a large score in common, and all of the last head a large negative one.

        A channel of the keys that is the same everywhere, as models have them, moves no weight between keys; but scores
        of this size overflow an exponential from which nobody took the maximum, and lie below a finite stand-in for
        minus infinity. The channel's value is exact in any dtype, after division by the model's scales too.
        """
        k[..., -1] = SHARED_KEY
        reach = SHARED_SCORE / (self.model.scale * SHARED_KEY)
        q[:, 0, -1] = reach
        if q.shape[1] > 1:
            q[:, -1, -1] = -reach

    def _store_history(self, requests: Sequence[Request]) -> None:
        for name in self.pool.groups:
            self._mark_tail(name, [page for request in requests for page in request.pages[name]])
        for layer in self.layers:
            index = layer.index
            self.pool.write(
                layer,
                torch.cat([request.slots[layer.group][: request.prefix_len] for request in requests]),
                torch.cat([request.k[index][: request.prefix_len] for request in requests]),
                torch.cat([request.v[index][: request.prefix_len] for request in requests]),
            )

    def _mark_tail(self, group: str, pages: Sequence[int]) -> None:
        """Pages newly taken: where a kernel is declared to load their unwritten tail, it is finite there."""
        if self.reads_tail:
            self._fill_pages(group, pages, TAIL_VALUE)

    def _fill_pages(self, group: str, pages: Sequence[int], value: float) -> None:
        slots = [page * self.page_size + offset for page in pages for offset in range(self.page_size)]
        self.pool.groups[group].poison(upload(slots, torch.int64, self.device), value)

    def accept_first_tokens(self, requests: Sequence[Request], *, cached: bool) -> None:
        """Go on with live requests, as an engine does after a step: the first new token of each joins its prefix, and
        as many new ones follow. Where ``cached``, the forward has written it; else the target model would have.
        What the other new tokens left in the cache stays there."""
        with unobserved():
            self._draft(requests)
            for request in requests:
                total = request.total_len + 1
                if total > self.max_len:
                    raise ValueError(f"a request of {total} tokens exceeds the fixture's max_len {self.max_len}")
                request.prefix_len += 1
                for name in self.pool.groups:
                    request.slot_ids[name] = [*request.slot_ids[name], self._next_slot(request, name)]
                    (request.slots[name],) = self._fill_table(name, [request.index], [request.slot_ids[name]])
                (fresh,), (on_host,) = self._draw([(request.extend_len, request.extend_len)])
                for layer in self.layers:
                    index, kept = layer.index, slice(0, request.prefix_len)
                    request.q[index] = fresh[index][0]
                    request.k[index] = torch.cat([request.k[index][kept], fresh[index][1]])
                    request.v[index] = torch.cat([request.v[index][kept], fresh[index][2]])
                    _, k, v = request.on_host[index]
                    new_q, new_k, new_v = on_host[index]
                    request.on_host[index] = new_q, torch.cat([k[kept], new_k]), torch.cat([v[kept], new_v])
                    if not cached:
                        last = slice(request.prefix_len - 1, request.prefix_len)
                        slot = request.slots[layer.group][last]
                        self.pool.write(layer, slot, request.k[index][last], request.v[index][last])

    def _next_slot(self, request: Request, group: str) -> int:
        """The slot behind the last one: the next of the same page, or the first of a page newly taken."""
        after = request.slot_ids[group][-1] + 1
        if after % self.page_size == 0 or after in request.slot_ids[group]:
            page = self._free_pages[group].pop(self.rng.randrange(len(self._free_pages[group])))
            request.pages[group].append(page)
            if self.reads_tail:
                whole = torch.arange(page * self.page_size, (page + 1) * self.page_size, device=self.device)
                self.pool.groups[group].poison(whole, TAIL_VALUE)
            after = page * self.page_size
        return after

    def forget_new_tokens(self, requests: Sequence[Request]) -> None:
        """Undo a forward: the new tokens' slots look unwritten again."""
        value = TAIL_VALUE if self.reads_tail else float("nan")
        with unobserved():
            for name, group in self.pool.groups.items():
                new = [request.slots[name][request.prefix_len :] for request in requests]
                group.poison(torch.cat(new), value)

    def poison_history(self, request: Request) -> None:
        """Make a live request's cached keys and values NaN, as a neighbour that must not matter."""
        for name, group in self.pool.groups.items():
            group.poison(request.slots[name][: request.prefix_len])

    def free(self, requests: Sequence[Request]) -> None:
        """Give pages and rows back: the slots become NaN, the table row points outside the pool."""
        if not requests:
            return
        with phase("fixture"), unobserved():
            rows = upload([request.index for request in requests], torch.int64, self.device)
            for name, group in self.pool.groups.items():
                pages = [page for request in requests for page in request.pages[name]]
                self._fill_pages(name, pages, float("nan"))
                group.req_to_token.index_fill_(0, rows, group.stray_slot)
                self._free_pages[name].extend(pages)
            self._free_rows.extend(request.index for request in requests)


def draft_trees(speculation: Speculation | None, most: int = 4) -> list[tuple[int, ...]]:
    """The verify trees that requests draft: the stated one, and where that branches, others of as many tokens."""
    stated = speculation.parents if speculation is not None else ()
    if stated == tuple(range(-1, len(stated) - 1)):
        return [stated]
    shapes = itertools.product(*(range(token) for token in range(2, len(stated))))
    others = [tree for tree in ((*stated[:2], *shape) for shape in shapes) if tree != stated]
    return [stated, *random.Random(len(stated)).sample(others, min(most - 1, len(others)))]


def grouped(values: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """``count`` neighbours at a time."""
    return [values[start : start + count] for start in range(0, len(values), count)]


def inputs_of(requests: Sequence[Request], layer: int) -> dict[str, torch.Tensor]:
    """``q``, ``k`` and ``v`` of the new tokens of ``requests``, one after the other: ``(tokens, heads, dim)`` each."""
    return {
        "q": torch.cat([request.q[layer] for request in requests]),
        "k": torch.cat([request.k[layer][request.prefix_len :] for request in requests]),
        "v": torch.cat([request.v[layer][request.prefix_len :] for request in requests]),
    }
