"""The Triton source of `kits.kernels.triton_ops`: one kernel for decode and extend, dense and latent.

A program takes ``BLOCK_Z`` pairs of (request, KV head), pair ``z`` being request ``z // KV_HEADS`` and KV head
``z % KV_HEADS``, and ``BLOCK_M`` query rows of each, row ``m`` being query token ``m // GROUP`` and head
``m % GROUP`` of the pair's group. All tiles have a leading pair axis that no operation mixes. A GPU takes one
pair a program; the interpreter takes many, because there an operation costs the same for one pair and for sixteen.

The pair axis couples nothing: rows that have no key left in a later iteration add exact zeros.
"""

from __future__ import annotations

from kits.kernels._triton import tl, triton


@triton.jit
def _scores(q_tile, q_rope, k_ptr, k_offsets, loaded, DIM: tl.constexpr, ROPE: tl.constexpr,
            BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Raw scores [Z, M, N] of a tile of keys, and the tile itself [Z, N, D] for a caller whose values it holds."""
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    keep = loaded[:, :, None]
    pointers = k_ptr + k_offsets[:, :, None]
    if BLOCK_D == DIM:
        k_tile = tl.load(pointers + dims, mask=keep, other=0.0)
    else:
        k_tile = tl.load(pointers + dims, mask=keep & (dims < DIM), other=0.0)
    scores = tl.dot(q_tile, tl.permute(k_tile, (0, 2, 1)), input_precision="ieee")
    if ROPE > 0:
        ropes = tl.arange(0, BLOCK_R)[None, None, :]
        k_rope = tl.load(pointers + DIM + ropes, mask=keep & (ropes < ROPE), other=0.0)
        scores += tl.dot(q_rope, tl.permute(k_rope, (0, 2, 1)), input_precision="ieee")
    return scores, k_tile


@triton.jit
def _accumulate(scores, visible, v_tile, factor, v_scale, softcap, top, total, acc, HAS_SOFTCAP: tl.constexpr):
    """Scale, cap, mask, and one step of the online softmax."""
    scores = scores * factor
    if HAS_SOFTCAP:
        # cap * tanh(score / cap); exp may overflow to inf, and 1 - 2 / inf is 1.
        scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 2))
    # A row that has seen no key yet has -inf, and -inf - -inf is NaN: subtract 0 there.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - shift[:, :, None])
    decay = tl.exp(top - shift)
    total = total * decay + tl.sum(weights, 2)
    part = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
    acc = acc * decay[:, :, None] + part * v_scale
    return new_top, total, acc


@triton.jit
def attention_kernel(
    q, k_new, v_new, k_buffer, v_buffer, out,
    qo_indptr, kv_indptr, kv_indices, mask, mask_indptr, sinks,
    pairs, scale, k_scale, v_scale, softcap, window,
    q_token, q_head, k_new_token, k_new_head, v_new_token, v_new_head,
    k_slot, k_head, v_slot, v_head, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, V_DIM: tl.constexpr,
    EXTEND: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, V_IN_K: tl.constexpr,
    BLOCK_Z: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Contract: `decode_attention` and `extend_attention`. ``DIM`` + ``ROPE`` is the key's head dim."""
    pair = tl.program_id(0) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    live = pair < pairs
    row = pair // KV_HEADS
    kv_head = (pair % KV_HEADS)[:, None]
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = (m // GROUP)[None, :]
    first_token = tl.program_id(1) * BLOCK_M // GROUP

    kv_start = tl.load(kv_indptr + row, mask=live, other=0)
    kv_len = tl.load(kv_indptr + row + 1, mask=live, other=0) - kv_start
    if EXTEND:
        q_start = tl.load(qo_indptr + row, mask=live, other=0)
        q_len = tl.load(qo_indptr + row + 1, mask=live, other=0) - q_start
        valid = token < q_len[:, None]
        position = kv_len[:, None] + token
        first_position = kv_len + first_token
    else:
        q_start = row
        q_len = tl.where(live, 1, 0)
        valid = live[:, None] & (m < GROUP)[None, :]
        position = kv_len[:, None] - 1 + token
        first_position = kv_len - 1

    head = kv_head * GROUP + (m % GROUP)[None, :]
    at = (q_start[:, None] + token).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    q_pointers = q + (at * q_token + head * q_head)[:, :, None]
    q_tile = tl.load(q_pointers + dims, mask=valid[:, :, None] & (dims < DIM), other=0.0)
    q_rope = q_tile
    if ROPE > 0:
        ropes = tl.arange(0, BLOCK_R)[None, None, :]
        q_rope = tl.load(q_pointers + DIM + ropes, mask=valid[:, :, None] & (ropes < ROPE), other=0.0)

    top = tl.full((BLOCK_Z, BLOCK_M), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Z, BLOCK_M), tl.float32)
    if HAS_SINKS:
        # A sink is a key with this score and a zero value.
        top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        total = total + 1.0
    acc = tl.zeros((BLOCK_Z, BLOCK_M, BLOCK_V), tl.float32)
    values = tl.arange(0, BLOCK_V)[None, None, :]
    if HAS_MASK:
        mask_width = kv_len + q_len
        mask_row = tl.load(mask_indptr + row, mask=live, other=0)[:, None] + token * mask_width[:, None]

    start = 0
    if HAS_WINDOW:
        first_seen = first_position - window + 1
        start = tl.maximum(tl.min(first_seen, 0), 0) // BLOCK_N * BLOCK_N
    for base in range(start, tl.max(kv_len, 0), BLOCK_N):
        n = base + tl.arange(0, BLOCK_N)[None, :]
        loaded = n < kv_len[:, None]
        if HAS_WINDOW:
            loaded = loaded & (n >= first_seen[:, None])
        slot = tl.load(kv_indices + kv_start[:, None] + n, mask=loaded, other=0).to(tl.int64)
        scores, v_tile = _scores(
            q_tile, q_rope, k_buffer, slot * k_slot + kv_head * k_head, loaded, DIM, ROPE, BLOCK_D, BLOCK_R
        )
        if not V_IN_K:
            v_pointers = v_buffer + (slot * v_slot + kv_head * v_head)[:, :, None] + values
            # Values of keys that are not there are not loaded: a weight of 0 does not remove a NaN.
            v_tile = tl.load(v_pointers, mask=loaded[:, :, None] & (values < V_DIM), other=0.0)
        visible = loaded[:, None, :]
        if HAS_WINDOW:
            visible = visible & (n[:, None, :] > (position - window)[:, :, None])
        if HAS_MASK:
            bits = mask + mask_row[:, :, None] + n[:, None, :]
            visible = visible & (tl.load(bits, mask=visible & valid[:, :, None], other=0) != 0)
        top, total, acc = _accumulate(
            scores, visible, v_tile, scale * k_scale, v_scale, softcap, top, total, acc, HAS_SOFTCAP
        )

    if EXTEND:
        for base in range(0, tl.max(q_len, 0), BLOCK_N):
            n = base + tl.arange(0, BLOCK_N)[None, :]
            loaded = n < q_len[:, None]
            if HAS_WINDOW:
                loaded = loaded & (n > first_token - window)
            at = (q_start[:, None] + n).to(tl.int64)
            scores, v_tile = _scores(
                q_tile, q_rope, k_new, at * k_new_token + kv_head * k_new_head, loaded, DIM, ROPE, BLOCK_D, BLOCK_R
            )
            if not V_IN_K:
                v_pointers = v_new + (at * v_new_token + kv_head * v_new_head)[:, :, None] + values
                v_tile = tl.load(v_pointers, mask=loaded[:, :, None] & (values < V_DIM), other=0.0)
            visible = loaded[:, None, :]
            if CAUSAL:
                visible = visible & (n[:, None, :] <= token[:, :, None])
            if HAS_WINDOW:
                visible = visible & (n[:, None, :] > (token - window)[:, :, None])
            if HAS_MASK:
                bits = mask + (mask_row + kv_len[:, None])[:, :, None] + n[:, None, :]
                visible = visible & (tl.load(bits, mask=visible & valid[:, :, None], other=0) != 0)
            top, total, acc = _accumulate(scores, visible, v_tile, scale, 1.0, softcap, top, total, acc, HAS_SOFTCAP)

    # A row without a key has a total of 0 and gets zeros.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, :, None]
    at = (q_start[:, None] + token).to(tl.int64)
    out_pointers = out + (at * out_token + head * out_head)[:, :, None] + values
    tl.store(out_pointers, result.to(out.dtype.element_ty), mask=valid[:, :, None] & (values < V_DIM))
