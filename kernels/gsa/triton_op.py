"""The Triton kernels as PyTorch operators: seen by autograd, torch.compile, autocast and CUDA graphs."""

import torch

from unsoftmax.kernels.gsa.chunked import operand_dtype
from unsoftmax.kernels.gsa.reference import GSAState
from unsoftmax.kernels.gsa.triton_chunk import backward, forward, one_token
from unsoftmax.kernels.gsa.triton_tiles import backward as tiled_backward
from unsoftmax.kernels.gsa.triton_tiles import forward as tiled_forward

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SHORT = (torch.bfloat16, torch.float16)
Gradients = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


def gsa_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_gate: torch.Tensor,
    *,
    scale: float | None = None,
    mass: bool = False,
    state: GSAState | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, GSAState]:
    """As `unsoftmax.kernels.gsa.chunked.gsa`, by the kernels of triton_tiles.py or triton_chunk.py.

    q, k and v are cast to operand_dtype. One token after slots in 16 bits leaves slots in 16 bits.
    """
    out = v.dtype
    dtype = operand_dtype(q, k, v)
    if q.device.type == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float32  # Triton's interpreter has no bfloat16
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    before = (None, None, None)
    if state is not None:
        short = one_token(q, state.k) and state.k.dtype == state.v.dtype and state.k.dtype in SHORT
        slots = state.k, state.v
        before = *(slots if short else (x.float() for x in slots)), state.log_kept.float()
    o, *after = _gsa(q, k, v, log_gate.float(), *before, cu_seqlens, scale, mass)
    return o.to(out), GSAState(*after)


def tiled(dtype: torch.dtype) -> bool:
    """Whether operands of this dtype go to triton_tiles.py; else to triton_chunk.py, exact and slow."""
    return dtype == torch.bfloat16


@torch.library.custom_op("unsoftmax::gsa", mutates_args=())
def _gsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_gate: torch.Tensor,
    k0: torch.Tensor | None,
    v0: torch.Tensor | None,
    kept0: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    mass: bool,
) -> Tensors:
    run = tiled_forward if tiled(q.dtype) else forward
    return run(q, k, v, log_gate, scale, mass, k0, v0, kept0, cu_seqlens)


@_gsa.register_fake
def _(q, k, v, log_gate, k0, v0, kept0, cu_seqlens, scale, mass):
    (D, E, M), H = (x.shape[-1] for x in (q, v, log_gate)), k.shape[2]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    held = k0.dtype if one_token(q, k0) else torch.float32
    sizes = ((D,), held), ((E,), held), ((), torch.float32)
    slots = (log_gate.new_empty(N, H, M, *size, dtype=dtype) for size, dtype in sizes)
    return v.new_empty(*q.shape[:3], E), *slots


@torch.library.custom_op("unsoftmax::gsa_backward", mutates_args=())
def _gsa_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_gate: torch.Tensor,
    k0: torch.Tensor | None,
    v0: torch.Tensor | None,
    kept0: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    mass: bool,
    do: torch.Tensor,
    dk1: torch.Tensor | None,
    dv1: torch.Tensor | None,
    dkept1: torch.Tensor | None,
) -> Gradients:
    k0, v0 = (None if x is None else x.float() for x in (k0, v0))
    inputs = q, k, v, log_gate, scale, mass, k0, v0, kept0, cu_seqlens
    run = tiled_backward if tiled(q.dtype) else backward
    return run(*inputs, do, dk1, dv1, dkept1)


@_gsa_backward.register_fake
def _(q, k, v, log_gate, k0, v0, kept0, cu_seqlens, scale, mass, do, dk1, dv1, dkept1):
    (D, E, M), H = (x.shape[-1] for x in (q, v, log_gate)), k.shape[2]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = (log_gate.new_empty(N, H, M, *size, dtype=torch.float32) for size in ((D,), (E,), ()))
    # contiguous, whatever the inputs are
    return *(x.new_empty(x.shape) for x in (q, k, v, log_gate)), *slots


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.mass = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.shape = output[0].shape


def _grads(ctx, do, dk1, dv1, dkept1):
    tensors = ctx.saved_tensors
    if do is None:
        do = tensors[2].new_zeros(ctx.shape)
    given = [None if x is None else x.float() for x in (dk1, dv1, dkept1)]
    grads = _gsa_backward(*tensors, ctx.scale, ctx.mass, do, *given)
    slots = [None if x is None else g for x, g in zip(tensors[4:7], grads[4:])]
    return *grads[:4], *slots, None, None, None


_gsa.register_autograd(_grads, setup_context=_save)
