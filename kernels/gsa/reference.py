"""Gated slot attention, the definition: a loop over tokens.

    a_t = exp(log_gate_t)        s_t = 1 - a_t                   one number a slot m
    K_t[m] = a_t[m] K_{t-1}[m] + s_t[m] k_t                      what a slot holds
    V_t[m] = a_t[m] V_{t-1}[m] + s_t[m] v_t
    u_t[m] = scale K_t[m] . q_t
    o_t = sum_m r_t[m] V_t[m]

    mass=False   r = softmax(u)                                  as published
    mass=True    r = softmax(u / z + log z) / z                  z_t[m] = 1 - exp(Gamma_t[m])
                   = e^{u / z} / sum of z e^{u / z}

Gamma_t[m] is the sum of log_gate since the document began; a slot never written has z = 0 and takes no part.
Source: Zhang et al. 2024, arXiv:2409.07146; the mass is ours.
"""

import itertools
from typing import NamedTuple

import torch

from unsoftmax.kernels.gsa.onehot_reference import slot_attention_reference as slot_attention_reference


class GSAState(NamedTuple):
    """What a document has left in its slots: k [N, H, M, D], v [N, H, M, E], log_kept [N, H, M] (Gamma)."""

    k: torch.Tensor
    v: torch.Tensor
    log_kept: torch.Tensor


def gsa_reference(
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
    """The loop above; arguments and results as `unsoftmax.kernels.gsa.chunked.gsa`."""
    if cu_seqlens is not None:
        ends, parts = cu_seqlens.tolist(), []
        for n, (a, b) in enumerate(itertools.pairwise(ends)):
            one = None if state is None else GSAState(*(x[n : n + 1] for x in state))
            tokens = (x[:, a:b] for x in (q, k, v, log_gate))
            parts.append(gsa_reference(*tokens, scale=scale, mass=mass, state=one))
        states = GSAState(*(torch.cat(x) for x in zip(*(s for _, s in parts))))
        return torch.cat([o for o, _ in parts], dim=1), states

    (B, T, HQ, D), (H, E), M = q.shape, v.shape[2:], log_gate.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    factor = D**-0.5 if scale is None else scale
    q, k, x, g = (t.to(dtype) for t in (q, k, v, log_gate))
    if state is None:
        state = GSAState(*(q.new_zeros(B, H, M, *size) for size in ((D,), (E,), ())))
    K, V, kept = (t.to(dtype) for t in state)
    out = [q.new_zeros(B, 0, HQ, E)]
    for t in range(T):
        a, s = g[:, t].exp().unsqueeze(-1), -torch.expm1(g[:, t]).unsqueeze(-1)  # [B, H, M, 1]
        K = a * K + s * k[:, t].unsqueeze(2)
        V = a * V + s * x[:, t].unsqueeze(2)
        kept = kept + g[:, t]
        u = factor * (q[:, t].view(B, H, HQ // H, D) @ K.transpose(-1, -2))  # [B, H, HQ // H, M]
        r = _massed(u, -torch.expm1(kept).unsqueeze(2)) if mass else u.softmax(-1)
        out.append((r @ V).view(B, 1, HQ, E))
    return torch.cat(out, dim=1).to(v.dtype), GSAState(K, V, kept)


def _massed(u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    live = z > 0  # [B, H, 1, M]
    w = u / torch.where(live, z, 1.0)
    top = torch.where(live, w + z.log(), -torch.inf).amax(-1, keepdim=True).detach().clamp_min(-1e30)
    e = torch.where(live, w - top, -torch.inf).exp()
    return e / torch.where(live.any(-1, keepdim=True), (z * e).sum(-1, keepdim=True), 1.0)
