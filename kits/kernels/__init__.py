"""Kernel contracts: one signature each, a native implementation on CUDA and an emulation on the CPU.

Every module states one library's contract. A call reaches a custom operator of the namespace ``attnmatrix``, so that
a recorder sees its inputs and outputs, and so that capturing it runs no kernel (only the shape function).
The operator runs the library's own kernel for CUDA tensors and an emulation in plain torch for CPU tensors
(our Triton kernels: the same source in Triton's interpreter). ``kits.kernels.provenance`` tells which ran.

=================  ===================================================================================
module             contract
=================  ===================================================================================
`flash_attn`       FlashAttention 3 and 4 over a page table
`triton_ops`       our Triton kernels over a flat pool: decode, extend, dense and latent
`flashinfer`       FlashInfer's paged decode and prefill wrappers, ``plan`` and ``run``
`flashinfer_mla`   FlashInfer's latent attention wrapper
`trtllm`           TensorRT-LLM decode through FlashInfer
`flashmla`         FlashMLA over pages of 64 keys, with its schedule
`cutlass_mla`      CUTLASS latent decode
`flex`             PyTorch's flex_attention with a mask tensor, one request a call
`merge`            merging two results by their log-sum-exp
=================  ===================================================================================

Rules that hold for every emulation:

* one request at a time, so that a row's bits cannot depend on its neighbours;
* exactly the slots that the contract says are read are read, so a NaN in a result comes from one of them;
* float32 arithmetic, one cast at the end;
* lengths, offsets and tables are read when the kernel executes; host scalars are those of the call (after a capture:
  those of the capture), and are honoured as the kernel would honour them;
* what would be an out-of-bounds access raises ``KernelFault``; nothing is skipped or clamped.
"""
