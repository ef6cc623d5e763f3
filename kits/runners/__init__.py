"""Runner modes: how a subtest is driven. ``run`` is what a generated test calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kits import backends, record
from kits.errors import KitError
from kits.graphs import device_session
from kits.kernels import provenance
from kits.needs import asked_for, chosen_device, require
from kits.opening import open_gpu
from kits.runners.common import SubtestRun
from kits.runners.cuda_graph import run_cuda_graph
from kits.runners.eager import run_eager
from kits.runners.multi_step import run_multi_step
from kits.runners.split_op import run_bcg, run_pcg
from kits.scratch import forget_buffers
from kits.subtest import Subtest

RUNNERS: dict[str, Callable[[SubtestRun], None]] = {
    "eager": run_eager,
    "cuda_graph": run_cuda_graph,
    "cuda_graph_multi_step": run_multi_step,
    "pcg": run_pcg,
    "bcg": run_bcg,
}


def run(subtest: Subtest) -> None:
    """Run ``subtest`` on the chosen device and leave its record behind, also when it fails."""
    notes = record.begin(subtest.id)
    if subtest.runner not in RUNNERS:
        raise KitError(f"{subtest.id}: unknown runner mode {subtest.runner!r}; known: {', '.join(RUNNERS)}")
    if asked_for() == "cuda":
        open_gpu(backends.libraries_of(subtest.adapter))
    device = chosen_device()
    require(subtest, device)
    backend = backends.load(subtest.adapter)
    notes.backend_class = f"{type(backend).__module__}.{type(backend).__qualname__}"
    forget_buffers()
    with provenance.track() as ran, device_session(device), torch.inference_mode(False), torch.no_grad():
        try:
            RUNNERS[subtest.runner](SubtestRun(subtest, backend, device, notes))
            if not ran:  # the kit's kernels say what they are; an adapter's own have nothing in their place
                provenance.note(provenance.NATIVE)
        finally:
            notes.ran = set(ran)
            backend.close()
