"""Our Triton kernels, in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_formula import NAN, attention, offsets, worst

from kits.errors import KernelFault, Unavailable
from kits.kernels import provenance

try:
    from kits.kernels._triton import INTERPRETED
    from kits.kernels.triton_ops import decode_attention, extend_attention
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)
if not INTERPRETED:
    pytest.skip("compiled for the GPU that is used", allow_module_level=True)

SLOTS = 160
TOLERANCE = 4e-3  # float16 inputs and outputs of size about 1
bounded = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Problem:
    """A pool in which only the slots of live requests hold numbers; everything else is NaN."""

    def __init__(self, prefixes, extends, heads, dims, seed, dtype=torch.float16):
        self.prefixes, self.extends = prefixes, extends
        self.q_heads, self.kv_heads = heads
        self.dim, self.v_dim = dims
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        tokens = sum(extends)
        self.k_buffer = torch.full((SLOTS, self.kv_heads, self.dim), float("nan"), dtype=dtype)
        latent = self.dim != self.v_dim
        self.v_buffer = (
            self.k_buffer[..., : self.v_dim]
            if latent
            else torch.full((SLOTS, self.kv_heads, self.v_dim), float("nan"), dtype=dtype)
        )
        self.kv_indptr = offsets(prefixes)
        self.kv_indices = torch.randperm(SLOTS, generator=generator)[: sum(prefixes)].int()
        used = self.kv_indices.long()
        self.k_buffer[used] = randn(len(used), self.kv_heads, self.dim)
        if not latent:
            self.v_buffer[used] = randn(len(used), self.kv_heads, self.v_dim)
        self.qo_indptr = offsets(extends)
        self.q = randn(tokens, self.q_heads, self.dim)
        self.k_new = randn(tokens, self.kv_heads, self.dim)
        self.v_new = self.k_new[..., : self.v_dim] if latent else randn(tokens, self.kv_heads, self.v_dim)
        self.out = torch.full((tokens, self.q_heads, self.v_dim), float("nan"), dtype=dtype)
        self.scale = 1.3 / self.dim**0.5

    def slots(self, row):
        return self.kv_indices[self.kv_indptr[row] : self.kv_indptr[row + 1]].long()

    def tokens(self, row):
        return slice(int(self.qo_indptr[row]), int(self.qo_indptr[row + 1]))

    def extend(self, **options):
        extend_attention(
            self.q, self.k_new, self.v_new, self.k_buffer, self.v_buffer, self.qo_indptr, self.kv_indptr,
            self.kv_indices, self.out, scale=self.scale, max_extend_len=max(self.extends), **options,
        )  # fmt: skip
        return self.out

    def decode(self, **options):
        decode_attention(
            self.q, self.k_buffer, self.v_buffer, self.kv_indptr, self.kv_indices, self.out, scale=self.scale, **options
        )
        return self.out


heads = st.sampled_from([(4, 4), (4, 2), (4, 1), (10, 2), (1, 1), (6, 3)])
dims = st.sampled_from([(64, 64), (16, 16), (80, 80), (48, 32)])
seeds = st.integers(0, 2**31)
features = st.fixed_dictionaries(
    {
        "window": st.sampled_from([-1, 1, 3, 8, 100]),
        "softcap": st.sampled_from([0.0, 2.5]),
        "scales": st.sampled_from([(1.0, 1.0), (0.5, 1.75)]),
        "with_sinks": st.booleans(),
    }
)


def sinks_for(problem, wanted):
    return torch.linspace(-1.0, 2.0, problem.q_heads) if wanted else None


@bounded
@given(lens=st.lists(st.integers(0, 70), min_size=1, max_size=4), heads=heads, dims=dims, seed=seeds, use=features)
def test_decode_is_attention_over_the_listed_slots(lens, heads, dims, seed, use):
    if sum(lens) > SLOTS:
        lens = lens[:2]
    problem = Problem(lens, [1] * len(lens), heads, dims, seed)
    sinks = sinks_for(problem, use["with_sinks"])
    k_scale, v_scale = use["scales"]
    window = use["window"]
    out = problem.decode(window=window, softcap=use["softcap"], sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    for row, length in enumerate(lens):
        slots = problem.slots(row)
        expected, _ = attention(
            problem.q[row : row + 1],
            problem.k_buffer[slots].float() * k_scale,
            problem.v_buffer[slots].float() * v_scale,
            scale=problem.scale,
            softcap=use["softcap"],
            sinks=sinks,
            sees=lambda i, j, n=length: window < 0 or j > n - 1 - window,
        )
        assert worst(out[row : row + 1], expected) < TOLERANCE, f"row {row}"


@bounded
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=4),
    heads=heads,
    dims=dims,
    seed=seeds,
    use=features,
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_extend_is_attention_over_prefix_and_new_keys(rows, heads, dims, seed, use, causal, masked):
    prefixes, extends = [p for p, _ in rows], [e for _, e in rows]
    if not any(extends):
        extends[0] = 1
    problem = Problem(prefixes, extends, heads, dims, seed)
    sinks = sinks_for(problem, use["with_sinks"])
    k_scale, v_scale = use["scales"]
    window = use["window"]
    options = {}
    masks = []
    if masked:
        generator = torch.Generator().manual_seed(seed)
        masks = [torch.rand(e, p + e, generator=generator) < 0.6 for p, e in zip(prefixes, extends, strict=True)]
        options["custom_mask"] = torch.cat([mask.flatten() for mask in masks])
        options["mask_indptr"] = offsets([mask.numel() for mask in masks])
    out = problem.extend(
        causal=causal, window=window, softcap=use["softcap"], sinks=sinks, k_scale=k_scale, v_scale=v_scale, **options
    )
    for row, prefix in enumerate(prefixes):
        slots, tokens = problem.slots(row), problem.tokens(row)

        def sees(i, j, row=row, prefix=prefix):
            allowed = bool(masks[row][i, j]) if masked else (j <= prefix + i or not causal)
            return allowed and (window < 0 or j > prefix + i - window)

        expected, _ = attention(
            problem.q[tokens],
            torch.cat([problem.k_buffer[slots].float() * k_scale, problem.k_new[tokens].float()]),
            torch.cat([problem.v_buffer[slots].float() * v_scale, problem.v_new[tokens].float()]),
            scale=problem.scale,
            softcap=use["softcap"],
            sinks=sinks,
            sees=sees,
        )
        assert worst(out[tokens], expected) < TOLERANCE, f"row {row}"


@pytest.mark.parametrize("window", [-1, 5])
def test_latent_keys_hold_their_values(window):
    problem = Problem([17, 0, 40], [3, 1, 2], (4, 1), (576, 512), seed=3)
    out = problem.extend(window=window)
    for row, prefix in enumerate(problem.prefixes):
        tokens = problem.tokens(row)
        keys = torch.cat([problem.k_buffer[problem.slots(row)], problem.k_new[tokens]])
        expected, _ = attention(
            problem.q[tokens],
            keys,
            keys[..., :512],
            scale=problem.scale,
            sees=lambda i, j, p=prefix: j <= p + i and (window < 0 or j > p + i - window),
        )
        assert worst(out[tokens], expected) < TOLERANCE
    problem = Problem([17, 1, 40], [1, 1, 1], (16, 1), (576, 512), seed=3)
    out = problem.decode(window=window)
    for row, prefix in enumerate(problem.prefixes):
        keys = problem.k_buffer[problem.slots(row)]
        expected, _ = attention(
            problem.q[row : row + 1],
            keys,
            keys[..., :512],
            scale=problem.scale,
            sees=lambda i, j, p=prefix: window < 0 or j > p - 1 - window,
        )
        assert worst(out[row : row + 1], expected) < TOLERANCE


def test_many_queries_and_heads_need_several_programs():
    problem = Problem([3, 50], [40, 33], (8, 8), (16, 16), seed=4)
    out = problem.extend()
    for row, prefix in enumerate(problem.prefixes):
        tokens = problem.tokens(row)
        expected, _ = attention(
            problem.q[tokens],
            torch.cat([problem.k_buffer[problem.slots(row)], problem.k_new[tokens]]),
            torch.cat([problem.v_buffer[problem.slots(row)], problem.v_new[tokens]]),
            scale=problem.scale,
            sees=lambda i, j, p=prefix: j <= p + i,
        )
        assert worst(out[tokens], expected) < TOLERANCE


def test_float32_is_exact_to_its_own_precision():
    problem = Problem([17, 40], [1, 1], (4, 2), (64, 64), seed=5, dtype=torch.float32)
    out = problem.decode()
    for row in range(2):
        slots = problem.slots(row)
        expected, _ = attention(
            problem.q[row : row + 1], problem.k_buffer[slots], problem.v_buffer[slots], scale=problem.scale
        )
        assert worst(out[row : row + 1], expected) < 1e-5


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_a_row_does_not_depend_on_its_neighbours(mode):
    extends = [1, 1, 1] if mode == "decode" else [3, 4, 2]
    problem = Problem([9, 33, 20], extends, (10, 2), (64, 64), seed=6)
    alone = getattr(problem, mode)().clone()
    tokens = problem.tokens(1)
    rest = [i for i in range(len(problem.q)) if not tokens.start <= i < tokens.stop]
    for tensor in (problem.q, problem.k_new, problem.v_new):
        tensor[rest] = NAN
    problem.k_buffer[problem.slots(0)] = NAN
    lengths = [0, 33, 70]
    indices = torch.cat([problem.slots(1), torch.arange(70)]).int()
    problem.kv_indptr, problem.kv_indices = offsets(lengths), indices
    among = getattr(problem, mode)()
    assert torch.equal(alone[tokens], among[tokens])
    assert among[rest].isnan().any()


def test_rows_without_keys_are_zeros_and_negative_lengths_are_empty_loops():
    problem = Problem([9, 5, 20], [1, 1, 1], (4, 4), (64, 64), seed=7)
    problem.kv_indptr = torch.tensor([0, 9, 4, 24])
    out = problem.decode()
    assert (out[1] == 0).all()
    slots = problem.kv_indices[4:24].long()
    expected, _ = attention(problem.q[2:], problem.k_buffer[slots], problem.v_buffer[slots], scale=problem.scale)
    assert worst(out[2:], expected) < TOLERANCE
    with_sinks = problem.decode(sinks=torch.zeros(4))
    assert (with_sinks[1] == 0).all()


def test_a_negative_prefix_moves_neither_queries_nor_new_keys():
    problem = Problem([9, 5], [3, 3], (4, 4), (64, 64), seed=8)
    problem.kv_indptr = torch.tensor([0, 9, 7])
    out = problem.extend(window=2)
    tokens = problem.tokens(1)
    expected, _ = attention(
        problem.q[tokens],
        problem.k_new[tokens],
        problem.v_new[tokens],
        scale=problem.scale,
        sees=lambda i, j: i - 2 < j <= i,
    )
    assert worst(out[tokens], expected) < TOLERANCE


def test_tokens_of_no_request_and_queries_beyond_the_grid_are_not_written():
    problem = Problem([9, 5], [3, 3], (4, 4), (64, 64), seed=9)
    extra = torch.full((2, 4, 64), 7.0, dtype=torch.float16)
    problem.out = torch.cat([problem.out.fill_(7.0), extra])
    problem.q = torch.cat([problem.q, extra])
    problem.extends = [2, 2]  # what the host believes at capture: the grid covers two queries
    out = problem.extend()
    assert (out[[2, 5, 6, 7]] == 7).all()
    assert not (out[[0, 1, 3, 4]] == 7).all(dim=-1).any()


def test_keys_outside_the_window_are_not_loaded():
    problem = Problem([20, 20], [1, 1], (4, 4), (64, 64), seed=10)
    whole = problem.decode(window=5).clone()
    for row in range(2):
        gone = problem.slots(row)[:15]
        problem.k_buffer[gone] = problem.v_buffer[gone] = NAN
        problem.kv_indices[problem.kv_indptr[row] : problem.kv_indptr[row] + 15] = -1
    assert torch.equal(whole, problem.decode(window=5))


def test_a_nan_that_is_read_is_seen():
    problem = Problem([20, 20], [1, 1], (4, 4), (64, 64), seed=11)
    problem.v_buffer[problem.slots(1)[4], 2] = NAN
    out = problem.decode()
    assert out[1, 2].isnan().all()
    assert not out[1, [0, 1, 3]].isnan().any()
    assert not out[0].isnan().any()


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        (lambda p: p.kv_indices.__setitem__(11, -1), "kv_indices", r"row 1, entry 2: slot -1 is outside 0\.\.159"),
        (lambda p: p.kv_indices.__setitem__(0, SLOTS), "kv_indices", "row 0, entry 0: slot 160 is outside"),
        (lambda p: p.kv_indptr.__setitem__(2, 15), "kv_indptr", r"row 1 reads entries 9\.\.14 of kv_indices"),
        (lambda p: p.kv_indptr.__setitem__(0, -1), "kv_indptr", r"row 0 reads entries -1\.\.8"),
        (lambda p: setattr(p, "kv_indptr", p.kv_indptr[:2]), "kv_indptr", "has 2 entries; 2 rows need 3"),
    ],
)
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_slots_outside_the_pool_are_a_fault(change, argument, message, mode):
    problem = Problem([9, 5], [1, 1], (4, 4), (64, 64), seed=12)
    change(problem)
    with pytest.raises(KernelFault, match=message) as caught:
        getattr(problem, mode)()
    assert caught.value.argument == argument


def test_queries_and_masks_outside_their_tensors_are_a_fault():
    problem = Problem([9, 5], [2, 2], (4, 4), (64, 64), seed=13)
    problem.qo_indptr[2] = 5
    with pytest.raises(KernelFault, match=r"row 1 covers tokens 2\.\.4 of 4"):
        problem.extend()
    problem.qo_indptr[2] = 4
    mask = torch.ones(2 * 11 + 2 * 7, dtype=torch.bool)
    problem.extend(custom_mask=mask, mask_indptr=offsets([22, 14]))
    with pytest.raises(KernelFault, match=r"row 1 reads bytes 23\.\.36 of 36"):
        problem.extend(custom_mask=mask, mask_indptr=torch.tensor([0, 23, 36]))
    with pytest.raises(ValueError, match="go together"):
        problem.extend(custom_mask=mask)


def test_it_says_that_it_was_interpreted():
    problem = Problem([9, 5], [1, 1], (4, 4), (64, 64), seed=14)
    with provenance.track() as ran:
        problem.decode()
    assert ran == {"interpreted"}


def test_operators_write_nothing_but_their_result():
    problem = Problem([9, 5], [1, 1], (4, 4), (64, 64), seed=15)
    arguments = (problem.q, problem.k_buffer, problem.v_buffer, problem.kv_indptr, problem.kv_indices, problem.out)
    torch.library.opcheck(
        torch.ops.attnmatrix.triton_decode_attention.default,
        (*arguments, 0.1, 0.0, -1, None, 1.0, 1.0),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_bfloat16_is_refused_where_the_interpreter_would_get_it_wrong():
    problem = Problem([9, 5], [1, 1], (4, 4), (64, 64), seed=16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16"):
        problem.decode()


def test_shapes_are_checked_on_the_host():
    problem = Problem([9, 5], [1, 1], (4, 4), (64, 64), seed=17)
    with pytest.raises(ValueError, match="do not fit"):
        problem.decode(sinks=torch.zeros(3))
    problem.v_new = problem.v_new[..., :32]
    with pytest.raises(ValueError, match="do not fit"):
        problem.extend()
    problem.q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        problem.decode()
