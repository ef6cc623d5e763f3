"""Kind 8: scales, soft cap, sinks, heads, and the base of a logarithm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kits.backends import flash_attention
from kits.backends.flashinfer import PagedKernels
from kits.faults.registry import Plant, Touches, fault
from kits.faults.sources import edited
from kits.kernels import _flashinfer_paged, flash_attn, triton_ops, trtllm
from kits.kernels._flashinfer_wrapper import PagedWrapper


def _instead_of(plant: Plant, right: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
    """``wrong`` in place of ``right``, both of which return an output and an LSE; witnesses what it changes."""

    def attend(*arguments: Any, **options: Any) -> Any:
        out, lse = wrong(*arguments, **options)
        return plant.swap(right(*arguments, **options)[0], out), lse

    return attend


def _without_scales(plant: Plant, kernel: str) -> None:
    def make(original: Any) -> Any:
        def call(*arguments: Any, k_scale: float, v_scale: float, **options: Any) -> Any:
            plant.witness(changed=(k_scale, v_scale) != (1.0, 1.0))
            return original(*arguments, k_scale=1.0, v_scale=1.0, **options)

        return call

    plant.replace(triton_ops, kernel, make)


@fault(
    "F38",
    title="the cached half of an extend gets no K and V scales",
    references=("sgl-project/sglang#18904",),
    kind=8,
    axes="scales other than 1, extend on a prefix",
    touches=Touches(backends=("triton",), methods=("dense",), sweeps=("eager", "layouts"), modes=("EXTEND",)),
)
def f38(plant: Plant) -> None:
    _without_scales(plant, "extend_attention")


@fault(
    "F39a",
    title="decode casts the cache and returns before it is scaled",
    references=("vllm-project/vllm#42580",),
    kind=8,
    axes="scales other than 1, decode",
    touches=Touches(backends=("triton",), methods=("dense",), sweeps=("eager",), modes=("DECODE",)),
)
def f39a(plant: Plant) -> None:
    _without_scales(plant, "decode_attention")


@fault(
    "F39b",
    title="a fallback scales the cache and hands on the same scales",
    references=("vllm-project/vllm#48016",),
    kind=8,
    axes="scales other than 1",
    touches=Touches(backends=("flashinfer",), methods=("dense",), sweeps=("eager",)),
)
def f39b(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def run(self: PagedKernels, wrapper: Any, q: Any, layer: Any, group: Any) -> Any:
            plant.witness(changed=(layer.k_scale, layer.v_scale) != (1.0, 1.0))
            caches = (
                (group.k[layer.index] * layer.k_scale).to(q.dtype).unsqueeze(1),
                (group.v[layer.index] * layer.v_scale).to(q.dtype).unsqueeze(1),
            )
            return wrapper.run(q, caches, k_scale=layer.k_scale, v_scale=layer.v_scale)

        return run

    plant.replace(PagedKernels, "run", make)


@fault(
    "F40a",
    title="the prefill path takes sinks and ignores them",
    references=("vllm-project/vllm#52148",),
    kind=8,
    axes="sinks, more than one query a row",
    touches=Touches(backends=("fa3", "fa4"), methods=("dense",), sweeps=("eager", "verify")),
)
def f40a(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def flash_attn_with_kvcache(*arguments: Any, max_seqlen_q: int, sinks: Any, **options: Any) -> Any:
            if max_seqlen_q > 1:
                plant.witness(changed=sinks is not None)
                sinks = None
            return original(*arguments, max_seqlen_q=max_seqlen_q, sinks=sinks, **options)

        return flash_attn_with_kvcache

    plant.replace(flash_attn, "flash_attn_with_kvcache", make)


@fault(
    "F40b",
    title="the sink is that of the query row modulo the heads",
    references=("modular/modular#6591",),
    kind=8,
    axes="sinks, more than one query a row",
    touches=Touches(backends=("fa3", "fa4"), methods=("dense",), sweeps=("eager", "verify")),
)
def f40b(plant: Plant) -> None:
    """Rows of a tile are a head's queries after one another: row modulo heads is the head for one query only."""
    by_row = "torch.arange(q_heads * tokens, device=sinks.device) % q_heads"
    change = "sinks.float().view(kv_heads, group, 1, 1)", f"sinks.float()[{by_row}].view(kv_heads, group, tokens, 1)"
    plant.replace(flash_attn, "attend", lambda original: _instead_of(plant, original, edited(original, change)))


