"""The fixture of one subtest: requests with their history, the pool they live in, and the weights.

The suite owns all of it. History reaches the pool without the code under test; the reference reads the requests'
own copies and never the pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kits.graphs import unobserved
from kits.layers import DTYPES, Layer, build_layers
from kits.layouts import assign_slots
from kits.pools import TAIL_VALUE, KVPool
from kits.subtest import Model, Subtest


@dataclass(eq=False)
class Request:
    """One request: ``prefix_len`` cached tokens and ``extend_len`` new ones.

    Per layer, ``k`` is ``(prefix_len + extend_len, kv_heads, head_dim)``, ``v`` alike with ``v_head_dim``, and ``q``
    ``(extend_len, q_heads, head_dim)``; all in the model's dtype, on the device. ``slots[group]`` is int64, the slot of
    each position; ``index`` is the request's row in ``req_to_token``.
    """

    index: int
    prefix_len: int
    extend_len: int
    slots: dict[str, torch.Tensor]
    pages: dict[str, list[int]]
    q: list[torch.Tensor] = field(repr=False)
    k: list[torch.Tensor] = field(repr=False)
    v: list[torch.Tensor] = field(repr=False)

    @property
    def total_len(self) -> int:
        return self.prefix_len + self.extend_len


@dataclass(frozen=True)
class Projections:
    """``nn.Linear`` weights of a model with a hidden state; all in the model's dtype but ``output`` (float32)."""

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
        self._free_rows = list(range(1, requests))
        self.rng.shuffle(self._free_rows)
        self.bystander = self._add_bystander()

    def _build_projections(self) -> Projections:
        model, hidden = self.model, self.model.hidden
        assert hidden is not None

        def linear(inputs: int, outputs: int, dtype: torch.dtype) -> torch.nn.Linear:
            made = torch.nn.Linear(inputs, outputs, bias=False)
            bound = inputs**-0.5
            with torch.no_grad():
                made.weight.copy_((torch.rand(made.weight.shape, generator=self.generator) * 2 - 1) * bound)
            return made.to(self.device, dtype).requires_grad_(False)

        count = range(len(self.layers))
        return Projections(
            q=[linear(hidden, model.q_heads * model.head_dim, self.dtype) for _ in count],
            k=[linear(hidden, model.kv_heads * model.head_dim, self.dtype) for _ in count],
            v=[linear(hidden, model.kv_heads * model.v_head_dim, self.dtype) for _ in count],
            output=[linear(model.q_heads * model.v_head_dim, hidden, torch.float32) for _ in count],
        )

    def _add_bystander(self) -> Request:
        """A live request that is in no batch and owns the last page, where wrapped and overrun writes land."""
        for group, free in self._free_pages.items():
            last = self.pool.groups[group].num_pages - 1
            free.remove(last)
            free.insert(0, last)
        bystander = self._new_request(
            self.page_size,
            0,
            {name: [free.pop(0)] for name, free in self._free_pages.items()},
            {
                name: [(group.num_pages - 1) * self.page_size + offset for offset in range(self.page_size)]
                for name, group in self.pool.groups.items()
            },
        )
        self._store_history(bystander)
        return bystander

    def randn(self, *shape: int) -> torch.Tensor:
        """Zero-mean, unit-variance values in the model's dtype on the device."""
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def add_requests(self, lens: Sequence[tuple[int, int]]) -> list[Request]:
        """New requests of ``lens = [(prefix, extend), ...]``, laid out together, their history written to the pool."""
        slots, pages = {}, {}
        for name in self.pool.groups:
            slots[name], pages[name] = assign_slots(self.layout, lens, self._free_pages[name], self.page_size, self.rng)
        with unobserved():
            requests = [
                self._new_request(
                    prefix,
                    extend,
                    {name: pages[name][row] for name in pages},
                    {name: slots[name][row] for name in slots},
                )
                for row, (prefix, extend) in enumerate(lens)
            ]
            for request in requests:
                self._store_history(request)
        return requests

    def _new_request(
        self, prefix: int, extend: int, pages: dict[str, list[int]], slots: dict[str, list[int]]
    ) -> Request:
        total = prefix + extend
        if total > self.max_len:
            raise ValueError(f"a request of {total} tokens exceeds the fixture's max_len {self.max_len}")
        drawn = self._draw(total, extend)
        # In no order: a value cached under a row's index meets the row's next owner as well as rows nobody owns.
        index = self._free_rows.pop(self.rng.randrange(len(self._free_rows)))
        request = Request(
            index=index,
            prefix_len=prefix,
            extend_len=extend,
            slots={name: torch.tensor(row, dtype=torch.int64, device=self.device) for name, row in slots.items()},
            pages=pages,
            q=[values[0] for values in drawn],
            k=[values[1] for values in drawn],
            v=[values[2] for values in drawn],
        )
        for name, group in self.pool.groups.items():
            group.req_to_token[index, :total] = request.slots[name].to(torch.int32)
        return request

    def _draw(self, total: int, extend: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per layer q of the last ``extend`` tokens, and k and v of all ``total``."""
        model, drawn = self.model, []
        for layer in self.layers:
            if self.projections is not None:
                assert model.hidden is not None
                hidden, linear = self.randn(total, model.hidden), self.projections
                q = linear.q[layer.index](hidden[total - extend :]).view(extend, model.q_heads, model.head_dim)
                k = linear.k[layer.index](hidden).view(total, model.kv_heads, model.head_dim)
                v = linear.v[layer.index](hidden).view(total, model.kv_heads, model.v_head_dim)
            else:
                q = self.randn(extend, model.q_heads, model.head_dim)
                k = self.randn(total, model.kv_heads, model.head_dim)
                v = self.randn(total, model.kv_heads, model.v_head_dim)
            drawn.append((q, k, k[..., : model.v_head_dim] if layer.mla else v))
        return drawn

    def _store_history(self, request: Request) -> None:
        for name, group in self.pool.groups.items():
            if self.reads_tail:
                group.poison(self._page_slots(request, name), TAIL_VALUE)
        for layer in self.layers:
            history = slice(0, request.prefix_len)
            self.pool.write(
                layer,
                request.slots[layer.group][history],
                request.k[layer.index][history],
                request.v[layer.index][history],
            )

    def _page_slots(self, request: Request, group: str) -> torch.Tensor:
        offsets = range(self.page_size)
        flat = [page * self.page_size + offset for page in request.pages[group] for offset in offsets]
        return torch.tensor(flat, dtype=torch.int64, device=self.device)

    def accept_first_tokens(self, requests: Sequence[Request], *, cached: bool) -> None:
        """Go on with live requests, as an engine does after a step: the first new token of each joins its prefix, and
        as many new ones follow. Where ``cached``, the forward has written it; else the target model would have.
        What the other new tokens left in the cache stays there."""
        with unobserved():
            for request in requests:
                total = request.total_len + 1
                if total > self.max_len:
                    raise ValueError(f"a request of {total} tokens exceeds the fixture's max_len {self.max_len}")
                request.prefix_len += 1
                for name, group in self.pool.groups.items():
                    slot = self._next_slot(request, name)
                    request.slots[name] = torch.cat([request.slots[name], slot])
                    group.req_to_token[request.index, :total] = request.slots[name].to(torch.int32)
                fresh = self._draw(request.extend_len, request.extend_len)
                for layer in self.layers:
                    index, kept = layer.index, slice(0, request.prefix_len)
                    request.q[index] = fresh[index][0]
                    request.k[index] = torch.cat([request.k[index][kept], fresh[index][1]])
                    request.v[index] = torch.cat([request.v[index][kept], fresh[index][2]])
                    if not cached:
                        last = slice(request.prefix_len - 1, request.prefix_len)
                        slot = request.slots[layer.group][last]
                        self.pool.write(layer, slot, request.k[index][last], request.v[index][last])

    def _next_slot(self, request: Request, group: str) -> torch.Tensor:
        """The slot behind the last one: the next of the same page, or the first of a page newly taken."""
        after = int(request.slots[group][-1]) + 1
        taken = set(request.slots[group].tolist())
        if after % self.page_size == 0 or after in taken:
            page = self._free_pages[group].pop(self.rng.randrange(len(self._free_pages[group])))
            request.pages[group].append(page)
            after = page * self.page_size
        return torch.tensor([after], dtype=torch.int64, device=self.device)

    def forget_new_tokens(self, requests: Sequence[Request]) -> None:
        """Undo a forward: the new tokens' slots look unwritten again."""
        value = TAIL_VALUE if self.reads_tail else float("nan")
        with unobserved():
            for request in requests:
                for name, group in self.pool.groups.items():
                    group.poison(request.slots[name][request.prefix_len :], value)

    def poison_history(self, request: Request) -> None:
        """Make a live request's cached keys and values NaN, as a neighbour that must not matter."""
        for name, group in self.pool.groups.items():
            group.poison(request.slots[name][: request.prefix_len])

    def free(self, requests: Sequence[Request]) -> None:
        """Give pages and rows back: the slots become NaN, the table row points outside the pool."""
        with unobserved():
            for request in requests:
                for name, group in self.pool.groups.items():
                    group.poison(self._page_slots(request, name))
                    group.req_to_token[request.index] = group.stray_slot
                    self._free_pages[name].extend(request.pages[name])
                self._free_rows.append(request.index)


def inputs_of(requests: Sequence[Request], layer: int) -> dict[str, torch.Tensor]:
    """``q``, ``k`` and ``v`` of the new tokens of ``requests``, one after the other: ``(tokens, heads, dim)`` each."""
    return {
        "q": torch.cat([request.q[layer] for request in requests]),
        "k": torch.cat([request.k[layer][request.prefix_len :] for request in requests]),
        "v": torch.cat([request.v[layer][request.prefix_len :] for request in requests]),
    }
