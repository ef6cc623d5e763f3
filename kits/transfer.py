"""Values between host and device, in as few waits as possible.

Whoever asks a GPU waits for all that it was given before, and other processes' work comes between: what a subtest takes
there is counted in questions, not in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Python values as a tensor of ``device``; nobody waits."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device=device)
    return send(torch.tensor(values, dtype=dtype), device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``; nobody waits."""
    if device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetch(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """The same values on the host, by one question; what is on the CPU already is returned as it is."""
    hosts = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    away = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in hosts}
    if away:
        # The widest first, so that each part is aligned to its own size.
        order = sorted(away, key=lambda name: -away[name].dtype.itemsize)
        flat = torch.cat([away[name].view(-1).view(torch.uint8) for name in order]).cpu()
        for name, part in zip(order, flat.split([away[name].nbytes for name in order]), strict=True):
            hosts[name] = part.view(away[name].dtype).view(away[name].shape)
    return hosts