@fault(
    "F41a",
    title="scores are capped after the mask",
    references=("flashinfer-ai/flashinfer#350",),
    kind=8,
    axes="a small soft cap, hidden keys",
    touches=Touches(backends=("flashinfer",), sweeps=("eager", "split_op"), methods=("dense", "swa")),
)
def f41a(plant: Plant) -> None:
    """A hidden key's score of -inf becomes the cap's lower end, and the key gets a weight."""
    cap = "    if softcap:\n        scores = softcap * torch.tanh(scores / softcap)\n"
    mask = "    if visible is not None:\n        scores = scores.masked_fill(~visible, NEGATIVE_INFINITY)\n"
    change = cap + mask, mask + cap
    plant.replace(_flashinfer_paged, "attend", lambda original: _instead_of(plant, original, edited(original, change)))


@fault(
    "F41b",
    title="the soft cap is stored and never used",
    references=("sgl-project/sgl-kernel-xpu#491",),
    kind=8,
    axes="a small soft cap",
    touches=Touches(backends=("flashinfer",), sweeps=("eager", "split_op"), methods=("dense", "swa")),
)
def f41b(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def _set_options(self: PagedWrapper, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            plant.witness(changed=self._soft_cap != 0.0)
            self._soft_cap = 0.0

        return _set_options

    plant.replace(PagedWrapper, "_set_options", make)


def _map_heads(plant: Plant, module: Any, kv_head: Callable[[int, int, int], int]) -> None:
    """Let query head ``h`` of a grouped model read KV head ``kv_head(h, group, kv_heads)``."""

    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
            q_heads, kv_heads = q.shape[1], k.shape[1]
            group = q_heads // kv_heads
            if group == 1 or kv_heads == 1:
                return original(q, k, v, **options)
            right = [head // group for head in range(q_heads)]
            wrong = [kv_head(head, group, kv_heads) for head in range(q_heads)]
            plant.witness(changed=wrong != right)
            return original(q, k[:, wrong], v[:, wrong], **options)

        return attend

    plant.replace(module, "attend", make)


@fault(
    "F42a",
    title="the KV head is computed with the number of KV heads in place of the group's size",
    references=("HazyResearch/HipKittens#22",),
    kind=8,
    axes="grouped heads, as many KV heads as heads in a group excepted",
    touches=Touches(backends=("fa3", "fa4"), methods=("dense",), sweeps=("eager",)),
)
def f42a(plant: Plant) -> None:
    """One number serves as stride and as modulus, which is right where both are the same."""
    _map_heads(plant, flash_attn, lambda head, group, kv_heads: head // kv_heads % kv_heads)


@fault(
    "F42b",
    title="decode takes the number of KV heads for the size of a group",
    references=("HazyResearch/HipKittens#22",),
    kind=8,
    axes="grouped heads in decode, as many KV heads as heads in a group excepted",
    touches=Touches(backends=("trtllm_mha",), sweeps=("eager", "layouts", "decode_cg")),
)
def f42b(plant: Plant) -> None:
    _map_heads(plant, trtllm, lambda head, group, kv_heads: head // kv_heads % kv_heads)


@fault(
    "F42c",
    title="a tile of 16 query heads reads the KV head of its first",
    references=("FlashML-org/FreeToken#177",),
    kind=8,
    axes="grouped heads, 16 no divisor of the group's size",
    touches=Touches(backends=("flashinfer",), methods=("dense", "swa"), sweeps=("eager",)),
)
def f42c(plant: Plant) -> None:
    _map_heads(plant, _flashinfer_paged, lambda head, group, kv_heads: head // 16 * 16 // group)


@fault(
    "F43",
    title="two partial results are merged, one of them with its LSE in base 2",
    references=("sgl-project/sglang#35045", "sgl-project/sglang#40903", "vllm-project/vllm#52796"),
    kind=8,
    axes="a result in two parts",
    touches=Touches(backends=("fa3", "fa4"), methods=("dense",), sweeps=("verify", "verify_cg")),
)
def f43(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
            return original(out_a, plant.swap(lse_a, lse_a / math.log(2)), out_b, lse_b)

        return merge_states

    plant.replace(flash_attention, "merge_states", make)
