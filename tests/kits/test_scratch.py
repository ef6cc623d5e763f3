"""Guard zones around persistent buffers."""

import pytest
import torch

from kits import scratch
from kits.compare import same_bits

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forgotten():
    scratch.forget_buffers()
    yield
    scratch.forget_buffers()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool])
def test_a_write_past_either_end_is_seen(dtype):
    quiet = scratch.scratch(5, dtype=dtype, device=CPU)
    buffer = scratch.scratch(3, 4, dtype=dtype, device=CPU)
    quiet.zero_()
    buffer.zero_()
    assert scratch.spoiled() == []
    assert scratch.intact()
    whole = torch.empty(0, dtype=dtype).set_(buffer.untyped_storage(), 0, (12 + 2 * scratch.GUARD,), (1,))
    for position in (0, scratch.GUARD - 1, scratch.GUARD + 12, -1):
        before = whole[position].clone()
        whole[position] = 0
        assert scratch.spoiled() == [f"{str(dtype).removeprefix('torch.')} buffer of shape (3, 4)"]
        assert not scratch.intact()
        whole[position] = before
    assert scratch.spoiled() == []


def test_a_buffer_without_elements_has_zones_too():
    scratch.scratch(4, 0, dtype=torch.int32, device=CPU)
    assert scratch.spoiled() == []


def test_buffers_are_remembered_weakly():
    first, second = (scratch.scratch(2, dtype=torch.float32, device=CPU) for _ in range(2))
    first.untyped_storage().fill_(0)
    assert scratch.spoiled() == ["float32 buffer of shape (2,)"]
    del first
    assert scratch.spoiled() == []
    second.untyped_storage().fill_(0)
    assert scratch.spoiled() == ["float32 buffer of shape (2,)"]
    scratch.forget_buffers()
    assert scratch.spoiled() == []
    assert scratch.intact()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_padding_nan_differs_from_poison(dtype):
    """A padded row written into a slot that nobody owns must show in a comparison of bits."""
    values = torch.zeros(4, dtype=dtype)
    scratch.fill_with_padding_nan(values)
    assert bool(values.isnan().all())
    assert not same_bits(values, torch.full((4,), float("nan"), dtype=dtype))
