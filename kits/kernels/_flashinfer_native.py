"""FlashInfer's own wrappers, for CUDA tensors (version 0.6.12)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kits.errors import Unavailable


def _library() -> Any:
    try:
        import flashinfer
        import flashinfer.mla
    except ImportError as error:
        raise Unavailable("package", f"flashinfer cannot be imported: {error}") from error
    return flashinfer


class _Paged:
    """A wrapper of the library; ``buffers`` are the tensors that its kernels read, by the names of the contract."""

    names: ClassVar[dict[str, str]] = {}
    wrapper: Any
    sm_scale: float | None

    def buffers(self) -> dict[str, torch.Tensor | None]:
        return {ours: getattr(self.wrapper, theirs, None) for ours, theirs in self.names.items()}

    def plan(self, *args: Any, **options: Any) -> None:
        self.sm_scale = options["sm_scale"]
        self.wrapper.plan(*args, **options)

    def launch(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
        v_scale: float,
    ) -> None:
        """``scale`` holds the planned scale times the factor of the keys; caches come in NHD order."""
        if self.wrapper._kv_layout == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        planned = q.shape[-1] ** -0.5 if self.sm_scale is None else self.sm_scale
        self.wrapper.run(
            q,
            (k_cache, v_cache),
            k_scale=scale / planned,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=lse is not None,
        )


class Decode(_Paged):
    names: ClassVar[dict[str, str]] = {
        "kv_indptr": "_paged_kv_indptr_buf",
        "kv_indices": "_paged_kv_indices_buf",
        "last_page_len": "_paged_kv_last_page_len_buf",
        "int_workspace": "_int_workspace_buffer",
    }

    def __init__(
        self,
        float_workspace: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        kv_indptr: torch.Tensor | None,
        kv_indices: torch.Tensor | None,
        last_page_len: torch.Tensor | None,
    ) -> None:
        self.wrapper = _library().BatchDecodeWithPagedKVCacheWrapper(
            float_workspace,
            kv_layout,
            use_cuda_graph=use_cuda_graph,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=kv_indptr,
            paged_kv_indices_buffer=kv_indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )


class Prefill(_Paged):
    names: ClassVar[dict[str, str]] = {
        "qo_indptr": "_qo_indptr_buf",
        "custom_mask": "_custom_mask_buf",
        "mask_indptr": "_mask_indptr_buf",
        **Decode.names,
    }

    def __init__(
        self,
        float_workspace: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor | None,
        kv_indices: torch.Tensor | None,
        last_page_len: torch.Tensor | None,
        custom_mask: torch.Tensor | None,
        mask_indptr: torch.Tensor | None,
        backend: str,
    ) -> None:
        self.wrapper = _library().BatchPrefillWithPagedKVCacheWrapper(
            float_workspace,
            kv_layout,
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf=qo_indptr,
            paged_kv_indptr_buf=kv_indptr,
            paged_kv_indices_buf=kv_indices,
            paged_kv_last_page_len_buf=last_page_len,
            custom_mask_buf=custom_mask,
            mask_indptr_buf=mask_indptr,
            backend=backend,
        )


class MLA(_Paged):
    names: ClassVar[dict[str, str]] = {
        "qo_indptr": "_qo_indptr_buf",
        "kv_indptr": "_kv_indptr_buf",
        "kv_indices": "_kv_indices_buf",
        "kv_len_arr": "_kv_len_arr_buf",
        "int_workspace": "_int_workspace_buffer",
    }

    def __init__(
        self,
        float_workspace: torch.Tensor,
        use_cuda_graph: bool,
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor | None,
        kv_indices: torch.Tensor | None,
        kv_len_arr: torch.Tensor | None,
        backend: str,
    ) -> None:
        self.wrapper = _library().mla.BatchMLAPagedAttentionWrapper(
            float_workspace,
            use_cuda_graph=use_cuda_graph,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
            backend=backend,
        )

    def plan(self, *args: Any, **options: Any) -> None:
        self.wrapper.plan(*args, **options)

    def launch_mla(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        base_e: bool,
    ) -> None:
        self.wrapper.run(
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            out=out,
            lse=lse,
            return_lse=lse is not None,
            return_lse_base_on_e=base_e,
        )
