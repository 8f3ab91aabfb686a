"""Several more tokens of documents that began in an earlier call, through the Triton kernels; no gradient.

The buffer's keys, which start with a block, and the new tokens after them make a row that the kernels take as
a document of its own. What the document had before that row, the state's sums and sinks, is read apart in
PyTorch and joined by what each side was divided by (chunked._continue_on_triton). Nothing is looked at on the
host, so rows may have seen different numbers of tokens.
"""

from __future__ import annotations

import torch

from unsoftmax.kernels.polysketch.sketch import num_features
from unsoftmax.kernels.polysketch.triton_block import (
    _centered,
    _forward_op,
    _shape,
    _sum_states,
    plan,
)


def later_rows(state, T: int, block: int, window: int, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where things lie in rows of L tokens, each starting with the oldest block that the buffer has a key of.

    real [B] of the T new tokens count.

    Returns:
        source [B, L], index into (buffer, new tokens, a zero row); token [B, L], the index in the document;
        place [B, T], where the new tokens are.
    """
    older = window - block
    begin = state.seen // block * block - older  # of the buffer's first place
    slot, first = state.seen - begin, begin.clamp(min=0)
    L = -(-(window + T) // block) * block
    token = first[:, None] + torch.arange(L, device=real.device)
    at = token - begin[:, None]  # in the buffer, then past it
    new = at - slot[:, None]
    source = torch.where(new < 0, at, window + new)
    source = torch.where(new < real[:, None], source, window + T)
    return source, token, (state.seen - first)[:, None] + torch.arange(T, device=real.device)


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of x [B, n, ...] at index [B, m] of its second dimension."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def row_of(buffer: torch.Tensor | None, x: torch.Tensor, window: int, source: torch.Tensor) -> torch.Tensor:
    """The buffer's keys and the new tokens x [B, T, ...] in one row, zeros where there are none."""
    before = x.new_zeros(len(x), window, *x.shape[2:]) if buffer is None else buffer
    return take(torch.cat((before, x, torch.zeros_like(x[:, :1])), 1), source)


def row_attention(q, k, v, phi_q, phi_k, far_scale, offset, rule: list[int], normaliser: float):
    """o of the kernels, and log den [B, L, HQ] for softmax, 1 / den for powers."""
    lift = None
    if rule[3]:
        lift = far_scale.float().contiguous()
    else:
        phi_q = phi_q * (far_scale.float() / 2).exp().to(phi_q.dtype).unsqueeze(-1)
    offset = None if offset is None else offset.float().contiguous()
    return _forward_op(q, k, v, phi_q, phi_k, offset, lift, None, rule, normaliser, False)[:2]


def row_sums(k, v, phi_k, passed: torch.Tensor) -> torch.Tensor:
    """S [B, H, F, E + 1] float32 of the keys of a row that have passed, [B, L]; L is a multiple of 16."""
    s = _shape(k, k, v, phi_k, [16, 16, 0, 0, 4])
    cut = plan(k.dtype, max(s.D, s.E))
    final = torch.empty(s.B, s.H, num_features(s.R), s.E + 1, dtype=torch.float32, device=k.device)
    center, far_v = _centered(v, None, s)
    phi_k = phi_k.where(passed[..., None, None], 0)
    _sum_states(phi_k, far_v, None, None, None, s, cut.states, final, center)
    return final
