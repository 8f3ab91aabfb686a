"""The Triton kernels as PyTorch operators: seen by autograd, torch.compile, autocast and CUDA graphs."""

import torch

from unsoftmax.kernels.gsa.chunked import operand_dtype
from unsoftmax.kernels.gsa.reference import GSAState
from unsoftmax.kernels.gsa.triton_chunk import backward, forward, one_token
from unsoftmax.kernels.gsa.triton_tiles import backward as tiled_backward
from unsoftmax.kernels.gsa.triton_tiles import forward as tiled_forward

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
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
    inputs = q, k, v, log_gate.float(), *before
    o, *after, _ = _gsa(*inputs, cu_seqlens, scale, mass, keeps(*inputs))
    return o.to(out), GSAState(*after)


def tiled(dtype: torch.dtype) -> bool:
    """Whether operands of this dtype go to triton_tiles.py; else to triton_chunk.py, exact and slow."""
    return dtype == torch.bfloat16


def keeps(q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor | None) -> bool:
    """Whether the forward pass leaves read weights [B, T, HQ, M] for the backward pass."""
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, *rest))
    return wanted and tiled(q.dtype) and not one_token(q, rest[2])


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
    keep: bool,
) -> Tensors:
    inputs = q, k, v, log_gate, scale, mass, k0, v0, kept0, cu_seqlens
    weights = q.new_empty((*q.shape[:3], log_gate.shape[3]) if keep else 0)
    if tiled(q.dtype):
        return *tiled_forward(*inputs, weights if keep else None), weights
    return *forward(*inputs), weights


@_gsa.register_fake
def _(q, k, v, log_gate, k0, v0, kept0, cu_seqlens, scale, mass, keep):
    (D, E, M), H = (x.shape[-1] for x in (q, v, log_gate)), k.shape[2]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    held = k0.dtype if one_token(q, k0) else torch.float32
    sizes = ((D,), held), ((E,), held), ((), torch.float32)
    slots = (log_gate.new_empty(N, H, M, *size, dtype=dtype) for size, dtype in sizes)
    weights = q.new_empty((*q.shape[:3], M) if keep else 0)
    return v.new_empty(*q.shape[:3], E), *slots, weights


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
    weights: torch.Tensor | None,
) -> Gradients:
    k0, v0 = (None if x is None else x.float() for x in (k0, v0))
    inputs = q, k, v, log_gate, scale, mass, k0, v0, kept0, cu_seqlens, do, dk1, dv1, dkept1
    return tiled_backward(*inputs, weights) if tiled(q.dtype) else backward(*inputs)


@_gsa_backward.register_fake
def _(q, k, v, log_gate, k0, v0, kept0, cu_seqlens, scale, mass, do, dk1, dv1, dkept1, weights):
    (D, E, M), H = (x.shape[-1] for x in (q, v, log_gate)), k.shape[2]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = (log_gate.new_empty(N, H, M, *size, dtype=torch.float32) for size in ((D,), (E,), ()))
    # contiguous, whatever the inputs are
    return *(x.new_empty(x.shape) for x in (q, k, v, log_gate)), *slots


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.mass, keep = inputs
    ctx.save_for_backward(*tensors, output[4] if keep else None)
    ctx.mark_non_differentiable(output[4])
    ctx.set_materialize_grads(False)
    ctx.shape = output[0].shape


def _grads(ctx, do, dk1, dv1, dkept1, _):
    *tensors, weights = ctx.saved_tensors
    if do is None:
        do = tensors[2].new_zeros(ctx.shape)
    given = [None if x is None else x.float() for x in (dk1, dv1, dkept1)]
    grads = _gsa_backward(*tensors, ctx.scale, ctx.mass, do, *given, weights)
    slots = [None if x is None else g for x, g in zip(tensors[4:7], grads[4:])]
    return *grads[:4], *slots, None, None, None, None


_gsa.register_autograd(_grads, setup_context=_save)
