"""Slot attention with one-hot writes, the definition: a loop over tokens.

A write replaces a slot wholly; the read is a softmax over the slots that are not empty:

    K[m], V[m], b[m] = k_t, v_t, bias_t[w]       for each w with m = write_t[w] (none where that is -1)
    p_t = softmax over m of (scale K[m] . q_t + b[m])          o_t = sum_m p_t[m] V[m]

b is -inf in an empty slot, so a write whose bias is -inf empties its slot. With every slot empty, o is 0. A
token in two slots counts twice; if both its writes name one slot, the second holds. It is gated slot
attention whose log_gate is -inf at a write and 0 elsewhere: softmax over the tokens that are still alive.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class SlotState(NamedTuple):
    """Slots of each document, all of a head and then the next one's, S together: k [N, S, D], v [N, S, E],
    bias [N, S] float32 (-inf: empty)."""

    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor


def slots_of(num_slots: int | Sequence[int], heads: int) -> tuple[int, ...]:
    """Slots of each head, of one number for all or one for each."""
    return (num_slots,) * heads if isinstance(num_slots, int) else tuple(num_slots)


@functools.lru_cache(maxsize=1024)
def slot_table(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[H, 2] int32: of each head its slots, and those of all heads before it. Not to be changed."""
    rows = list(zip(sizes, itertools.accumulate((0, *sizes))))
    with torch.inference_mode(False):  # training may want it later
        return torch.tensor(rows, dtype=torch.int32).to(device)


def slot_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    write: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_slots: int | Sequence[int],
    scale: float | None = None,
    state: SlotState | None = None,
    cu_seqlens: torch.Tensor | None = None,
    keep_state: bool = True,
) -> tuple[torch.Tensor, SlotState | None]:
    """The loop above; arguments and results as `unsoftmax.kernels.gsa.onehot.slot_attention`."""
    if bias is None:
        bias = torch.zeros(write.shape, dtype=torch.float32, device=q.device)
    if cu_seqlens is not None:
        parts = []
        for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            one = None if state is None else SlotState(*(x[n : n + 1] for x in state))
            tokens = (x[:, a:b] for x in (q, k, v, write, bias))
            parts.append(slot_attention_reference(*tokens, num_slots=num_slots, scale=scale, state=one))
        states = SlotState(*(torch.cat(x) for x in zip(*(s for _, s in parts))))
        return torch.cat([o for o, _ in parts], dim=1), states if keep_state else None

    if not isinstance(num_slots, int):  # head by head
        sizes, parts = list(num_slots), []
        G = q.shape[2] // len(sizes)
        old = None if state is None else [x.split(sizes, 1) for x in state]
        for h, size in enumerate(sizes):
            one = None if old is None else SlotState(*(x[h] for x in old))
            mine = (x[:, :, h : h + 1] for x in (k, v, write, bias))
            queries = q[:, :, h * G : (h + 1) * G]
            parts.append(slot_attention_reference(queries, *mine, num_slots=size, scale=scale, state=one))
        states = SlotState(*(torch.cat(x, 1) for x in zip(*(s for _, s in parts))))
        return torch.cat([o for o, _ in parts], dim=2), states if keep_state else None

    (B, T, HQ, D), (H, E), kept = q.shape, v.shape[2:], k.dtype
    dtype = torch.promote_types(q.dtype, torch.float32)
    factor = D**-0.5 if scale is None else scale
    q, k, x, bias = (t.to(dtype) for t in (q, k, v, bias))
    slots, out = torch.arange(num_slots, device=q.device), [q.new_zeros(B, 0, HQ, E)]
    if state is None:
        K, V = (q.new_zeros(B, H, num_slots, size) for size in (D, E))
        b = q.new_full((B, H, num_slots), -torch.inf)
    else:
        K, V, b = (t.to(dtype).unflatten(1, (H, num_slots)) for t in state)
    for t in range(T):
        for w in range(write.shape[-1]):
            hit = write[:, t, :, w, None] == slots  # [B, H, M]
            K = torch.where(hit.unsqueeze(-1), k[:, t].unsqueeze(2), K)
            V = torch.where(hit.unsqueeze(-1), x[:, t].unsqueeze(2), V)
            b = torch.where(hit, bias[:, t, :, w, None], b)
        some = (b > -torch.inf).any(-1)[..., None, None]
        u = factor * (q[:, t].view(B, H, HQ // H, D) @ K.transpose(-1, -2)) + b.unsqueeze(2)
        p = torch.where(some, u, 0.0).softmax(-1) * some
        out.append((p @ V).view(B, 1, HQ, E))
    K, V, b = (t.flatten(1, 2) for t in (K.to(kept), V.to(v.dtype), b))
    return torch.cat(out, dim=1).to(v.dtype), SlotState(K, V, b) if keep_state else None
