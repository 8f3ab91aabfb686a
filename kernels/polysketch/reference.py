"""The definition of PolySketch attention, as a loop over tokens. Slow, plain; tests compare against it.

Token i of a document reads key j <= i with the weight

    near  (q_i . k_j + offset) ** degree, or exp(q_i . k_j) when local is "softmax"
    far   exp(far_scale) (phi_q_i . phi_k_j) ** 2

times exp(log_gate_{j+1} + ... + log_gate_i). A key is near when it is one of the first `sinks` tokens of its
document (such a key is never gated), or when its block of `block` tokens, counted from the document's start,
is i's own or one of the window / block - 1 blocks before. o_i = sum w_ij v_j / (normaliser + sum w_ij), and 0
where no key has weight.
"""

from itertools import pairwise
from typing import NamedTuple

import torch


class History(NamedTuple):
    """All keys of a document so far: k, v, phi_k [B, T, H, size] and log_gate [B, T, H]."""

    k: torch.Tensor
    v: torch.Tensor
    phi_k: torch.Tensor
    log_gate: torch.Tensor


def polysketch_reference(
    q, k, v, phi_q, phi_k, *, degree=4, block=256, local="power", window=None, sinks=0, far_scale=None,
    offset=None, log_gate=None, normaliser=0.0, state=None, cu_seqlens=None, keep_state=True,
):  # fmt: skip
    """The arguments of chunked.polysketch, in any float dtype; the state is the whole history.

    Returns o [B, T, HQ, E] and History, or a list of one History a document with cu_seqlens.
    """
    log_gate = torch.zeros_like(k[..., 0]) if log_gate is None else log_gate
    far_scale = (q.new_zeros(q.shape[2]) if far_scale is None else far_scale).expand(q.shape[:3])
    rule = (degree, block, local, window or block, sinks, normaliser)
    if cu_seqlens is not None:
        cuts = cu_seqlens.tolist()
        docs = [
            _document(*(x[:, a:b] for x in (q, phi_q, far_scale)), offset, rule,
                      History(*(x[:, a:b] for x in (k, v, phi_k, log_gate))))
            for a, b in pairwise(cuts)
        ]  # fmt: skip
        return torch.cat([o for o, _ in docs], 1), [history for _, history in docs] if keep_state else None
    new = History(k, v, phi_k, log_gate)
    history = new if state is None else History(*(torch.cat(pair, 1) for pair in zip(state, new)))
    o, history = _document(q, phi_q, far_scale, offset, rule, history)
    return o, history if keep_state else None


def _document(q, phi_q, far_scale, offset, rule, history):
    degree, block, local, window, sinks, normaliser = rule
    G = q.shape[2] // history.k.shape[2]
    k, v, phi_k, log_gate = (x.repeat_interleave(G, 2) for x in history)
    seen = k.shape[1] - q.shape[1]
    rows = []
    for t in range(q.shape[1]):
        i = seen + t
        j = torch.arange(i + 1, device=q.device)
        near = (j // block > i // block - window // block) | (j < sinks)
        score = torch.einsum("bhd,bjhd->bhj", q[:, t], k[:, : i + 1])
        top = torch.zeros_like(score[..., :1])
        if local == "softmax":
            top = score.detach().masked_fill(~near, -torch.inf).amax(-1, keepdim=True)
            exact = (score - top).masked_fill(~near, 0).exp()
        else:
            exact = (score if offset is None else score + offset[:, None]) ** degree
        sketched = torch.einsum("bhr,bjhr->bhj", phi_q[:, t], phi_k[:, : i + 1]) ** 2
        later = log_gate[:, : i + 1].flip(1).cumsum(1).flip(1) - log_gate[:, : i + 1]
        gate = later.masked_fill((j < sinks)[:, None], 0).transpose(1, 2).exp()
        w = torch.where(near, exact, sketched * (far_scale[:, t, :, None] - top).exp()) * gate
        mass = w.sum(-1, keepdim=True) + normaliser * (-top).exp()
        mean = torch.einsum("bhj,bjhe->bhe", w, v[:, : i + 1]) / mass.where(mass > 0, 1)
        rows.append(mean.where(mass > 0, 0))
    return torch.stack(rows, 1) if rows else v[:, :0], history
