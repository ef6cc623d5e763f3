"""One subtest's time on a device: the host/device split where it is needed, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch

from kits.errors import ModeLeakError
from kits.graphs import base, host, streams


@dataclass(frozen=True)
class _State:
    """What torch keeps per thread or process and a subtest must leave as it found it."""

    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    grad: bool
    dtype: torch.dtype

    @classmethod
    def now(cls) -> _State:
        return cls(
            tuple(_get_current_function_mode_stack()),
            tuple(_python_dispatch._get_current_dispatch_mode_stack()),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
        )

    def differences(self, now: _State) -> list[str]:
        found = []
        for kind, before, after in (
            ("function mode", self.function_modes, now.function_modes),
            ("dispatch mode", self.dispatch_modes, now.dispatch_modes),
        ):
            found += [f"{kind} {_name(m)} left active" for m in after if not any(m is b for b in before)]
            found += [f"{kind} {_name(m)} of the caller removed" for m in before if not any(m is a for a in after)]
            if not found and list(map(id, before)) != list(map(id, after)):
                found.append(f"{kind}s reordered: {', '.join(map(_name, after))}")
        if now.grad != self.grad:
            found.append(f"grad mode left {'on' if now.grad else 'off'}")
        if now.dtype != self.dtype:
            found.append(f"default dtype left at {now.dtype}")
        return found

    def restore(self) -> None:
        _unwind(_get_current_function_mode_stack, _pop_mode, self.function_modes)
        _unwind(_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._pop_mode, self.dispatch_modes)
        for mode in self.function_modes[len(_get_current_function_mode_stack()) :]:
            _push_mode(mode)
        for mode in self.dispatch_modes[len(_python_dispatch._get_current_dispatch_mode_stack()) :]:
            _python_dispatch._push_mode(mode)
        torch.set_grad_enabled(self.grad)
        torch.set_default_dtype(self.dtype)


_device = torch.device("cpu")


def current_device() -> torch.device:
    """The device of the session, or the CPU outside of one."""
    return _device


def _name(mode: Any) -> str:
    return f"{type(mode).__module__}.{type(mode).__qualname__}"


def _unwind(stack_now: Any, pop: Any, wanted: tuple[Any, ...]) -> None:
    """Pop modes until the stack is a prefix of ``wanted``; a mode's own exit comes first, as it keeps flags."""
    while True:
        stack = stack_now()
        if len(stack) <= len(wanted) and all(a is b for a, b in zip(stack, wanted, strict=False)):
            return
        with suppress(Exception):
            stack[-1].__exit__(None, None, None)
        if len(stack_now()) == len(stack):
            pop()


@contextmanager
def device_session(device: torch.device) -> Iterator[None]:
    """Hold ``device`` for one whole subtest.

    On a CPU it installs the host/device split (``kits.graphs.host``), for the session only. On both it makes sure that
    modes, grad mode and default dtype are at the end what they were at the beginning: otherwise ``ModeLeakError``, and
    what leaked is removed. If the subtest fails by itself, its own error stays and the leak is noted on it.
    """
    global _device
    before, outer, owner = _State.now(), _device, not base.is_capturing()
    _device = device
    was = host.split_by_device(device.type != "cpu")
    if device.type == "cpu" and not host.split_active():
        host.HostSplit().__enter__()
    inside = _State.now()
    try:
        yield
    except BaseException as error:
        leaks = inside.differences(_State.now())
        if leaks:
            error.add_note(f"and it left behind: {'; '.join(leaks)}")
        raise
    else:
        leaks = inside.differences(_State.now())
        if leaks:
            raise ModeLeakError("; ".join(leaks))
    finally:
        _device = outer
        before.restore()
        host.split_by_device(was)
        streams.forget()
        if owner:
            base.abandon_captures()
