"""Softmax over a window and sinks: the control that every conversion is measured against. No new parameters.

Linear time: queries go in blocks of `window` tokens; each block sees the sinks, the block before it and
itself. Constant state: the sinks and the last `window` tokens. Rows and packed documents are cut into blocks
alike, so that a block belongs to one document.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from unsoftmax.kernels.mixer import AttentionShape, Mixer, MixerOptions, Rotary, packed


@dataclass(frozen=True)
class WindowOptions(MixerOptions):
    window: int = 60
    """Last tokens that a token sees, itself included."""
    sinks: int = 4
    """First tokens of a document that every token sees."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"mixer.window is {self.window}; it must be at least 1, such as 60")
        if self.sinks < 0:
            raise ValueError(f"mixer.sinks is {self.sinks}; it must be 0 or more")

    def state_numbers(self, shape: AttentionShape) -> int:
        return shape.num_kv_heads * (self.window + self.sinks) * 2 * shape.head_dim


class WindowState(NamedTuple):
    """First tokens [B, sinks, H, D], last ones [B, window, H, D] (latest last), tokens seen [B] int64."""

    sink_k: torch.Tensor
    sink_v: torch.Tensor
    last_k: torch.Tensor
    last_v: torch.Tensor
    seen: torch.Tensor


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    sinks: int,
    scale: float | None = None,
    lengths: torch.Tensor | None = None,
    state: WindowState | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, WindowState]:
    """Attention of each token over the last `window` tokens and the first `sinks` ones of its document.

    Args:
        q: [B, T, HQ, D].
        k, v: [B, T, H, D].
        lengths: [B] int64, real tokens of each row, which come first; None means all are.
        state: what came before; None starts empty. Not changed.
        cu_seqlens: [N + 1], documents packed in one row (B = 1); the state's dimension 0 is then N.

    Returns:
        o [B, T, HQ, D] in v's dtype, and the state.
    """
    B, T = q.shape[:2]
    device = q.device
    if cu_seqlens is None:
        begin, count = torch.arange(B, device=device) * T, torch.full((B,), T, device=device)
    else:
        cu_seqlens = packed(cu_seqlens, T, device)
        begin, count = cu_seqlens[:-1], cu_seqlens.diff()
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if state is None:
        state = _empty(len(begin), window, sinks, k, v)
    blocks = (count + window - 1) // window
    if cu_seqlens is None:
        doc = torch.arange(B, device=device).repeat_interleave(-(-T // window))
    else:
        doc = torch.repeat_interleave(blocks)  # [NB], the document of each block
    first = F.pad(blocks.cumsum(0), (1, 0))[:-1]
    number = torch.arange(len(doc), device=device) - first[doc]  # of the block in its document
    place = number[:, None] * window + torch.arange(window, device=device)  # [NB, W], in this call's document
    real = place < count[doc][:, None]
    if lengths is not None:
        count = lengths
    index = place + state.seen[doc][:, None]  # in the whole document
    flat = torch.where(real, begin[doc][:, None] + place, 0)

    sink_k, sink_v = (
        _sinks(old, x, begin, count, state.seen) for old, x in ((state.sink_k, k), (state.sink_v, v))
    )
    keys, values = (
        torch.cat((sink[doc], _with_previous(x[flat], last, doc, number == 0)), 1)
        for sink, last, x in ((sink_k, state.last_k, k), (sink_v, state.last_v, v))
    )
    total = state.seen + count
    near = torch.cat((index - window, index), 1)[:, None, :]  # index of each key beside the sinks
    i = index[:, :, None]
    sees_near = (near <= i) & (i - near < window) & (near >= sinks) & (near < total[doc][:, None, None])
    s = torch.arange(sinks, device=device)
    sees_sink = (s <= i) & (s < total[doc][:, None, None])
    sees = torch.cat((sees_sink, sees_near), 2)
    sees = sees | ~sees.any(-1, keepdim=True)  # what is no token sees all, so that it stays a number
    o = F.scaled_dot_product_attention(
        q[flat].transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=sees.unsqueeze(1),
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)
    where = torch.arange(len(q), device=device)  # back from blocks to tokens
    if cu_seqlens is None:
        o = o.reshape(B, -1, *o.shape[2:])[:, :T]
    else:
        owner = torch.searchsorted(cu_seqlens[1:].contiguous(), where, right=True)
        o = o.flatten(0, 1)[first[owner] * window + where - begin[owner]].unsqueeze(0)
    last_k, last_v = (_last(old, x, begin, count) for old, x in ((state.last_k, k), (state.last_v, v)))
    return o.to(v.dtype), WindowState(sink_k, sink_v, last_k, last_v, total)


def _empty(N: int, window: int, sinks: int, k: torch.Tensor, v: torch.Tensor) -> WindowState:
    zeros = (x.new_zeros(N, size, *x.shape[1:]) for size in (sinks, window) for x in (k, v))
    return WindowState._make((*zeros, torch.zeros(N, dtype=torch.int64, device=k.device)))


def _with_previous(
    x: torch.Tensor, last: torch.Tensor, doc: torch.Tensor, opens: torch.Tensor
) -> torch.Tensor:
    """[NB, 2 W, H, D]: the window before each block of x [NB, W, H, D], then the block."""
    before = torch.cat((x[:1], x[:-1]))
    return torch.cat((torch.where(opens[:, None, None, None], last[doc], before), x), 1)


def _sinks(old, x, begin, count, seen) -> torch.Tensor:
    """Sinks [N, S, H, D]: those known, and those that this call's x [tokens, H, D] brings."""
    place = torch.arange(old.shape[1], device=x.device) - seen[:, None]
    new = (place >= 0) & (place < count[:, None])
    at = torch.where(new, begin[:, None] + place, 0)
    return torch.where(new[:, :, None, None], x[at], old)


def _last(old, x, begin, count) -> torch.Tensor:
    """The last W tokens [N, W, H, D] of old followed by this call's."""
    W = old.shape[1]
    place = torch.arange(W, device=x.device) + count[:, None] - W
    new = place >= 0
    kept = old.gather(1, (place + W).clamp(0, W - 1)[:, :, None, None].expand(-1, -1, *old.shape[2:]))
    at = torch.where(new, begin[:, None] + place, 0)
    return torch.where(new[:, :, None, None], x[at], kept)


class WindowAttention(Mixer):
    """See the module docstring; `options` is a WindowOptions."""

    Options = WindowOptions
    options: WindowOptions

    def forward(
        self,
        x: torch.Tensor,
        *,
        rotary: Rotary,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        state: WindowState | None = None,
        keep_state: bool = False,
    ) -> tuple[torch.Tensor, WindowState | None]:
        """See Mixer.forward. With cu_seqlens the state's dimension 0 is the documents."""
        if cu_seqlens is not None and (mask is not None or state is not None):
            raise ValueError("cu_seqlens excludes mask and state; pass packed documents alone")
        if cu_seqlens is not None:
            cu_seqlens = packed(cu_seqlens, x.shape[1], x.device)
        q, k, v = self.project(x, rotary)
        lengths = None
        if mask is not None:  # real tokens first, in order: distances then count real tokens alone
            order = mask.long().argsort(dim=1, descending=True, stable=True)
            lengths = mask.sum(1)
            q, k, v = (t.gather(1, order[:, :, None, None].expand_as(t)) for t in (q, k, v))
        o, state = window_attention(
            q,
            k,
            v,
            window=self.options.window,
            sinks=self.options.sinks,
            scale=self.scale,
            lengths=lengths,
            state=state,
            cu_seqlens=cu_seqlens,
        )
        if mask is not None:
            o = o.gather(1, order.argsort(1)[:, :, None, None].expand_as(o))
        return self.o_proj(o.flatten(2)).to(x.dtype), state if keep_state else None
