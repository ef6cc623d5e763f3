"""Recorded calls, and how they are issued again."""

from __future__ import annotations

from typing import Any

import torch

from kits.errors import CheckFailed, KernelFault, ReplayError
from kits.graphs.base import tensor_arguments
from kits.graphs.deferring import flat, store
from kits.graphs.schemas import OpInfo

Step = tuple[Any, tuple, dict[str, Any], Any, int]
"""A call to issue: function, arguments, keyword arguments, where its new results are stored, index of its op."""


class Tape:
    """The steps of one graph, ready to run. All their tensors lie in memory of the graph or in unowned storages."""

    def __init__(self, steps: list[Step], infos: list[OpInfo]) -> None:
        self._steps = steps
        self._infos = infos
        self._proofs_left = 2
        self._returned: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def run(self) -> None:
        """Issue all calls. The first two runs also prove what the ops return."""
        below_autograd = torch._C._AutoDispatchBelowAutograd()
        index = -1
        try:
            if self._proofs_left:
                for function, args, kwargs, out, index in self._steps:
                    result = function(*args, **kwargs)
                    if out is not None:
                        self._prove(index, args, kwargs, flat(out, result))
                        store(out, result)
                self._proofs_left -= 1
                if not self._proofs_left:
                    self._returned.clear()
                return
            for function, args, kwargs, out, index in self._steps:  # noqa: B007, the handler below needs it
                result = function(*args, **kwargs)
                if out is None:
                    continue
                if type(out) is torch.Tensor:
                    out.copy_(result)
                else:
                    store(out, result)
        except Exception as error:
            raise self._explain(error, index) from error.__cause__
        finally:
            del below_autograd

    def _prove(self, index: int, args: tuple, kwargs: dict[str, Any], pairs: list) -> None:
        """What an op returned must be what its fake kernel said, in memory of its own.

        What custom ops returned is held over two runs: memory that comes back meanwhile is memory that an op keeps.
        """
        info = self._infos[index]
        where = f"op #{index} {info.name}"
        for wanted, got in pairs:
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                raise ReplayError(f"{where} returned {_describe(got)}, but its fake kernel said {_describe(wanted)}")
        if info.aten:
            return
        given = {t.untyped_storage()._cdata for _, t in tensor_arguments(info, args, kwargs)}
        call = index + len(self._infos) * self._proofs_left
        for _, got in pairs:
            cdata = got.untyped_storage()._cdata
            if cdata in given:
                raise ReplayError(
                    f"{where} returned memory of an argument, which its schema does not say: "
                    "return a new tensor, or declare the alias"
                )
            held = self._returned.setdefault(cdata, [])
            if any(earlier != call for earlier, _ in held):
                raise ReplayError(
                    f"{where} returned memory that it also keeps, so that each call writes into the result of the one "
                    "before: return a new tensor, or take the buffer as an argument"
                )
            held.append((call, got))

    def _explain(self, error: Exception, index: int) -> Exception:
        if index < 0:
            return error
        where = f"in a replay, op #{index} {self._infos[index].name}"
        bounds = isinstance(error, IndexError) or "out of bounds" in str(error) or "out of range" in str(error)
        if bounds and not isinstance(error, CheckFailed):
            return KernelFault(self._infos[index].name, "index", f"{where}: {error}")
        error.add_note(where)
        return error


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
