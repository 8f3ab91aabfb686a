"""PolySketch attention in blocks: linear time. Plain PyTorch on any device; on a GPU triton_block.py.

A document is cut into blocks of C tokens from its first token on. A block of queries meets the W newest keys
(its own block and the W / C - 1 before it) and the first tokens ("sinks") with their exact weights, and
everything older through one state

    S = sum_j exp(gates after j) features(phi_k_j) [v_j, 1]        [F, E + 1]

in which numerator and denominator travel together. A key passes from exact to sketched only when a block
ends, in prefill and decode alike. Rows are laid out as tiles of C tokens; a tile that starts a document has
S = 0. Segments of tiles are recomputed in the backward pass, so that features and weights exist for one
segment at a time.

Source  PolySketchFormer, Kacham et al. 2024, arXiv:2310.01655 (block algorithm, exact local blocks).
        reference.py has the weights one by one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unsoftmax.kernels.polysketch.sketch import features, num_features, squared_norms

try:
    from unsoftmax.kernels.polysketch.continued import (
        later_rows,
        row_attention,
        row_of,
        row_sums,
        take,
    )
    from unsoftmax.kernels.polysketch.triton_block import polysketch_triton, unsupported
    from unsoftmax.kernels.polysketch.triton_step import step_triton
except ImportError:  # no triton
    polysketch_triton = step_triton = unsupported = None

SEGMENT = 512  # tokens whose features exist at once
# What takes the kernels unasked: all of it passed benchmarks/check_polysketch.py on a GPU as it stands.
PROVEN: tuple[str, ...] = ("training", "packed", "continued", "step")


class PolySketchState(NamedTuple):
    """What a document needs of its past. N documents; F = num_features(r); W = window; sums in float32.

    The buffer holds the keys that are still exact: position p is token (seen // C - W / C + 1) C + p, zeros
    where that token does not exist yet or never did.
    """

    S: torch.Tensor  # [N, H, F, E + 1]
    k: torch.Tensor  # [N, W, H, D]
    v: torch.Tensor  # [N, W, H, E]
    phi_k: torch.Tensor  # [N, W, H, r]
    log_gate: torch.Tensor  # [N, W, H]
    sink_k: torch.Tensor  # [N, sinks, H, D]
    sink_v: torch.Tensor  # [N, sinks, H, E]
    seen: torch.Tensor  # [N] int64, tokens of the document so far


class _Rule(NamedTuple):
    degree: int
    block: int
    tiles: int  # W / C
    softmax: bool
    sinks: int
    normaliser: float
    gated: bool


class _Layout(NamedTuple):
    """Where tokens lie: n tiles a row, behind tiles - 1 tiles of older keys ("stream" order, L positions)."""

    source: (
        torch.Tensor | None
    )  # [R, L], index into (buffer, new tokens, a zero); None when tokens just follow
    position: torch.Tensor  # [R, L], index of the token in its document, -1 where there is none
    document: torch.Tensor  # [R, n + tiles - 1], whose tile it is, -1 for nobody's
    first: torch.Tensor  # [N], stream position of each document's token 0; negative when it has passed
    place: (
        torch.Tensor | None
    )  # [R, T], position of the new tokens among the n tiles; None when they just follow
    last: list[tuple[int, int]]  # (row, tile) of each document's open block
    seen: torch.Tensor  # [N], tokens of each document after this call
    buffered: int = 0  # tokens that the state's buffer puts before the new ones
    packed: bool = False


def polysketch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    *,
    degree: int = 4,
    block: int = 256,
    local: str = "power",
    window: int | None = None,
    sinks: int = 0,
    far_scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    log_gate: torch.Tensor | None = None,
    normaliser: float = 0.0,
    state: PolySketchState | None = None,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    keep_state: bool = True,
    in_place: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, PolySketchState | None]:
    """Attention with exact weights near by and squared sketch products far away, causal.

        near  (q_i . k_j + offset) ** degree, or exp(q_i . k_j) for local="softmax"
        far   exp(far_scale) (phi_q_i . phi_k_j) ** 2
        o_i = sum_j w_ij v_j / (normaliser + sum_j w_ij), 0 where no key has weight

    Args:
        q: [B, T, HQ, D]. Scale it beforehand; none is applied here.
        k, v: [B, T, H, D] and [B, T, H, E].
        phi_q, phi_k: [B, T, HQ, r] and [B, T, H, r], sketches of half the degree.
        degree: power of the exact weights for local="power": even.
        block: tokens a block.
        local: "power" or "softmax".
        window: most tokens that are exact at a time, a multiple of block; None means one block. A query
            sees from window - block + 1 to window exact keys.
        sinks: first tokens of a document, exact for good and untouched by log_gate.
        far_scale: [HQ] or [B, T, HQ], natural log of a factor on far weights; None is 0.
        offset: [HQ], added to the exact scores of local="power"; None is 0.
        log_gate: [B, T, H], at most 0: what every older weight is multiplied by at a token, in natural log.
        normaliser: c, added to the sum of weights. 0 averages; 1 is the published layer.
        state: what an earlier call returned; None starts empty. Not changed unless in_place.
        cu_seqlens: [N + 1], documents packed in one row (B = 1); excludes state and lengths.
        lengths: [B] int64, real tokens of each row; those after them are ignored, and their outputs 0.
        keep_state: whether the state after the last token is wanted.
        in_place: [B] bool, for a caller who owns the state (the layer's `own`) and gives one token a row: the
            kernels then change and return that state, but in rows where this is false, as if they had no
            token. None, or where no kernel takes the call: a new state, in which each row has its token.
        backend: "triton", "torch", or None: triton for CUDA tensors wherever it can (`why_not_triton`) and is
            PROVEN. The kernels take all operands in q's dtype, and a state, given or returned, carries no
            gradient.

    Returns:
        o [B, T, HQ, E] in v's dtype, and the state after the last token, or None. Sums are float32, for
        float64 q float64.

    Raises:
        ValueError: a window that is no multiple of block, an odd degree, an unknown local, an offset with
            local="softmax", cu_seqlens that do not run from 0 to T or come with state, lengths, or B > 1, an
            unknown backend, or backend="triton" for what the kernels do not take.
    """
    rule = _rule(degree, block, local, window, sinks, offset, normaliser, log_gate is not None)
    B, T, H, _ = k.shape
    if backend not in (None, "triton", "torch"):
        raise ValueError(f"backend is {backend!r}; it must be None, 'triton' or 'torch'")
    if backend == "triton" or (backend is None and q.is_cuda):
        before = state
        if state is None and lengths is not None and keep_state:  # states of different ages
            before = _unseen(q, k, v, phi_k, rule)
        step = state is not None and T == 1 and cu_seqlens is None
        given: dict = {"a state and cu_seqlens": None if cu_seqlens is None else before}
        if before is not None:
            given |= _refused_state(before, (q, k, v, phi_q, phi_k, far_scale, offset))
        elif keep_state:
            given["cu_seqlens with keep_state"] = cu_seqlens
        elif cu_seqlens is not None:
            given["cu_seqlens and more than one row"] = True if B > 1 else None
        reason = why_not_triton(q, k, v, phi_q, rule, given)
        path = "step" if step else "continued" if before is not None else "training"
        path = "packed" if cu_seqlens is not None and before is None else path
        if backend is None and path not in PROVEN:
            reason = f"{path}, which no GPU has proven"
        if reason is None and step:
            more = (lengths, in_place)
            o, state = _step_on_triton(state, q, k, v, phi_q, phi_k, far_scale, offset, rule, *more)
            return o, state if keep_state else None
        if reason is None and before is not None:
            with torch.autocast(q.device.type, enabled=False):
                o, state = _continue_on_triton(
                    before,
                    *(x.to(q.dtype) for x in (q, k, v, phi_q, phi_k)),
                    far_scale,
                    offset,
                    rule,
                    lengths,
                )
            return o.to(v.dtype), state if keep_state else None
        if reason is None:
            o, state = _on_triton(q, k, v, phi_q, phi_k, far_scale, offset, rule, cu_seqlens, keep_state)
            if lengths is not None:
                outside = torch.arange(T, device=o.device) >= lengths.to(o.device)[:, None]
                o = o.masked_fill(outside[..., None, None], 0)
            return o, state
        if backend == "triton":
            raise ValueError(f"backend 'triton' does not take {reason}; backend 'torch' does")
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    if log_gate is None:
        log_gate = torch.zeros(B, T, H, device=k.device, dtype=sums)
    if far_scale is None or far_scale.dim() == 1:
        far_scale = (q.new_zeros(q.shape[2]) if far_scale is None else far_scale).expand(B, T, -1)
    queries, keys = [q, phi_q, far_scale], [k, v, phi_k, log_gate]
    with torch.autocast(q.device.type, enabled=False):
        if state is not None and T == 1 and lengths is None and cu_seqlens is None:
            o, state = _step(state, queries, keys, offset, rule, sums)
        else:
            o, state = _prefill(state, queries, keys, offset, rule, sums, cu_seqlens, lengths)
    return o.to(v.dtype), state if keep_state else None


def _prefill(state, queries, keys, offset, rule, sums, cu_seqlens, lengths):
    k, v, phi_k, _ = keys
    B, T = k.shape[:2]
    if cu_seqlens is not None:
        if state is not None or lengths is not None or B > 1:
            raise ValueError("cu_seqlens packs documents in one row (B = 1), without state and lengths")
        layout = _packed(cu_seqlens, T, rule)
    else:
        layout = _rows(B, T, state, lengths, rule, k.device)
    fresh = _empty(layout, k, v, phi_k, rule, sums) if state is None else state
    old = [None] * 4 if state is None else [state.k, state.v, state.phi_k, state.log_gate]
    keys = [_laid(x, buffer, layout, rule) for x, buffer in zip(keys, old)]
    queries = [_laid(x, None, layout, rule)[:, rule.tiles - 1 :] for x in queries]
    sink = [_sinks(x, before, layout) for x, before in zip(keys, (fresh.sink_k, fresh.sink_v))]
    o, S = _walk(fresh.S.to(sums), queries, keys, sink, offset, layout, rule)
    o = o[:, :T] if layout.place is None else _take(o, layout.place)
    return o, PolySketchState(S, *_buffer(keys, layout, rule), *sink, layout.seen)


def _step(state, queries, keys, offset, rule, sums):
    """One more token in each row: a tile with one query, and nothing laid out anew."""
    C, W, seen = rule.block, rule.tiles * rule.block, state.seen
    rows = torch.arange(len(seen), device=seen.device)
    block, slot = torch.div(seen, C, rounding_mode="floor"), W - C + seen % C
    token = (block - rule.tiles + 1)[:, None] * C + torch.arange(W, device=seen.device)
    at = (rows, slot)
    buffers = (state.k, state.v, state.phi_k, state.log_gate)
    buffers = [old.index_put(at, x[:, 0].to(old.dtype)) for old, x in zip(buffers, keys)]
    first = (torch.arange(rule.sinks, device=seen.device) == seen[:, None])[..., None, None]
    sink = [x.to(old.dtype).where(first, old) for old, x in zip((state.sink_k, state.sink_v), keys)]

    k, v, phi_k, gate = (x.unsqueeze(1) for x in buffers)  # one tile
    total = _running(gate, (token <= seen[:, None]).unsqueeze(1)) if rule.gated else None
    row = None if total is None else total[rows, :, :, slot].unsqueeze(-1)
    S, tile = state.S.to(sums), token.unsqueeze(1)
    queries = [x.unsqueeze(1) for x in queries]
    tiles = [x.unsqueeze(1) for x in sink]
    o = _read(S.unsqueeze(1), queries, (k, v, tile, total), tiles, seen[:, None, None], row, offset, rule)

    ends = (seen + 1) % C == 0
    if ends.is_cuda or bool(ends.any()):  # to look would wait for a GPU
        added, decay = _fold(phi_k, v, tile, total, rule, sums)
        after = (S if decay is None else S * decay[:, 0]) + added[:, 0]
        S = after.where(ends[:, None, None, None], S)
        moved = [torch.cat((x[:, C:], torch.zeros_like(x[:, :C])), 1) for x in buffers]
        buffers = [b.where(ends.view(-1, *(1,) * (b.dim() - 1)), a) for a, b in zip(buffers, moved)]
    return o[:, 0], PolySketchState(S, *buffers, *sink, seen + 1)


def why_not_triton(q, k, v, phi_q, rule: _Rule, given: dict) -> str | None:
    """What keeps a call from the Triton kernels, in words, or None. The one place that decides.

    Decided from shapes, dtypes and which arguments are given, never from numbers in them.
    """
    if unsupported is None:
        return "a machine without triton"
    for name, wrong in (
        ("log_gate", rule.gated),
        *((name, x is not None) for name, x in given.items()),
    ):
        if wrong:
            return name
    return unsupported(
        q, k, v, phi_q, degree=rule.degree, block=rule.block, soft=rule.softmax, sinks=rule.sinks
    )


def _unseen(q, k, v, phi_k, rule) -> PolySketchState:
    """The state before the first token, as the kernels continue it."""
    B, _, H, D = k.shape
    E, W, F = v.shape[-1], rule.tiles * rule.block, num_features(phi_k.shape[-1])
    S, log_gate = (q.new_zeros(B, *size, dtype=torch.float32) for size in ((H, F, E + 1), (W, H)))
    buffers = (q.new_zeros(B, W, H, size) for size in (D, E, phi_k.shape[-1]))
    sinks = (q.new_zeros(B, rule.sinks, H, size) for size in (D, E))
    return PolySketchState(S, *buffers, log_gate, *sinks, q.new_zeros(B, dtype=torch.int64))


def _refused_state(state, tensors) -> dict:
    """What the kernels do not take beside a state, as `given` of why_not_triton."""
    buffers = (state.k, state.v, state.phi_k, state.sink_k, state.sink_v)
    differs = state.S.dtype != torch.float32 or any(x.dtype != tensors[0].dtype for x in buffers)
    learns = any(x is not None and x.requires_grad for x in (*tensors, state.S, *buffers))
    return {
        "a state of another dtype": True if differs else None,
        "a gradient beside a state": True if learns and torch.is_grad_enabled() else None,
    }


def _step_on_triton(state, q, k, v, phi_q, phi_k, far_scale, offset, rule, lengths, in_place):
    parts = [state.S, state.k, state.v, state.phi_k, state.sink_k, state.sink_v, state.seen]
    with torch.autocast(q.device.type, enabled=False):
        o, (S, *buffers, sink_k, sink_v, seen) = step_triton(
            *(x.to(q.dtype) for x in (q, k, v, phi_q, phi_k)), parts,
            degree=rule.degree, block=rule.block, window=rule.tiles * rule.block, sinks=rule.sinks,
            soft=rule.softmax, offset=offset, far_scale=far_scale, normaliser=rule.normaliser,
            real=lengths if in_place is None else in_place, in_place=in_place is not None,
        )  # fmt: skip
    return o.to(v.dtype), PolySketchState(S, *buffers, state.log_gate, sink_k, sink_v, seen)


def _continue_on_triton(state, q, k, v, phi_q, phi_k, far_scale, offset, rule, lengths):
    """Several more tokens: the kernels over the buffer and them, and what lies before apart."""
    B, T, HQ, _ = q.shape
    C, W = rule.block, rule.tiles * rule.block
    real = torch.full((B,), T, device=q.device) if lengths is None else lengths.to(q.device)
    source, token, place = later_rows(state, T, C, W, real)
    row_k, row_v, row_phi = (
        row_of(old, x, W, source) for old, x in ((state.k, k), (state.v, v), (state.phi_k, phi_k))
    )
    far_scale = q.new_zeros(HQ, dtype=torch.float32) if far_scale is None else far_scale.float()
    far_scale = far_scale.expand(B, T, HQ)
    row_q, row_phi_q, row_scale = (row_of(None, x, W, source) for x in (q, phi_q, far_scale))
    sinkless = row_phi.where((token >= rule.sinks)[..., None, None], 0)  # sinks are read apart, and never far
    numbers = [C, W, 0, int(rule.softmax), rule.degree]
    o, den = (
        take(x, place)
        for x in row_attention(
            row_q, row_k, row_v, row_phi_q, sinkless, row_scale, offset, numbers, rule.normaliser
        )
    )

    seen, after = state.seen, state.seen + real
    begun = seen[:, None] + torch.arange(T, device=q.device)
    start = torch.div(begun, C, rounding_mode="floor") * C - (W - C)
    index = torch.arange(rule.sinks, device=q.device)
    fresh = ((index >= seen[:, None]) & (index < after[:, None]))[..., None, None]
    at = (index - seen[:, None]).clamp(0, T - 1)
    sink = [take(x, at).where(fresh, old) for x, old in ((k, state.sink_k), (v, state.sink_v))]
    o = _join_older(state.S, (q, phi_q, far_scale), sink, start, offset, rule, o.float(), den)
    o = o.where((torch.arange(T, device=q.device) < real[:, None])[..., None, None], 0)

    begin = torch.div(after, C, rounding_mode="floor") * C - (W - C)
    S = state.S + row_sums(row_k, row_v, sinkless, token < begin[:, None])
    kept = begin[:, None] + torch.arange(W, device=q.device) - token[:, :1]
    here = ((kept >= 0) & (kept < token.shape[1]))[..., None, None]
    inside = kept.clamp(0, token.shape[1] - 1)
    buffers = (take(x, inside).where(here, 0) for x in (row_k, row_v, row_phi))
    return o, PolySketchState(S, *buffers, torch.zeros_like(state.log_gate), *sink, after)


def _join_older(S, queries, sink, start, offset, rule, o, den) -> torch.Tensor:
    """o [B, T, HQ, E] with S, and the sinks before a row's start, in it as well; some queries at a time.

    den is the log of what o was divided by for softmax, 1 / that for powers.
    """
    if not rule.softmax:
        den = (-den.where(den > 0, 1).log()).where(den > 0, -torch.inf)
    nobody = [x.new_zeros(len(x), 1, 1, *x.shape[2:]) for x in sink]
    keys = (*nobody, torch.full_like(start[:, None, :1], torch.iinfo(torch.int64).max), None)
    rule, sink, parts = rule._replace(normaliser=0.0), [x.unsqueeze(1) for x in sink], []
    for some in (slice(t, t + 4 * SEGMENT) for t in range(0, o.shape[1], 4 * SEGMENT)):
        few = [x[:, None, some] for x in queries]
        position = start[:, None, some] - 1
        older, log = _read(S.unsqueeze(1), few, keys, sink, position, None, offset, rule, logs=True)
        log, mine = log[:, 0], den[:, some]
        both = torch.logaddexp(log, mine)
        both = both.where(both > -torch.inf, 0)
        shares = ((x - both).exp().unsqueeze(-1) for x in (log, mine))
        parts.append(older[:, 0] * next(shares) + o[:, some] * next(shares))
    return torch.cat(parts, 1)


def _on_triton(q, k, v, phi_q, phi_k, far_scale, offset, rule, cu_seqlens, keep_state):
    """The kernels' output, and the state that `_walk` would have left."""
    C, window = rule.block, rule.tiles * rule.block
    with torch.autocast(q.device.type, enabled=False):
        o, S = polysketch_triton(
            *(x.to(q.dtype) for x in (q, k, v, phi_q, phi_k)),
            degree=rule.degree, block=C, window=window, sinks=rule.sinks, soft=rule.softmax,
            offset=offset, far_scale=far_scale, normaliser=rule.normaliser, cu_seqlens=cu_seqlens,
            keep_state=keep_state,
        )  # fmt: skip
    if not keep_state:
        return o.to(v.dtype), None
    B, T, H, _ = k.shape
    first = T // C * C + C - window
    fill = (0, 0, 0, 0, max(-first, 0), first + window - T)
    log_gate = torch.zeros(B, window, H, device=k.device)
    buffer = (functional.pad(x[:, max(first, 0) :], fill) for x in (k, v, phi_k))
    missing = (0, 0, 0, 0, 0, max(rule.sinks - T, 0))
    sinks = (functional.pad(x[:, : rule.sinks], missing) for x in (k, v))
    seen = torch.full((B,), T, device=k.device)
    return o.to(v.dtype), PolySketchState(S, *buffer, log_gate, *sinks, seen)


def _rule(degree, block, local, window, sinks, offset, normaliser, gated) -> _Rule:
    if local not in ("power", "softmax"):
        raise ValueError(f"local is {local!r}; it must be 'power' or 'softmax'")
    if degree % 2 or degree < 2:
        raise ValueError(f"degree is {degree}; it must be even, such as 4")
    window = block if window is None else window
    if block < 1 or window < block or window % block:
        raise ValueError(f"window is {window}; it must be a multiple of block {block}, such as {2 * block}")
    if local == "softmax" and offset is not None:
        raise ValueError("offset belongs to local='power'; softmax weights take none")
    return _Rule(degree, block, window // block, local == "softmax", sinks, normaliser, gated)


def _rows(B, T, state, lengths, rule, device) -> _Layout:
    """One document a row, continued from the state's open block."""
    C, older = rule.block, (rule.tiles - 1) * rule.block
    if state is None and lengths is None:
        n, t = -(-T // C), torch.arange(T, device=device)
        position = functional.pad(t, (older, n * C - T), value=-1).expand(B, -1)
        document = torch.arange(B, device=device)[:, None].expand(B, n + rule.tiles - 1)
        first, seen = torch.full((B,), older, device=device), torch.full((B,), T, device=device)
        return _Layout(None, position, document, first, None, [(b, T // C) for b in range(B)], seen)
    before = torch.zeros(B, dtype=torch.int64, device=device) if state is None else state.seen
    lengths = torch.full((B,), T, device=device) if lengths is None else lengths.to(device)
    fill = before % C
    n = -(-(T + (0 if state is None else C - 1)) // C)
    at = torch.arange((n + rule.tiles - 1) * C, device=device).expand(B, -1)
    new = at - older - fill[:, None]  # index of the new token at a stream position; negative in the buffer
    position = before[:, None] + new
    position = torch.where((position >= 0) & (new < lengths[:, None]), position, -1)
    buffered = 0 if state is None else older + C
    source = torch.where(new < 0, at, buffered + new).where(position >= 0, buffered + T)
    document = torch.arange(B, device=device)[:, None].expand(B, n + rule.tiles - 1)
    place = fill[:, None] + torch.arange(T, device=device)
    last = list(enumerate(((fill + lengths) // C).tolist()))
    return _Layout(source, position, document, older + fill - before, place, last, before + lengths, buffered)


def _packed(cu_seqlens, T, rule) -> _Layout:
    """Documents one after another in one row, each from a tile of its own; the last tile is never full."""
    C, device = rule.block, cu_seqlens.device
    cuts = cu_seqlens.tolist()
    if cuts[0] != 0 or cuts[-1] != T or any(a > b for a, b in pairwise(cuts)):
        raise ValueError(f"cu_seqlens is {cuts}; it must run from 0 to T = {T} without decreasing")
    sizes = [b - a for a, b in pairwise(cuts)]
    tiles = [size // C + 1 for size in sizes]
    first = torch.tensor([0, *tiles], device=device).cumsum(0)
    document = torch.repeat_interleave(torch.tensor(tiles, device=device))
    document = functional.pad(document, (rule.tiles - 1, 0), value=-1)[None]
    t = torch.arange(T, device=device)
    doc = torch.repeat_interleave(torch.tensor(sizes, device=device))
    index = t - cu_seqlens.long()[doc]
    place, older = first[doc] * C + index, (rule.tiles - 1) * C
    L = document.shape[1] * C
    position = torch.full((L,), -1, device=device).scatter(0, older + place, index)[None]
    source = torch.full((L,), T, device=device).scatter(0, older + place, t)[None]
    last = [(0, start + size // C) for start, size in zip(first.tolist(), sizes)]
    seen = torch.tensor(sizes, device=device)
    return _Layout(source, position, document, older + first[:-1] * C, place[None], last, seen, packed=True)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [R, L, ...] at index [R, n] of its second dimension."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def _laid(x: torch.Tensor, buffer: torch.Tensor | None, layout: _Layout, rule: _Rule) -> torch.Tensor:
    """Tokens [B, T, ...] in stream order, [R, n + tiles - 1, C, ...], zeros where there is none."""
    if layout.source is None:
        older = (rule.tiles - 1) * rule.block
        after = layout.position.shape[1] - older - x.shape[1]
        laid = functional.pad(x, (0, 0) * (x.dim() - 2) + (older, after))
    else:
        parts = [x, torch.zeros_like(x[:, :1])]
        if layout.buffered:
            parts.insert(
                0,
                x.new_zeros(len(x), layout.buffered, *x.shape[2:]) if buffer is None else buffer.to(x.dtype),
            )
        laid = _take(torch.cat(parts, 1), layout.source)
    return laid.unflatten(1, (-1, rule.block))


def _empty(layout, k, v, phi_k, rule, sums) -> PolySketchState:
    """The state before the first token: S and the sinks for each row and document."""
    N, H, E = len(layout.seen), k.shape[2], v.shape[-1]
    S = torch.zeros(
        len(layout.position), H, num_features(phi_k.shape[-1]), E + 1, dtype=sums, device=k.device
    )
    sink_k, sink_v = (x.new_zeros(N, rule.sinks, H, x.shape[-1]) for x in (k, v))
    return PolySketchState(S, k, v, phi_k, k, sink_k, sink_v, layout.seen)


def _rows_of(layout: _Layout) -> torch.Tensor:
    return torch.tensor([row for row, _ in layout.last], device=layout.position.device)[:, None]


def _sinks(x: torch.Tensor, before: torch.Tensor, layout: _Layout) -> torch.Tensor:
    """The first tokens of each document, [N, sinks, H, size]: those of this call, else those from before."""
    index = torch.arange(before.shape[1], device=x.device)
    at = (layout.first[:, None] + index).clamp(0, layout.position.shape[1] - 1)
    here = layout.position[_rows_of(layout), at] == index
    return torch.where(here[..., None, None], x.flatten(1, 2)[_rows_of(layout), at], before.to(x.dtype))


def _buffer(keys: list[torch.Tensor], layout: _Layout, rule: _Rule) -> list[torch.Tensor]:
    """The window that ends with each document's open block, [N, W, ...]."""
    C, rows = rule.block, _rows_of(layout)
    start = torch.tensor([tile * C for _, tile in layout.last], device=rows.device)[:, None]
    at = start + torch.arange(rule.tiles * C, device=rows.device)
    inside = at.clamp(max=layout.position.shape[1] - 1)
    token = layout.position[rows, inside]
    open_block = torch.div(layout.seen, C, rounding_mode="floor")[:, None] * C
    wanted = open_block - (rule.tiles - 1) * C + torch.arange(rule.tiles * C, device=rows.device)
    here = (token == wanted) & (at == inside)
    kept = (x.flatten(1, 2)[rows, inside] for x in keys)
    return [x.masked_fill(~here.view(*here.shape, *(1,) * (x.dim() - 2)), 0) for x in kept]


def _walk(S, queries, keys, sink, offset, layout, rule):
    """Segment by segment over the tiles; o [R, n C, HQ, E] and S [N, H, F, E + 1] before each open block."""
    n, older = queries[0].shape[1], rule.tiles - 1
    document = layout.document[:, older:]
    same = layout.document.unfold(1, rule.tiles, 1) == document[..., None]
    keep = functional.pad(document[:, 1:] == document[:, :-1], (1, 0), value=True)
    position = layout.position.unflatten(1, (-1, rule.block))
    outputs, finals = [], {}
    step = max(1, SEGMENT // rule.block)
    for a in range(0, n, step):
        b = min(a + step, n)
        here = {
            d: (row, tile - a) for d, (row, tile) in enumerate(layout.last) if a <= tile < b or tile == b == n
        }
        inputs = (
            [x[:, a:b] for x in queries],
            [x[:, a : b + older] for x in (*keys, position)],
            [x[document[:, a:b]] for x in sink],
            (same[:, a:b], keep[:, a:b] if layout.packed else None),
        )
        arguments = (S, *inputs, offset, rule, list(here.values()))
        if torch.is_grad_enabled() and any(x.requires_grad for x in (S, *queries, *keys)):
            o, S, *picked = checkpoint(_segment, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            o, S, *picked = _segment(*arguments)
        outputs.append(o)
        finals.update(zip(here, picked))
    return torch.cat(outputs, 1), torch.stack([finals[d] for d in range(len(layout.last))])


def _segment(S, queries, keys, sink, masks, offset, rule, wanted):
    """n tiles: o [R, n C, HQ, E], the state after them, and the states wanted, each [H, F, E + 1]."""
    (q, phi_q, far_scale), (k, v, phi_k, gate, position), (same, keep) = queries, keys, masks
    n, C = q.shape[1], rule.block
    k, v, phi_k, gate, token = (
        torch.cat([x[:, i : i + n] for i in range(rule.tiles)], 2) for x in (k, v, phi_k, gate, position)
    )
    mine = same.repeat_interleave(C, 2)
    token = token.where(mine, -1)  # [R, n, W]
    total = _running(gate, mine) if rule.gated else None
    added, decay = _fold(phi_k, v, token, total, rule, S.dtype)
    states = []
    for i, new in enumerate(added.unbind(1)):
        if keep is not None:
            S = S.where(keep[:, i, None, None, None], 0)
        states.append(S)
        S = (S if decay is None else S * decay[:, i]) + new
    position = position[:, rule.tiles - 1 :]
    row = None if total is None else total[..., -C:]
    o = _read(
        torch.stack(states, 1), (q, phi_q, far_scale), (k, v, token, total), sink, position, row, offset, rule
    )
    ends = [*states, S]
    return (o.flatten(1, 2), S, *(ends[tile][row] for row, tile in wanted))


def _running(gate: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Sum of log gates up to each token of the window, [R, n, H, W]; in float64, for its differences."""
    return gate.double().where(mine.unsqueeze(-1), 0).cumsum(2).transpose(2, 3)


def _before_tile(total: torch.Tensor, C: int) -> torch.Tensor:
    return total[..., -C - 1] if total.shape[-1] > C else torch.zeros_like(total[..., -1])


def _with_ones(v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """v [R, n, W, H, E] to [R, n, H, W, E + 1]; the last column sums the weights."""
    return torch.cat((v, torch.ones_like(v[..., :1])), -1).to(dtype).transpose(2, 3)


def _fold(phi_k, v, token, total, rule, dtype):
    """What the oldest block of each window adds to S as its newest one ends, and what S keeps then."""
    C = rule.block
    old = (token[:, :, :C] >= rule.sinks)[:, :, None, :, None]
    left, decay = _with_ones(v[:, :, :C], dtype).where(old, 0), None
    if total is not None:
        left = left * (total[..., -1:] - total[..., :C]).exp().to(dtype)[..., None]
        decay = (total[..., -1] - _before_tile(total, C)).exp().to(dtype)[..., None, None]
    rows = features(phi_k[:, :, :C].to(dtype).transpose(2, 3), weighted=True)
    return rows.transpose(-1, -2) @ left, decay  # [R, n, H, F, E + 1], [R, n, H, 1, 1]


def _read(S, queries, keys, sink, position, row, offset, rule, logs: bool = False):
    """o [R, n, Q, HQ, E] of Q queries a tile, and with logs the log of what it was divided by, [R, n, Q, HQ].

    S [R, n, H, F, E + 1]; queries [R, n, Q, HQ, ...], their index in the document position [R, n, Q], their
    running gates row [R, n, H, Q]; keys [R, n, W, H, ...] of which token [R, n, W] is the index.
    """
    (q, phi_q, far_scale), (k, v, token, total) = queries, keys
    H = k.shape[3]
    index = torch.arange(rule.sinks, device=q.device).expand(*token.shape[:2], -1)
    column = torch.cat((index, token.where(token >= rule.sinks, torch.iinfo(torch.int64).max)), 2)
    allowed = column.unsqueeze(2) <= position.unsqueeze(3)  # [R, n, Q, sinks + W]
    exact_k = torch.cat((sink[0], k), 2).to(S.dtype).transpose(2, 3)
    exact_v = _with_ones(torch.cat((sink[1], v), 2), S.dtype)
    q, phi_q = (x.to(S.dtype).unflatten(3, (H, -1)).permute(0, 1, 3, 4, 2, 5) for x in (q, phi_q))
    far_scale = far_scale.to(S.dtype).unflatten(3, (H, -1)).permute(0, 1, 3, 4, 2)  # [R, n, H, G, Q]
    kept = None
    if total is not None:
        passed = functional.pad(row.unsqueeze(-1) - total.unsqueeze(-2), (rule.sinks, 0))
        kept = passed.where(allowed.unsqueeze(2), 0).exp().to(S.dtype).unsqueeze(3)
        before = _before_tile(total, rule.block).unsqueeze(-1)
        far_scale = far_scale + (row - before).to(S.dtype).unsqueeze(3)
    far, mass, live = _far(S, phi_q)
    score = (q.flatten(3, 4) @ exact_k.transpose(-1, -2)).unflatten(3, q.shape[3:5])
    log_far = (far_scale + mass.log()).where(live, -torch.inf)
    weight, top = _near(score, allowed[:, :, None, None], offset, log_far, rule)
    weight = weight if kept is None else weight * kept
    # the clamp matters only to a far mass below the smallest float
    factor = (far_scale - top).clamp(max=80.0).exp().where(live, 0)
    sums = (weight.flatten(3, 4) @ exact_v).unflatten(3, q.shape[3:5]) + far * factor.unsqueeze(-1)
    whole = sums[..., -1:]
    if rule.normaliser:
        whole = whole + rule.normaliser * (-top).clamp(max=80.0).exp().unsqueeze(-1)
    o = (sums[..., :-1] / whole.where(whole > 0, 1)).where(whole > 0, 0)
    o = o.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)
    if not logs:
        return o
    whole = whole[..., 0]
    log = (top + whole.where(whole > 0, 1).log()).where(whole > 0, -torch.inf)
    return o, log.permute(0, 1, 4, 2, 3).flatten(3, 4)


def _far(S: torch.Tensor, phi_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over older keys [R, n, H, G, C, E + 1], their mass, and where that mass is more than rounding.

    The true mass is never negative and at most |phi_q|^2 sum_j |phi_k_j|^2; where no key has weight, rounding
    leaves some eps times that bound, of either sign.
    """
    far = (features(phi_q.flatten(3, 4)) @ S).unflatten(3, phi_q.shape[3:5])
    mass = far[..., -1]
    with torch.no_grad():
        norms = S[..., squared_norms(phi_q.shape[-1], S.device), -1].sum(-1)[..., None, None]
        live = mass > 16 * torch.finfo(S.dtype).eps * norms * phi_q.square().sum(-1)
    return far, mass.detach().where(live, 1), live


def _near(score, allowed, offset, log_far, rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact weights, 0 where not allowed, and the log of what each row was divided by, [R, n, H, G, C]."""
    if rule.softmax:
        top = score.detach().masked_fill(~allowed, -torch.inf).amax(-1)
        top = torch.maximum(top, log_far.detach())
        top = top.where(top > -torch.inf, 0)
        return (score - top.unsqueeze(-1)).masked_fill(~allowed, -torch.inf).exp(), top
    if offset is not None:
        score = score + offset.to(score.dtype).view(score.shape[2:4])[..., None, None]
    return _power(score, rule.degree).where(allowed, 0), torch.zeros_like(score[..., 0])


def _power(x: torch.Tensor, degree: int) -> torch.Tensor:
    """x to an even power by squaring: many times faster than pow."""
    square = x * x
    if degree == 2:
        return square
    return _power(square, degree // 2) if degree % 4 == 0 else square * _power(square, degree // 2 - 1)
