"""The Triton source of `kits.kernels.triton_ops`: one kernel for decode and extend, dense and latent.

A program takes ``BLOCK_Z`` pairs of (request, KV head), pair ``z`` being request ``z // KV_HEADS`` and KV head
``z % KV_HEADS``, and ``BLOCK_M`` query rows of each, row ``m`` being query token ``m // GROUP`` and head
``m % GROUP`` of the pair's group. All tiles have a leading pair axis that no operation mixes. A GPU takes one
pair a program; the interpreter takes many, because there an operation costs the same for one pair and for sixteen.

The pair axis couples nothing: a row that has no key left in a later iteration adds exact zeros.

What the interpreter makes slow is avoided where the source stays as clear: integers narrower than 64 bits (checked for
overflow, five operations for one; 64 bits are needed anyway for slot times stride), and calls of other jit functions
(each patches the whole language again), ``tl.sum``, ``tl.max`` and ``tl.zeros`` included.
"""

# mypy: ignore-errors

from __future__ import annotations

from kits.kernels._triton import tl, triton

_SUM = tl.standard._sum_combine
_MAX = tl.standard._elementwise_max


@triton.jit
def attention_kernel(
    q, k_new, v_new, k_buffer, v_buffer, out,
    qo_indptr, kv_indptr, kv_indices, mask, mask_indptr, sinks,
    pairs, scale, k_scale, v_scale, softcap, window,
    q_token, q_head, k_new_token, k_new_head, v_new_token, v_new_head,
    k_slot, k_head, v_slot, v_head, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, V_DIM: tl.constexpr,
    EXTEND: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, V_IN_K: tl.constexpr,
    V_LIKE_K: tl.constexpr, OUT_LIKE_Q: tl.constexpr, MANY_Z: tl.constexpr, MANY_M: tl.constexpr,
    BLOCK_Z: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Contract: `decode_attention` and `extend_attention`. A key has ``DIM`` + ``ROPE`` values, a value ``V_DIM``.

    Key ``n`` of a request lies in the pool for ``n < prefix`` and is new token ``n - prefix`` from there on.
    """
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    v_dims = dims if BLOCK_V == BLOCK_D else tl.arange(0, BLOCK_V)[None, None, :]
    steps = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]

    # Which requests, heads and query tokens: all [Z, 1], [1, M] or [Z, M].
    pair = tl.arange(0, BLOCK_Z).to(tl.int64)[:, None]
    if MANY_Z:
        pair += tl.program_id(0).to(tl.int64) * BLOCK_Z
    live = pair < pairs
    row = pair if KV_HEADS == 1 else pair // KV_HEADS
    m = tl.arange(0, BLOCK_M).to(tl.int64)[None, :]
    first_token = 0
    if MANY_M:
        first_m = tl.program_id(1).to(tl.int64) * BLOCK_M
        m += first_m
        first_token = first_m // GROUP
    token = m if GROUP == 1 else m // GROUP
    if KV_HEADS == 1:
        kv_head = 0
        head = m if BLOCK_M == GROUP else m % GROUP
    else:
        kv_head = pair % KV_HEADS
        head = kv_head if GROUP == 1 and (EXTEND or BLOCK_M == 1) else kv_head * GROUP + m % GROUP

    kv_pointers = kv_indptr + row
    kv_start = tl.load(kv_pointers, mask=live, other=0).to(tl.int64)
    prefix = tl.load(kv_pointers + 1, mask=live, other=0) - kv_start
    if EXTEND:
        # A length below zero is no key, not an offset: it must move neither the queries nor the new keys.
        prefix = tl.maximum(prefix, 0)
        qo_pointers = qo_indptr + row
        q_start = tl.load(qo_pointers, mask=live, other=0).to(tl.int64)
        q_len = tl.load(qo_pointers + 1, mask=live, other=0) - q_start
        length = prefix + q_len
        position = prefix + token
        at = q_start + token
        valid = token < q_len
    else:
        length = prefix
        at = row
        valid = live if BLOCK_M == GROUP else live & (m < GROUP)

    q_offsets = (at * q_token + head * q_head)[:, :, None]
    stored = valid[:, :, None]
    q_pointers = q + q_offsets
    q_tile = tl.load(q_pointers + dims, mask=stored if BLOCK_D == DIM else stored & (dims < DIM), other=0.0)
    if ROPE > 0:
        ropes = tl.arange(0, BLOCK_R)[None, None, :]
        q_pointers += DIM
        q_rope = tl.load(q_pointers + ropes, mask=stored if BLOCK_R == ROPE else stored & (ropes < ROPE), other=0.0)

    # Finite, so that a row without a key yet never subtracts -inf from -inf.
    top = tl.full((BLOCK_Z, BLOCK_M), -1.0e38, tl.float32)
    total = tl.full((BLOCK_Z, BLOCK_M), 0.0, tl.float32)
    if HAS_SINKS:
        # A sink is a key with this score and a zero value.
        top = tl.maximum(top, tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32))
        total += 1.0
    acc = tl.full((BLOCK_Z, BLOCK_M, BLOCK_V), 0.0, tl.float32)
    if HAS_WINDOW:
        hidden = position - window if EXTEND else prefix - (window + 1)
        not_loaded = prefix + (first_token - window) if EXTEND else hidden
    if HAS_MASK:
        mask_rows = mask + (tl.load(mask_indptr + row, mask=live, other=0) + token * length)

    for start in range(0, tl.reduce(tl.reduce(length, 1, _MAX), 0, _MAX), BLOCK_N):
        n = start + steps
        loaded = n < length
        if HAS_WINDOW:
            loaded = loaded & (n > not_loaded)
        old = loaded & (n < prefix) if EXTEND else loaded
        slot = tl.load(kv_indices + (kv_start + n), mask=old, other=0).to(tl.int64)
        k_offsets = slot * k_slot
        if KV_HEADS > 1:
            k_offsets += kv_head * k_head
        v_offsets = k_offsets if V_LIKE_K else slot * v_slot + kv_head * v_head
        k_pointers = k_buffer + k_offsets
        if not V_IN_K:
            v_pointers = v_buffer + v_offsets
        if EXTEND:
            new = q_start + (n - prefix)
            k_new_offsets = new * k_new_token + kv_head * k_new_head
            k_pointers = tl.where(old, k_pointers, k_new + k_new_offsets)
            if not V_IN_K:
                v_new_offsets = k_new_offsets if V_LIKE_K else new * v_new_token + kv_head * v_new_head
                v_pointers = tl.where(old, v_pointers, v_new + v_new_offsets)

        keep = loaded[:, :, None]
        k_pointers = k_pointers[:, :, None]
        k_tile = tl.load(k_pointers + dims, mask=keep if BLOCK_D == DIM else keep & (dims < DIM), other=0.0)
        scores = tl.dot(q_tile, tl.permute(k_tile, (0, 2, 1)), input_precision="ieee")
        if ROPE > 0:
            k_pointers += DIM
            k_rope = tl.load(k_pointers + ropes, mask=keep if BLOCK_R == ROPE else keep & (ropes < ROPE), other=0.0)
            scores = tl.dot(q_rope, tl.permute(k_rope, (0, 2, 1)), scores, input_precision="ieee")
        # Values of keys that are not there are not loaded: a weight of 0 does not remove a NaN.
        if V_IN_K:
            v_tile = k_tile
        else:
            v_mask = keep if BLOCK_V == V_DIM else keep & (v_dims < V_DIM)
            v_tile = tl.load(v_pointers[:, :, None] + v_dims, mask=v_mask, other=0.0)

        scores = scores * scale
        if HAS_SCALES:
            scores = scores * tl.where(old, k_scale, 1.0)[:, None, :]
        if HAS_SOFTCAP:
            # cap * tanh(score / cap); exp may overflow to inf, and 1 - 2 / inf is 1.
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        visible = loaded[:, None, :]
        if CAUSAL or HAS_WINDOW or HAS_MASK:
            key = n[:, None, :]
            if CAUSAL:
                visible = visible & (key <= position[:, :, None])
            if HAS_WINDOW:
                visible = visible & (key > hidden[:, :, None])
            if HAS_MASK:
                visible = visible & (tl.load(mask_rows[:, :, None] + key, mask=visible & stored, other=0) != 0)
        scores = tl.where(visible, scores, float("-inf"))

        new_top = tl.maximum(top, tl.reduce(scores, 2, _MAX))
        weights = tl.exp(scores - new_top[:, :, None])
        decay = tl.exp(top - new_top)
        total = total * decay + tl.reduce(weights, 2, _SUM)
        if HAS_SCALES:
            weights = weights * tl.where(old, v_scale, 1.0)[:, None, :]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, :, None], input_precision="ieee")
        top = new_top

    # The greatest weight is 1, so a total below that belongs to a row without a key, which gets zeros.
    result = acc / tl.maximum(total, 1.0e-30)[:, :, None]
    out_offsets = q_offsets if OUT_LIKE_Q else (at * out_token + head * out_head)[:, :, None]
    out_mask = stored if BLOCK_V == V_DIM else stored & (v_dims < V_DIM)
    tl.store(out + out_offsets + v_dims, result.to(out.dtype.element_ty), mask=out_mask)
