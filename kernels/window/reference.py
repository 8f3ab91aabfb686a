"""Softmax attention over the last tokens and the first ones, the definition: quadratic in T.

Token i sees token j <= i of its document when i - j < window or j < sinks.
"""

import torch


def window_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    sinks: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Arguments and o as `window.layer.window_attention`, on whole documents, so that there is no state.

    Sums are float32, or float64 if q is.
    """
    T, HQ, D = q.shape[1:]
    H = k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    t = torch.arange(T, device=q.device)
    start = torch.zeros_like(t)
    if cu_seqlens is not None:
        start = cu_seqlens[torch.searchsorted(cu_seqlens[1:].contiguous(), t, right=True)]
    i, j = t[:, None], t[None]
    sees = (j <= i) & (start[:, None] == start[None]) & ((i - j < window) | (j - start[None] < sinks))
    rows = q.to(wide).unflatten(2, (H, HQ // H)).permute(0, 2, 3, 1, 4)  # [B, H, G, T, D]
    keys, values = (x.to(wide).transpose(1, 2).unsqueeze(2) for x in (k, v))
    logit = rows @ keys.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    p = logit.masked_fill(~sees, -torch.inf).softmax(-1)
    return (p @ values).permute(0, 3, 1, 2, 4).flatten(2, 3).to(v.dtype), None
