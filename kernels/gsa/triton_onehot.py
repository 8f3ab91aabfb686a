"""Slot attention with one-hot writes as Triton kernels; the maths and its picture are in onehot.py.

A tile is a chunk of C tokens of one document and one key/value head. Its queries, r = token * G + head of the
group, see M owners (who stands in each slot before the chunk) and the C tokens of the chunk:

    S_rj = scale q_r . k_j + L_ij        P = exp(S - lse)        O = P V
    dV = P^T dO      dS = P (dO V^T - delta), delta_r = dO_r . O_r      dQ = scale dS K      dK = scale dS^T Q
    db_j = sum_r dS_rj

L_ij, i = r // G: for an owner its bias while i < until (the first overwrite in the chunk); for a token j <= i
of the chunk log(e^b1 + e^b2) while both its copies live (i < lo), the bias of the one that lives longer after
that (i < hi), then -inf. Kernels take logarithms to base 2.

Heads may have different numbers of slots: S in all, M the most. State and buffers hold one head's after
another's; a kernel looks up its head's number and where they begin.

An owner's gradient is a sum over all the chunks that it stands before. Each tile leaves its part in a buffer
[slots, D + E] a tile; one reverse pass over the tiles of a document turns that into

    after_c = what the chunks after c, and the final slots, ask of those who stand in the slots after c
    after_{c-1}[m] = part_c[m] + after_c[m] (if no token of c overwrites m, else 0)

and each token of chunk c takes after_c of the slots it still holds at the end of c. No atomics, and every
sum has one order.

    kernel      grid                      reads                     writes
    _lives      tiles                     write                     last, until, dies
    _owners     rows H x slots            last                      running maxima: owner, slot_bias, end_copy
    _take       documents H               end_copy, k, v            final slots
    _read       tiles x tokens x heads    q, k, v                   o, lse
    _dq         tiles x tokens x heads    q, k, v, o, do, lse       dq, delta
    _dkv slots  tiles x slots             q, k, v, do, lse, delta   part
    _after      rows H x elements         part, last                after (in place), slots' gradients
    _dkv own    tiles                     as slots, after           dk, dv, dbias
    _step       rows H                    q, k, v, slots            o, slots after one token
"""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError as error:  # a build of torch without GPUs
    raise ImportError("slot_attention: backend 'triton' needs triton; use 'torch'") from error

from unsoftmax.kernels.gsa.launch import Compiled, alike
from unsoftmax.kernels.gsa.onehot_reference import SlotState, slot_table

OPS = re.sub(r"\W", "_", __name__)  # a copy in a checkpoint's folder registers its own
SCAN = 32  # tiles of one step of the running maximum
ELEMENTS = 128  # of the buffer, in each program of the reverse pass, a warp
STEP_WARPS = 8


class Blocks(NamedTuple):
    """Sizes that the results do not depend on, but for rounding."""

    chunk: int = 64
    keys: int = 64  # in a tile of scores; divides chunk
    read_rows: int = 64  # tokens of a program of _read; divides chunk
    read_heads: int = 1  # of the group, one after another in a program; divides G
    read_warps: int = 4
    read_stages: int = 3
    dq_keys: int = 64  # the same of _dq, and its keys
    dq_rows: int = 64
    dq_heads: int = 1
    dq_warps: int = 4
    dq_stages: int = 1
    dkv_rows: int = 32  # queries, token * G + head, of a step of _dkv
    dkv_warps: int = 4
    dkv_stages: int = 3
    ahead: int = 8  # tiles that the reverse pass loads at once
    wide_parts: int = 1  # 1: the buffer is float32; 0: of the operands' dtype


def blocks_for(D: int, E: int, G: int, dtype: torch.dtype) -> Blocks:
    """What is shipped for head sizes D and E, G queries a key head."""
    size = max(D, E)
    if dtype == torch.float32:
        keys = 16 if size > 128 else 32
        return Blocks(64, keys, 32, 1, 4, 1, keys, 32, 1, 4, 1, 32, 4, 1)
    if size > 128:
        return Blocks(64, 32, 64, 1, 4, 1, 32, 64, 1, 4, 1, 32, 4, 1)
    heads = max(n for n in range(1, 9) if G % n == 0)
    return Blocks(read_heads=heads, dq_heads=heads)


def fitted(blocks: Blocks, capability: tuple[int, int]) -> Blocks:
    """`blocks` for a chip of that compute capability: but for 9 and 10, 99 KB of shared memory are enough."""
    if capability[0] in (9, 10):
        return blocks
    stages = min(blocks.dkv_stages, 2)
    return blocks._replace(read_stages=1, dq_keys=min(blocks.dq_keys, 32), dq_heads=1, dkv_stages=stages)


@functools.cache
def _shipped(D: int, E: int, G: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    blocks = blocks_for(D, E, G, dtype)
    return fitted(blocks, torch.cuda.get_device_capability(device)) if device.type == "cuda" else blocks


@triton.jit
def _tile(table, t, b, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Where tile t begins in its row, its tokens, the first tile of its document, and the document."""
    if PACKED:
        return (
            tl.load(table + 4 * t),
            tl.load(table + 4 * t + 1),
            tl.load(table + 4 * t + 2),
            tl.load(table + 4 * t + 3),
        )
    begin = t * C
    return begin, tl.minimum(T - begin, C), 0, b


@triton.jit
def _slots(heads, h, M, UNEVEN: tl.constexpr):
    """Slots of head h, and of all heads before it."""
    if UNEVEN:
        return tl.load(heads + 2 * h), tl.load(heads + 2 * h + 1)
    else:  # of another type, which a bare return may not be
        return M, h * M


@triton.jit
def _lives(
    write, bias, table, heads, last, until, dies, T, n, M, S,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BIAS: tl.constexpr, PACKED: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    """Grid [B H n]. last [B, S n]: number in the row (tile C W + ...) of the chunk's last write to a slot,
    -1 if none; until [B, S n]; dies [B H, n, C, W]: C if it holds its slot at the chunk's end, 0 if none.
    """
    pid = tl.program_id(0)
    bh, t = pid // n, pid % n
    b, h = bh // H, bh % H
    begin, count, _, _ = _tile(table, t, b, T, C, PACKED)
    order = tl.arange(0, C * W)
    base = (b.to(tl.int64) * T + begin) * H * W + h * W
    at = base + (order // W) * (H * W) + order % W
    slot = tl.load(write + at, mask=order // W < count, other=-1).to(tl.int32)
    tile = bh.to(tl.int64) * n + t
    size, lead = _slots(heads, h, M, UNEVEN)
    to = (b.to(tl.int64) * S + lead) * n + t * size
    for m0 in range(0, size, BM):
        m = m0 + tl.arange(0, BM)
        hit = slot[:, None] == m[None, :]
        latest = tl.max(tl.where(hit, order[:, None], -1), axis=0)
        first = tl.min(tl.where(hit, (order // W)[:, None], C), axis=0)
        tl.store(last + to + m, tl.where(latest >= 0, t * C * W + latest, -1), mask=m < size)
        tl.store(until + to + m, first, mask=m < size)
    later = order[:, None] > order[None, :]
    other = tl.load(write + at, mask=order // W < count, other=-1).to(tl.int32)
    end = tl.min(tl.where((slot[:, None] == other[None, :]) & later, (order // W)[:, None], C), axis=0)
    end = tl.where(other >= 0, end, 0)
    if BIAS:
        weight = tl.load(bias + at, mask=order // W < count, other=0.0)
        end = tl.where((weight == float("-inf")) & (end < C), 0, end)
        end = tl.where((weight == float("-inf")) & (end == C), -C, end)  # never read, but it holds its slot
    tl.store(dies + tile * (C * W) + order, end)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _owners(
    last, bias, state_bias, table, heads, owner, slot_bias, end_copy, T, n, M, S,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
    BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    """Grid [B H, M / BM]. owner [B, S n]: token W + w of who stands in a slot before tile t, -1 if it is the
    document's initial slot; slot_bias its bias; end_copy [N, S]: owner after a document's end.
    """
    bh = tl.program_id(0)
    b, h = bh // H, bh % H
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    size, lead = _slots(heads, h, M, UNEVEN)
    row = (b.to(tl.int64) * S + lead) * n
    carry = tl.full((BM,), -1, tl.int32)
    # a head of fewer slots has nothing to do in the later blocks
    for t0 in range(0, tl.where(tl.program_id(1) * BM < size, n + 1, 0), BT):
        t = t0 + tl.arange(0, BT)
        ok = (m < size)[None, :] & (t <= n)[:, None]
        at = row + ((t - 1) * size)[:, None] + m[None, :]
        x = tl.load(last + at, mask=ok & (t > 0)[:, None], other=-1)
        run = tl.maximum(tl.associative_scan(x, 0, _larger), carry[None, :])
        carry = tl.max(run, axis=0)
        known = tl.maximum(run, 0)
        tile = known // (C * W)
        if PACKED:
            begin = tl.load(table + 4 * tile, mask=ok, other=0)
            first = tl.load(table + 4 * t + 2, mask=t < n, other=2147483647 // (C * W))
            doc = tl.load(table + 4 * t + 3, mask=t < n, other=0)
            first_before = tl.load(table + 4 * t - 2, mask=(t > 0) & (t <= n), other=0)
            doc_before = tl.load(table + 4 * t - 1, mask=(t > 0) & (t <= n), other=0)
        else:
            begin = tile * C
            first, first_before = tl.zeros((BT,), tl.int32), tl.zeros((BT,), tl.int32)
            doc, doc_before = first + b, first + b
        copy = begin * W + known % (C * W)
        mine = run >= (first * (C * W))[:, None]
        mine = mine & (run >= 0)
        inside = ok & (t < n)[:, None]
        weight = tl.full((BT, BM), float("-inf"), tl.float32)
        if STATE:
            at = (doc.to(tl.int64) * S + lead)[:, None] + m[None, :]
            weight = tl.load(state_bias + at, mask=inside & (mine == 0), other=float("-inf"))
        if BIAS:
            at = (b.to(tl.int64) * T + copy // W) * (H * W) + h * W + copy % W
            weight = tl.where(mine, tl.load(bias + at, mask=inside & mine, other=0.0), weight)
        else:
            weight = tl.where(mine, 0.0, weight)
        at = row + (t * size)[:, None] + m[None, :]
        tl.store(owner + at, tl.where(mine, copy, -1), mask=inside)
        tl.store(slot_bias + at, weight, mask=inside)
        if PACKED:
            ends = (t > 0) & (t <= n) & (first != first_before)
        else:
            ends = (t == n) & (t > 0)
        left = (run >= (first_before * (C * W))[:, None]) & (run >= 0)
        at = (doc_before.to(tl.int64) * S + lead)[:, None] + m[None, :]
        tl.store(end_copy + at, tl.where(left, copy, -1), mask=ok & ends[:, None])


@triton.jit
def _take(
    k, v, bias, state_k, state_v, state_bias, heads, end_copy, end_k, end_v, end_bias, T, M, S,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    """Grid [N H]: the final slots of a document."""
    nh = tl.program_id(0).to(tl.int64)
    h, doc = nh % H, nh // H
    b = doc
    if PACKED:
        b = b * 0
    size, lead = _slots(heads, h, M, UNEVEN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    for m0 in range(0, size, BM):
        m = m0 + tl.arange(0, BM)
        ok, held = m < size, doc * S + lead + m
        copy = tl.load(end_copy + held, mask=ok, other=-1)
        mine = copy >= 0
        row = (b * T + copy // W) * H + h
        x = _gather(k, state_k, row, held, mine, ok, d, D, STATE)
        tl.store(end_k + held[:, None] * D + d[None, :], x, mask=ok[:, None] & (d < D)[None, :])
        x = _gather(v, state_v, row, held, mine, ok, e, E, STATE)
        tl.store(end_v + held[:, None] * E + e[None, :], x, mask=ok[:, None] & (e < E)[None, :])
        weight = tl.full((BM,), float("-inf"), tl.float32)
        if STATE:
            weight = tl.load(state_bias + held, mask=ok, other=float("-inf"))
        if BIAS:
            weight = tl.where(mine, tl.load(bias + row * W + copy % W, mask=mine, other=0.0), weight)
        else:
            weight = tl.where(mine, 0.0, weight)
        tl.store(end_bias + held, weight, mask=ok)


@triton.jit
def _gather(x, state, row, held, mine, ok, d, D: tl.constexpr, STATE: tl.constexpr):
    """Rows of x, or of the initial slots, [len(row), len(d)]; 0 where there is neither."""
    inside = (d < D)[None, :]
    found = tl.load(x + row[:, None] * D + d[None, :], mask=(ok & mine)[:, None] & inside, other=0.0)
    if STATE:
        old = tl.load(
            state + held[:, None] * D + d[None, :], mask=(ok & (mine == 0))[:, None] & inside, other=0.0
        )
        found = tl.where(mine[:, None], found, old.to(found.dtype))
    return found


@triton.jit
def _copies(dies, bias, tile_row, token_row, ok, W: tl.constexpr, BIAS: tl.constexpr):
    """lo, hi, the weight (log2) of a token until lo and then until hi, of its writes."""
    d1 = tl.load(dies + tile_row * W, mask=ok, other=0)
    b1 = tl.zeros(d1.shape, tl.float32)
    if BIAS:
        b1 = tl.load(bias + token_row * W, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
    if W == 1:
        return d1 * 0, d1, b1, b1
    else:
        d2 = tl.load(dies + tile_row * W + 1, mask=ok, other=0)
        b2 = tl.zeros(d1.shape, tl.float32)
        if BIAS:
            b2 = tl.load(bias + token_row * W + 1, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(tl.maximum(b1, b2), -1e30)  # both may be -inf
        both = top + tl.log2(tl.exp2(b1 - top) + tl.exp2(b2 - top))
        return tl.minimum(d1, d2), tl.maximum(d1, d2), both, tl.where(d1 >= d2, b1, b2)


@triton.jit
def _own_keys(
    k, v, bias, dies, tile, start, h, count, j, d, e,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """k, v, lo, hi and weights of tokens j of the chunk."""
    ok = j < count
    row = (start + j) * H + h
    y = tl.load(k + row[:, None] * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    z = tl.load(v + row[:, None] * E + e[None, :], mask=ok[:, None] & (e < E)[None, :], other=0.0)
    lo, hi, both, one = _copies(dies, bias, tile * C + j, row, ok, W, BIAS)
    return y, z, lo, hi, both, one


@triton.jit
def _slot_keys(
    k, v, state_k, state_v, owner, slot_bias, until, at, line, held, h, m, d, e, size,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """k, v, until and weight of slots m's owners; line is the first token of the row, b T; at: the tile's
    slots in owner; held: the document's in the state."""
    ok = m < size
    copy = tl.load(owner + at + m, mask=ok, other=-1)
    row = (line + copy // W) * H + h
    y = _gather(k, state_k, row, held + m, copy >= 0, ok, d, D, STATE)
    z = _gather(v, state_v, row, held + m, copy >= 0, ok, e, E, STATE)
    hi = tl.load(until + at + m, mask=ok, other=0)
    weight = tl.load(slot_bias + at + m, mask=ok, other=float("-inf")) * 1.4426950408889634
    return y, z, hi, weight


@triton.jit
def _own_weights(i, j, lo, hi, both, one, W: tl.constexpr):
    """L of token j of the chunk, for token i."""
    weight = one
    if W == 2:
        weight = tl.where(i < lo, both, one)
    return tl.where((i >= j) & (i < hi), weight, float("-inf"))


@triton.jit
def _own_block(
    k, v, bias, dies, tile, start, h, count, i, j, d, e,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """k, v and L [tokens i, tokens j] of the chunk."""
    y, z, lo, hi, both, one = _own_keys(k, v, bias, dies, tile, start, h, count, j, d, e, H, W, D, E, C, BIAS)
    i, j = i[:, None], j[None, :]
    return y, z, _own_weights(i, j, lo[None, :], hi[None, :], both[None, :], one[None, :], W)


@triton.jit
def _slot_block(
    k, v, state_k, state_v, owner, slot_bias, until, at, line, held, h, i, m, d, e, size,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """k, v of slots m's owners and L [tokens i, slots m]."""
    y, z, hi, weight = _slot_keys(
        k, v, state_k, state_v, owner, slot_bias, until, at, line, held, h, m, d, e, size, H, W, D, E, STATE
    )  # fmt: skip
    return y, z, tl.where(i[:, None] < hi[None, :], weight[None, :], float("-inf"))


@triton.jit
def _soften(s, z, top, total, acc):
    """One step of a running softmax: scores s [rows, keys], values z [keys, E]."""
    higher = tl.maximum(top, tl.max(s, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    acc = tl.dot(p.to(z.dtype), z, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(p, axis=1), acc


@triton.jit
def _soften_two(s, z, s2, z2):
    """_soften of two blocks of keys at once, from nothing."""
    top = tl.maximum(tl.max(s, axis=1), tl.max(s2, axis=1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p, p2 = tl.exp2(s - safe[:, None]), tl.exp2(s2 - safe[:, None])
    acc = tl.dot(p.to(z.dtype), z, input_precision="ieee")
    acc = tl.dot(p2.to(z.dtype), z2, acc, input_precision="ieee")
    return top, tl.sum(p, axis=1) + tl.sum(p2, axis=1), acc


@triton.jit
def _place(table, heads, n, T, M, S, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
           HB: tl.constexpr, PACKED: tl.constexpr, UNEVEN: tl.constexpr):  # fmt: skip
    """Of a program of _read or _dq: key head, tile, first token of the row and of the tile, tokens of the
    tile, where the program's tokens and heads begin in tile and group; the head's slots, and where those of
    the tile and of the state begin.
    """
    part, SPLIT = tl.program_id(0), (C // BR) * (G // HB)
    t, bh = (part // SPLIT) % n, part // (SPLIT * n)
    b = bh // H
    begin, count, _, doc = _tile(table, t, b, T, C, PACKED)
    line = b.to(tl.int64) * T
    g0, i0 = part % (G // HB) * HB, (part // (G // HB)) % (C // BR) * BR
    h = bh % H
    size, lead = _slots(heads, h, M, UNEVEN)
    at, held = (b.to(tl.int64) * S + lead) * n + t * size, doc.to(tl.int64) * S + lead
    return h, bh.to(tl.int64) * n + t, line, line + begin, count, i0, g0, size, at, held


@triton.jit
def _read(
    q, k, v, bias, state_k, state_v, table, heads, owner, slot_bias, until, dies, o, lse, scale, T, n, M, S,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, NS: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    UNEVEN: tl.constexpr,
):  # fmt: skip
    """Grid [B H n (C / BR) (G / HB)]: BR of the tile's tokens, HB heads one after another.

    A tile of queries [BR, D] of a head sees the chunk's tokens, then its owners, BN keys a step. Where a step
    is all there is of both, their keys, values and L are made once and serve every head.
    """
    h, tile, line, start, count, i0, g0, size, at, held = _place(
        table, heads, n, T, M, S, H, G, C, BR, HB, PACKED, UNEVEN
    )  # fmt: skip
    i = i0 + tl.arange(0, BR)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    factor = scale * 1.4426950408889634
    ONCE: tl.constexpr = C == BN and NS == 1
    if ONCE:
        y, z, L = _own_block(
            k, v, bias, dies, tile, start, h, count, i, tl.arange(0, BN), d, e, H, W, D, E, C, BIAS
        )  # fmt: skip
        y2, z2, L2 = _slot_block(
            k, v, state_k, state_v, owner, slot_bias, until, at, line, held, h, i, tl.arange(0, BN), d, e,
            size, H, W, D, E, STATE,
        )  # fmt: skip
    for g in range(HB):
        rows = (start + i) * (H * G) + h * G + g0 + g
        in_d, in_e = (i < count)[:, None] & (d < D)[None, :], (i < count)[:, None] & (e < E)[None, :]
        x = tl.load(q + rows[:, None] * D + d[None, :], mask=in_d, other=0.0)
        if ONCE:
            s = tl.dot(x, tl.trans(y), input_precision="ieee") * factor + L
            s2 = tl.dot(x, tl.trans(y2), input_precision="ieee") * factor + L2
            top, total, acc = _soften_two(s, z, s2, z2)
        else:
            top = tl.full((BR,), float("-inf"), tl.float32)
            total = tl.zeros((BR,), tl.float32)
            acc = tl.zeros((BR, BE), tl.float32)
            for j0 in range(0, C, BN):
                y, z, L = _own_block(
                    k, v, bias, dies, tile, start, h, count, i, j0 + tl.arange(0, BN), d, e,
                    H, W, D, E, C, BIAS,
                )  # fmt: skip
                s = tl.dot(x, tl.trans(y), input_precision="ieee") * factor + L
                top, total, acc = _soften(s, z, top, total, acc)
            for m0 in range(0, size, BN):
                y, z, L = _slot_block(
                    k, v, state_k, state_v, owner, slot_bias, until, at, line, held, h, i,
                    m0 + tl.arange(0, BN), d, e, size, H, W, D, E, STATE,
                )  # fmt: skip
                s = tl.dot(x, tl.trans(y), input_precision="ieee") * factor + L
                top, total, acc = _soften(s, z, top, total, acc)
        some = total > 0
        total = tl.where(some, total, 1.0)
        acc = acc / total[:, None]
        tl.store(o + rows[:, None] * E + e[None, :], acc.to(o.dtype.element_ty), mask=in_e)
        tl.store(lse + rows, tl.where(some, top + tl.log2(total), float("inf")), mask=i < count)


@triton.jit
def _dscores(x, g, y, z, L, norm, dot, factor):
    """dS [queries, keys] in y's dtype."""
    s = tl.dot(x, tl.trans(y), input_precision="ieee") * factor + L
    dp = tl.dot(g, tl.trans(z), input_precision="ieee") - dot[:, None]
    return (tl.exp2(s - norm[:, None]) * dp).to(y.dtype)


@triton.jit
def _dq(
    q, k, v, bias, state_k, state_v, table, heads, owner, slot_bias, until, dies,
    o, lse, do, dq, delta, scale, T, n, M, S,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, NS: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    UNEVEN: tl.constexpr,
):  # fmt: skip
    """Grid and tiles as _read. delta [B, T, HQ] float32."""
    h, tile, line, start, count, i0, g0, size, at, held = _place(
        table, heads, n, T, M, S, H, G, C, BR, HB, PACKED, UNEVEN
    )  # fmt: skip
    i = i0 + tl.arange(0, BR)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    factor = scale * 1.4426950408889634
    ONCE: tl.constexpr = C == BN and NS == 1
    if ONCE:
        y, z, L = _own_block(
            k, v, bias, dies, tile, start, h, count, i, tl.arange(0, BN), d, e, H, W, D, E, C, BIAS
        )  # fmt: skip
        y2, z2, L2 = _slot_block(
            k, v, state_k, state_v, owner, slot_bias, until, at, line, held, h, i, tl.arange(0, BN), d, e,
            size, H, W, D, E, STATE,
        )  # fmt: skip
    for head in range(HB):
        rows = (start + i) * (H * G) + h * G + g0 + head
        in_d, in_e = (i < count)[:, None] & (d < D)[None, :], (i < count)[:, None] & (e < E)[None, :]
        at_d, at_e = rows[:, None] * D + d[None, :], rows[:, None] * E + e[None, :]
        x, g = tl.load(q + at_d, mask=in_d, other=0.0), tl.load(do + at_e, mask=in_e, other=0.0)
        dot = tl.sum(tl.load(o + at_e, mask=in_e, other=0.0).to(tl.float32) * g.to(tl.float32), axis=1)
        tl.store(delta + rows, dot, mask=i < count)
        norm = tl.load(lse + rows, mask=i < count, other=float("inf"))
        acc = tl.zeros((BR, BD), tl.float32)
        if ONCE:
            acc = tl.dot(_dscores(x, g, y, z, L, norm, dot, factor), y, acc, input_precision="ieee")
            acc = tl.dot(_dscores(x, g, y2, z2, L2, norm, dot, factor), y2, acc, input_precision="ieee")
        else:
            for j0 in range(0, C, BN):
                y, z, L = _own_block(
                    k, v, bias, dies, tile, start, h, count, i, j0 + tl.arange(0, BN), d, e,
                    H, W, D, E, C, BIAS,
                )  # fmt: skip
                acc = tl.dot(_dscores(x, g, y, z, L, norm, dot, factor), y, acc, input_precision="ieee")
            for m0 in range(0, size, BN):
                y, z, L = _slot_block(
                    k, v, state_k, state_v, owner, slot_bias, until, at, line, held, h, i,
                    m0 + tl.arange(0, BN), d, e, size, H, W, D, E, STATE,
                )  # fmt: skip
                acc = tl.dot(_dscores(x, g, y, z, L, norm, dot, factor), y, acc, input_precision="ieee")
        tl.store(dq + at_d, (acc * scale).to(dq.dtype.element_ty), mask=in_d)


@triton.jit
def _standing(
    dies, write, tile, at, row, j, ok, w, W: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """When write w of tokens j ends; its row of the buffer if it stands at the chunk's end, else -1."""
    death = tl.load(dies + (tile * C + j) * W + w, mask=ok, other=0)
    slot = tl.load(write + row * W + w, mask=ok, other=0).to(tl.int32)
    return death, tl.where((death == C) | (death == -C), at + slot, -1)


@triton.jit
def _finish(
    acc, out, part, dies, write, tile, slots, row, j, ok, d,
    W: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores acc [tokens j, D] plus what later chunks ask of the slots they hold, at AT of SIZE."""
    inside = (d < D)[None, :]
    for w in tl.static_range(W):
        _, at = _standing(dies, write, tile, slots, row, j, ok, w, W, C)
        asked = part + at[:, None] * SIZE + AT + d[None, :]
        acc += tl.load(asked, mask=(at >= 0)[:, None] & inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=ok[:, None] & inside)


@triton.jit
def _dkv(
    q, k, v, bias, state_k, state_v, table, heads, owner, slot_bias, until, dies, lse, do, delta,
    write, part, part_bias, dk, dv, dbias, scale, T, n, M, S,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    KB: tl.constexpr, OWN: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
    UNEVEN: tl.constexpr,
):  # fmt: skip
    """Grid [B H n KB]: BN keys of the tile, its own (OWN) or its owners, over all its queries, BR a step.

    Scores are transposed, [keys, queries], so that no result of a dot needs to be.
    """
    pid = tl.program_id(0)
    kb, t, bh = pid % KB, (pid // KB) % n, pid // (KB * n)
    b, h = bh // H, bh % H
    begin, count, _, doc = _tile(table, t, b, T, C, PACKED)
    tile, line = bh.to(tl.int64) * n + t, b.to(tl.int64) * T
    size, lead = _slots(heads, h, M, UNEVEN)
    slots = (b.to(tl.int64) * S + lead) * n + t * size
    queries = C * G
    if UNEVEN and not OWN:  # a head of fewer slots has nothing to do in the later blocks
        queries = tl.where(kb * BN < size, queries, 0)
    j = kb * BN + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    if OWN:
        y, z, lo, hi, both, one = _own_keys(
            k, v, bias, dies, tile, line + begin, h, count, j, d, e, H, W, D, E, C, BIAS
        )
    else:
        held = doc.to(tl.int64) * S + lead
        y, z, hi, one = _slot_keys(
            k, v, state_k, state_v, owner, slot_bias, until, slots, line, held, h, j, d, e, size,
            H, W, D, E, STATE,
        )  # fmt: skip
    factor = scale * 1.4426950408889634
    acc_k, acc_v = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BE), tl.float32)
    sum_lo, sum_hi = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for r0 in range(0, queries, BR):
        r = r0 + tl.arange(0, BR)
        i, real = r // G, r < count * G
        rows = (line + begin + i) * (H * G) + h * G + r % G
        x = tl.load(q + rows[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
        g = tl.load(do + rows[:, None] * E + e[None, :], mask=real[:, None] & (e < E)[None, :], other=0.0)
        norm = tl.load(lse + rows, mask=real, other=float("inf"))
        dot = tl.load(delta + rows, mask=real, other=0.0)
        s = tl.dot(y, tl.trans(x), input_precision="ieee") * factor
        if OWN:
            early = i[None, :] < lo[:, None]
            s += _own_weights(
                i[None, :], j[:, None], lo[:, None], hi[:, None], both[:, None], one[:, None], W
            )
        else:
            s += tl.where(i[None, :] < hi[:, None], one[:, None], float("-inf"))
        p = tl.exp2(s - norm[None, :])
        acc_v = tl.dot(p.to(g.dtype), g, acc_v, input_precision="ieee")
        ds = p * (tl.dot(z, tl.trans(g), input_precision="ieee") - dot[None, :])
        acc_k = tl.dot(ds.to(x.dtype), x, acc_k, input_precision="ieee")
        if BIAS:
            if OWN and W == 2:
                sum_lo += tl.sum(tl.where(early, ds, 0.0), axis=1)
                sum_hi += tl.sum(tl.where(early, 0.0, ds), axis=1)
            else:
                sum_hi += tl.sum(ds, axis=1)
    acc_k *= scale
    if OWN:
        ok = j < count
        row = (line + begin + j) * H + h
        _finish(acc_k, dk, part, dies, write, tile, slots, row, j, ok, d, W, D, D + E, 0, C)
        _finish(acc_v, dv, part, dies, write, tile, slots, row, j, ok, e, W, E, D + E, D, C)
        if BIAS:
            for w in tl.static_range(W):
                death, at = _standing(dies, write, tile, slots, row, j, ok, w, W, C)
                found = tl.where(death > lo, sum_hi, 0.0)
                if W == 2:
                    weight = tl.load(bias + row * W + w, mask=ok, other=0.0) * 1.4426950408889634
                    found += sum_lo * tl.where((death >= lo) & (lo > 0), tl.exp2(weight - both), 0.0)
                found += tl.load(part_bias + at, mask=at >= 0, other=0.0)
                tl.store(dbias + row * W + w, found, mask=ok)
    else:
        ok = j < size
        at = slots + j
        to = part + at[:, None] * (D + E)
        tl.store(to + d[None, :], acc_k.to(part.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])
        tl.store(to + D + e[None, :], acc_v.to(part.dtype.element_ty), mask=ok[:, None] & (e < E)[None, :])
        if BIAS:
            tl.store(part_bias + at, sum_hi, mask=ok)


@triton.jit
def _bits(yes, u):
    """Rows u of `yes`, or its elements, as the bits of integers."""
    return tl.sum(tl.where(yes, 1 << u, 0), axis=0)


@triton.jit
def _walk_back(
    part, last, d_end, d_state, table, b, x, n, size, lead, S,
    SIZE: tl.constexpr, END: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Elements x of a head's slots, SIZE each: part becomes after, tile by tile from the last; the loads of U
    tiles at once."""
    u, ok = tl.arange(0, U), x < size * SIZE
    row = (b.to(tl.int64) * S + lead) * n
    groups = tl.where(tl.min(x, axis=0) < size * SIZE, tl.cdiv(n, U), 0)
    acc = tl.zeros(x.shape, tl.float32)
    for back in range(0, groups):
        t0 = (groups - 1 - back) * U
        t = t0 + u
        inside = (t < n)[:, None] & ok[None, :]
        here = row + t * size
        parts = tl.load(part + here[:, None] * SIZE + x[None, :], mask=inside, other=0.0)
        parts = parts.to(tl.float32)
        stay = tl.load(last + here[:, None] + (x // SIZE)[None, :], mask=inside, other=0) < 0
        stay = _bits(stay, u[:, None])
        if PACKED:
            first = tl.load(table + 4 * t + 2, mask=t < n, other=0)
            following = tl.load(table + 4 * t + 6, mask=t < n - 1, other=-1)
            document = tl.load(table + 4 * t + 3, mask=t < n, other=0)
        else:
            first, document = t * 0, t * 0 + b
            following = tl.where(t == n - 1, -1, 0)
        # the walk enters a document at its last tile
        opens, closes = _bits((first != following) & (t < n), u), _bits((first == t) & (t < n), u)
        for down in tl.static_range(U):
            now = U - 1 - down
            side = x
            if END or STATE:
                doc = tl.sum(tl.where(u == now, document, 0), axis=0)
                side = (doc.to(tl.int64) * S + lead) * SIZE + x
            open, kept = (x * 0 + (opens >> now & 1)) > 0, (stay >> now & 1) > 0
            start = tl.zeros(x.shape, tl.float32)
            if END:
                start = tl.load(d_end + side, mask=ok & open, other=0.0).to(tl.float32)
            acc = tl.where(open, start, acc)
            read = ok & (kept == 0) & (x * 0 + t0 + now < n)  # nobody reads the others
            tl.store(part + (row + (t0 + now) * size) * SIZE + x, acc.to(part.dtype.element_ty), mask=read)
            own = tl.sum(tl.where((u == now)[:, None], parts, 0.0), axis=0)  # one register of a thread
            acc = own + tl.where(kept, acc, 0.0)
            if STATE:
                close = (x * 0 + (closes >> now & 1)) > 0
                tl.store(d_state + side, acc.to(d_state.dtype.element_ty), mask=ok & close)


@triton.jit
def _after(
    part, part_bias, last, d_end, d_end_bias, d_state, d_state_bias, table, heads, n, M, S, blocks,
    H: tl.constexpr, SIZE: tl.constexpr, BX: tl.constexpr, BIAS: tl.constexpr,
    END: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, UNEVEN: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Grid [B H, blocks (+ more for the biases)]: the reverse pass over the tiles of a row."""
    b, block = tl.program_id(0) // H, tl.program_id(1)
    size, lead = _slots(heads, tl.program_id(0) % H, M, UNEVEN)
    if BIAS:  # noqa: SIM102  triton 3.6 compiles what stands behind a constant and a tensor
        if block >= blocks:
            y = (block - blocks) * BX + tl.arange(0, BX)
            _walk_back(
                part_bias, last, d_end_bias, d_state_bias, table, b, y, n, size, lead, S, 1,
                END, STATE, PACKED, U,
            )  # fmt: skip
    if block < blocks:
        x = block * BX + tl.arange(0, BX)
        _walk_back(part, last, d_end, d_state, table, b, x, n, size, lead, S, SIZE, END, STATE, PACKED, U)


@triton.jit
def _put(state, new, x, held, hit, ok, d, D: tl.constexpr, STATE: tl.constexpr):
    """Slots `held` with x in those that are hit, [slots, D]; stored to `new`."""
    at, inside = held[:, None] * D + d[None, :], ok[:, None] & (d < D)[None, :]
    old = tl.zeros((hit.shape[0], d.shape[0]), x.dtype)
    if STATE:
        old = tl.load(state + at, mask=inside, other=0.0)  # hit or not: it need not wait for the writes
    found = tl.where(hit[:, None], x[None, :], old)
    tl.store(new + at, found, mask=inside)
    return found


@triton.jit
def _step(
    q, k, v, write, bias, state_k, state_v, state_bias, heads, new_k, new_v, new_bias, o, scale, M, S,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BG: tl.constexpr, BM: tl.constexpr, NS: tl.constexpr,
    BIAS: tl.constexpr, STATE: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    """Grid [B H]: one token into its slots, then the read of all heads of the group, BM slots at a time."""
    bh = tl.program_id(0).to(tl.int64)
    g, d, e = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, BE)
    rows = bh * G + g
    y = tl.load(q + rows[:, None] * D + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)
    x, z = tl.load(k + bh * D + d, mask=d < D, other=0.0), tl.load(v + bh * E + e, mask=e < E, other=0.0)
    factor = scale * 1.4426950408889634
    top, total = tl.full((BG,), float("-inf"), tl.float32), tl.zeros((BG,), tl.float32)
    acc = tl.zeros((BG, BE), tl.float32)
    size, lead = _slots(heads, bh % H, M, UNEVEN)
    stop = NS * BM
    if UNEVEN:
        stop = size
    for m0 in range(0, stop, BM):
        m = m0 + tl.arange(0, BM)
        ok, held, hit = m < size, bh // H * S + lead + m, m < 0
        weight = tl.full((BM,), float("-inf"), tl.float32)
        if STATE:
            weight = tl.load(state_bias + held, mask=ok, other=float("-inf"))
        for w in tl.static_range(W):
            here = m == tl.load(write + bh * W + w).to(tl.int32)
            new = 0.0
            if BIAS:
                new = tl.load(bias + bh * W + w).to(tl.float32)
            weight = tl.where(here, new, weight)
            hit = hit | here
        tl.store(new_bias + held, weight, mask=ok)
        K = _put(state_k, new_k, x, held, hit, ok, d, D, STATE)
        V = _put(state_v, new_v, z, held, hit, ok, e, E, STATE)
        s = tl.dot(y, tl.trans(K), input_precision="ieee") * factor + (weight * 1.4426950408889634)[None, :]
        top, total, acc = _soften(s, V, top, total, acc)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at, real = rows[:, None] * E + e[None, :], (g < G)[:, None] & (e < E)[None, :]
    tl.store(o + at, acc.to(o.dtype.element_ty), mask=real)


# Launches


def _pow2(x: int) -> int:
    return max(16, 1 << (x - 1).bit_length())


def _cdiv(x: int, y: int) -> int:  # triton.cdiv takes ten microseconds
    return -(-x // y)


class _Call(NamedTuple):
    """The sizes of one call, and what was compiled for it."""

    B: int
    T: int
    H: int
    G: int
    D: int
    E: int
    W: int
    M: int  # of the head with the most
    S: int  # of all heads
    n: int
    N: int
    blocks: Blocks
    constants: tuple[int, ...]  # H, G, W, D, E, BD, BE, C: what kernels of products begin with
    compiled: Compiled


def _call(
    q: Sequence[int], v: Sequence[int], W: int, tiles: int | None, N: int, M: int, S: int, blocks
) -> _Call:
    """tiles: of packed documents."""
    (B, T, HQ, D), (H, E), sizes = q, v[2:], Blocks(*blocks)
    n = -(-T // sizes.chunk) if tiles is None else tiles
    constants = (H, HQ // H, W, D, E, _pow2(D), _pow2(E), sizes.chunk)
    return _Call(B, T, H, HQ // H, D, E, W, M, S, n, N, sizes, constants, Compiled())


_known_call = functools.lru_cache(maxsize=256)(_call)


def _call_of(q, v, write, table, num_docs: int, M: int, S: int, blocks) -> _Call:
    tiles = None if table is None else table.shape[0]
    return _known_call(q.shape, v.shape, write.shape[-1], tiles, num_docs, M, S, tuple(blocks))


def _forward(
    q, k, v, write, bias, state_k, state_v, state_bias, table, heads, num_docs, M, S, scale, keep, blocks
):
    """o, lse, the slots after the last token (if `keep`), and what backward needs: ints, slot_bias, dies."""
    c = _call_of(q, v, write, table, num_docs, M, S, blocks)
    BH, b = c.B * c.H, c.blocks
    kind = alike(q, k, v, write, bias, state_k, state_v, state_bias, table, heads)
    launch = c.compiled.launch
    BIAS, STATE, PACKED, UNEVEN = bias is not None, state_k is not None, table is not None, heads is not None
    ints = q.new_empty((3, c.B, S * c.n), dtype=torch.int32)
    last, until, owner = ints.unbind()
    dies = ints.new_empty((BH, c.n, b.chunk, c.W))
    slot_bias = q.new_empty((c.B, S * c.n), dtype=torch.float32)
    end_copy = ints.new_full((c.N, S), -1) if keep else ints.new_empty((c.N, S))
    o, lse = q.new_empty((c.B, c.T, c.H * c.G, c.E)), q.new_empty((c.B, c.T, c.H * c.G), dtype=torch.float32)
    if c.n:
        launch(
            _lives, (BH * c.n, 1, 1), kind and ("lives", kind),
            (write, bias, table, heads, last, until, dies, c.T, c.n, M, S,
             c.H, c.W, b.chunk, min(64, _pow2(M)), BIAS, PACKED, UNEVEN),
        )  # fmt: skip
        launch(
            _owners, (BH, _cdiv(M, 16), 1), kind and ("owners", kind),
            (last, bias, state_bias, table, heads, owner, slot_bias, end_copy, c.T, c.n, M, S,
             c.H, c.W, b.chunk, SCAN, 16, BIAS, STATE, PACKED, UNEVEN),
        )  # fmt: skip
        launch(
            _read, (BH * c.n * (b.chunk // b.read_rows) * (c.G // b.read_heads), 1, 1),
            kind and ("read", kind),
            (q, k, v, bias, state_k, state_v, table, heads, owner, slot_bias, until, dies, o, lse, scale, c.T,
             c.n, M, S, *c.constants, b.read_rows, b.read_heads, b.keys, _cdiv(M, b.keys),
             BIAS, STATE, PACKED, UNEVEN),
            num_warps=b.read_warps, num_stages=b.read_stages,
        )  # fmt: skip
    rest = ints, slot_bias, dies
    if not keep:
        return o, lse, None, None, None, *rest
    end_k, end_v = k.new_empty((c.N, S, c.D)), v.new_empty((c.N, S, c.E))
    end_bias = slot_bias.new_empty((c.N, S))
    if c.N:
        launch(
            _take, (c.N * c.H, 1, 1), kind and ("take", kind),
            (k, v, bias, state_k, state_v, state_bias, heads, end_copy, end_k, end_v, end_bias, c.T, M, S,
             c.H, c.W, c.D, c.E, _pow2(c.D), _pow2(c.E), 16, BIAS, STATE, PACKED, UNEVEN),
        )  # fmt: skip
    return o, lse, end_k, end_v, end_bias, *rest


def _backward(
    q, k, v, write, bias, state_k, state_v, table, heads, o, lse, ints, slot_bias, dies, do, d_end_k, d_end_v,
    d_end_bias, num_docs, M, S, scale, blocks,
):  # fmt: skip
    """dq, dk, dv, and, or None, those of bias and of the state, its k and v side by side."""
    c = _call_of(q, v, write, table, num_docs, M, S, blocks)
    BH, b, SIZE = c.B * c.H, c.blocks, c.D + c.E
    BIAS, STATE, PACKED, UNEVEN = bias is not None, state_k is not None, table is not None, heads is not None
    END, biased = d_end_k is not None, BIAS or STATE
    kind = alike(q, k, v, write, bias, state_k, state_v, table, heads, o, do, d_end_bias)
    launch = c.compiled.launch
    last, until, owner = ints.unbind()
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    dbias = lse.new_empty(write.shape) if BIAS else None
    part = q.new_empty((c.B, S * c.n, SIZE), dtype=torch.float32 if b.wide_parts else q.dtype)
    part_bias = lse.new_empty((c.B, S * c.n)) if biased else None
    ends = torch.cat((d_end_k, d_end_v), -1) if END else None
    d_state = d_state_bias = None
    if STATE:  # without tokens the slots that came are the slots that go
        d_state = lse.new_zeros((c.N, S, SIZE)) if ends is None else ends.clone()
        d_state_bias = lse.new_zeros((c.N, S)) if ends is None else d_end_bias.clone()
    if c.n:
        reads = (q, k, v, bias, state_k, state_v, table, heads, owner, slot_bias, until, dies)
        launch(
            _dq, (BH * c.n * (b.chunk // b.dq_rows) * (c.G // b.dq_heads), 1, 1), kind and ("dq", kind),
            (*reads, o, lse, do, dq, delta, scale, c.T, c.n, M, S,
             *c.constants, b.dq_rows, b.dq_heads, b.dq_keys, _cdiv(M, b.dq_keys),
             BIAS, STATE, PACKED, UNEVEN),
            num_warps=b.dq_warps, num_stages=b.dq_stages,
        )  # fmt: skip
        more = (lse, do, delta, write, part, part_bias, dk, dv, dbias, scale, c.T, c.n, M, S)
        tiles = *c.constants, b.dkv_rows, b.keys
        KB = _cdiv(M, b.keys)
        launch(
            _dkv, (BH * c.n * KB, 1, 1), kind and ("slots", kind),
            (*reads, *more, *tiles, KB, False, biased, STATE, PACKED, UNEVEN),
            num_warps=b.dkv_warps, num_stages=b.dkv_stages,
        )  # fmt: skip
        count = _cdiv(M * SIZE, ELEMENTS)
        launch(
            _after, (BH, count + (_cdiv(M, ELEMENTS) if biased else 0), 1), kind and ("after", kind),
            (part, part_bias, last, ends, d_end_bias, d_state, d_state_bias, table, heads, c.n, M, S, count,
             c.H, SIZE, ELEMENTS, biased, END, STATE, PACKED, UNEVEN, b.ahead),
            num_warps=1,
        )  # fmt: skip
        KB = _cdiv(b.chunk, b.keys)
        launch(
            _dkv, (BH * c.n * KB, 1, 1), kind and ("own", kind),
            (*reads, *more, *tiles, KB, True, BIAS, STATE, PACKED, UNEVEN),
            num_warps=b.dkv_warps, num_stages=b.dkv_stages,
        )  # fmt: skip
    return dq, dk, dv, dbias, d_state, d_state_bias


class _Slots(torch.autograd.Function):
    """The operation in eager mode: a custom operator costs Python several times as much."""

    @staticmethod
    def forward(ctx: Any, *inputs):
        q, k, v, write, bias, state_k, state_v, _, table, heads, *sizes = inputs
        o, lse, *ends, ints, slot_bias, dies = _forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.sizes = (*sizes[:4], sizes[5])
        ctx.save_for_backward(
            q, k, v, write, bias, state_k, state_v, table, heads, o, lse, ints, slot_bias, dies
        )
        return o, *ends

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, *ends):
        return _gradients(_backward, ctx, do, *ends)


def _gradients(run, ctx, do, d_end_k, d_end_v, d_end_bias) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors
    q, k, v, bias, state_k, o = *saved[:3], *saved[4:6], saved[9]
    do = torch.zeros_like(o) if do is None else do.contiguous()
    N, _, S = ctx.sizes[:3]
    ends = (d_end_k, d_end_v, d_end_bias)
    if any(x is not None for x in ends):
        shapes = (k.shape[-1:], v.shape[-1:], ())
        ends = [
            q.new_zeros((N, S, *size), dtype=torch.float32) if x is None else x.float().contiguous()
            for x, size in zip(ends, shapes)
        ]
    dq, dk, dv, dbias, d_state, d_state_bias = run(*saved, do, *ends, *ctx.sizes)
    dbias = None if bias is None else dbias
    if state_k is None:
        return dq, dk, dv, None, dbias, *(None,) * 11
    D = k.shape[-1]
    d_k, d_v = d_state[..., :D].to(k.dtype), d_state[..., D:].to(v.dtype)
    return dq, dk, dv, None, dbias, d_k, d_v, d_state_bias, *(None,) * 8


# The same as operators, which torch.compile takes as they are


def _whole(q: torch.Tensor, *given) -> tuple[torch.Tensor, ...]:
    """An operator's results are tensors, all of them."""
    return tuple(q.new_empty(0, dtype=torch.float32) if x is None else x for x in given)


_DEFINITION = "(Tensor q, Tensor k, Tensor v, Tensor write, Tensor? bias, Tensor? state_k, Tensor? state_v, "
_SIZES = "int num_docs, int most, int slots, float scale"
_four, _six, _eight = (", ".join(["Tensor"] * n) for n in (4, 6, 8))

forward_op = torch.library.custom_op(
    f"{OPS}::forward",
    lambda q, *rest: _whole(q, *_forward(q, *rest)),
    mutates_args=(),
    schema=f"{_DEFINITION}Tensor? state_bias, Tensor? table, Tensor? heads, {_SIZES}, bool keep, "
    f"int[] blocks) -> ({_eight})",
)
backward_op = torch.library.custom_op(
    f"{OPS}::backward",
    lambda q, *rest: _whole(q, *_backward(q, *rest)),
    mutates_args=(),
    schema=f"{_DEFINITION}Tensor? table, Tensor? heads, Tensor o, Tensor lse, Tensor ints, Tensor slot_bias, "
    "Tensor dies, Tensor do, Tensor? d_end_k, Tensor? d_end_v, Tensor? d_end_bias, "
    f"{_SIZES}, int[] blocks) -> ({_six})",
)


@forward_op.register_fake
def _(q, k, v, write, bias, state_k, state_v, state_bias, table, heads, num_docs, M, S, scale, keep, blocks):
    tiles = None if table is None else table.shape[0]
    c = _call(q.shape, v.shape, write.shape[-1], tiles, num_docs, M, S, blocks)
    single, ends = {"dtype": torch.float32}, [q.new_empty(0, dtype=torch.float32) for _ in range(3)]
    if keep:
        ends = k.new_empty((c.N, S, c.D)), v.new_empty((c.N, S, c.E)), q.new_empty((c.N, S), **single)
    return (
        q.new_empty((c.B, c.T, c.H * c.G, c.E)),
        q.new_empty((c.B, c.T, c.H * c.G), **single),
        *ends,
        q.new_empty((3, c.B, S * c.n), dtype=torch.int32),
        q.new_empty((c.B, S * c.n), **single),
        q.new_empty((c.B * c.H, c.n, c.blocks.chunk, c.W), dtype=torch.int32),
    )


@backward_op.register_fake
def _(q, k, v, write, bias, state_k, state_v, table, heads, o, lse, *rest):
    num_docs, _, S = rest[-5:-2]
    state = (num_docs, S) if state_k is not None else (0,)
    wide = (*state, k.shape[3] + v.shape[3]) if state_k is not None else (0,)
    return (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        lse.new_empty(write.shape if bias is not None else (0,)),
        lse.new_empty(wide),
        lse.new_empty(state),
    )


def _setup(ctx, inputs, output) -> None:
    q, k, v, write, bias, state_k, state_v, _, table, heads, *sizes = inputs
    o, lse, _, _, _, ints, slot_bias, dies = output
    ctx.sizes = (*sizes[:4], sizes[5])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, ints, slot_bias, dies)
    ctx.save_for_backward(q, k, v, write, bias, state_k, state_v, table, heads, o, lse, ints, slot_bias, dies)


def _operator_gradients(ctx, do, _lse, d_end_k, d_end_v, d_end_bias, *_):
    return _gradients(backward_op, ctx, do, d_end_k, d_end_v, d_end_bias)


forward_op.register_autograd(_operator_gradients, setup_context=_setup)


def slot_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    write: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: tuple[int, ...],
    scale: float,
    state: SlotState | None,
    cu_seqlens: torch.Tensor | None,
    keep_state: bool = True,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, SlotState | None]:
    """slot_attention of onehot.py, for float32, float16 and bfloat16 and head sizes up to 256.

    sizes: slots of each head. Autocast casts q, k and v to its dtype; else they go to the widest of theirs.
    """
    D, E, G, out = q.shape[-1], v.shape[-1], q.shape[2] // k.shape[2], (k.dtype, v.dtype)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    elif q.dtype == k.dtype == v.dtype:
        dtype = q.dtype
    else:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if q.device.type == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float32  # Triton's interpreter has no bfloat16
    q, k, v = _plain(q, dtype), _plain(k, dtype), _plain(v, dtype)
    write = write.contiguous()
    bias = None if bias is None else _plain(bias, torch.float32)
    held: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)
    if state is not None:
        held = _plain(state.k, dtype), _plain(state.v, dtype), _plain(state.bias, torch.float32)
    M, S, scale = max(sizes), sum(sizes), float(scale)
    heads = slot_table(sizes, q.device) if min(sizes) < M else None
    compiling, learns = torch.compiler.is_compiling(), _needs_grad(q, k, v, bias, *held)
    if q.shape[1] == 1 and cu_seqlens is None and not learns:
        run = step_op if compiling else _one_step
        o, *end = run(q, k, v, write, bias, *held, heads, M, S, scale)
        return _in_dtypes(o, end if keep_state else None, out)
    blocks = blocks or _shipped(D, E, G, dtype, q.device)
    table, N = None, len(q)
    if cu_seqlens is not None:
        table, N = _known_table(cu_seqlens, blocks.chunk), len(cu_seqlens) - 1
    inputs = (q, k, v, write, bias, *held, table, heads, N, M, S, scale, keep_state)
    if compiling:
        o, _, *end = forward_op(*inputs, list(blocks))[:5]
    elif learns:
        o, *end = _Slots.apply(*inputs, blocks)
    else:
        o, _, *end = _forward(*inputs, blocks)[:5]
    return _in_dtypes(o, end if keep_state else None, out)


def _plain(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype != dtype:
        x = x.to(dtype)
    return x.contiguous()


def _in_dtypes(o, end, out: tuple[torch.dtype, torch.dtype]) -> tuple[torch.Tensor, SlotState | None]:
    o = o if o.dtype == out[1] else o.to(out[1])
    return o, None if end is None else SlotState(end[0].to(out[0]), end[1].to(out[1]), end[2])


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _known_table(cu_seqlens: torch.Tensor, C: int) -> torch.Tensor:
    """tile_table, looked up where an earlier layer made it."""
    if torch.compiler.is_compiling() or cu_seqlens.is_inference():
        return tile_table(cu_seqlens, C)
    key = (C, cu_seqlens._version)
    seen = getattr(cu_seqlens, "_tiles", None)
    if seen is None or seen[0] != key:
        seen = cu_seqlens._tiles = key, tile_table(cu_seqlens, C)  # type: ignore[attr-defined]
    return seen[1]


def tile_table(cu_seqlens: torch.Tensor, C: int) -> torch.Tensor:
    """[tiles, 4] int32: the first token of each tile, its tokens, its document's first tile, its document."""
    rows, ends = [], cu_seqlens.tolist()
    for doc, (a, b) in enumerate(itertools.pairwise(ends)):
        first = len(rows)
        rows += [(at, min(C, b - at), first, doc) for at in range(a, b, C)]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 4).to(cu_seqlens.device)


def _one_step(q, k, v, write, bias, state_k, state_v, state_bias, heads, M, S, scale):
    (B, _, HQ, D), (H, E) = q.shape, v.shape[2:]
    o, new_k, new_v = q.new_empty((B, 1, HQ, E)), k.new_empty((B, S, D)), v.new_empty((B, S, E))
    new_bias, G, W = q.new_empty((B, S), dtype=torch.float32), HQ // H, write.shape[-1]
    BM = min(_pow2(M), blocks_for(D, E, G, q.dtype).keys)
    kind = alike(q, k, v, write, bias, state_k, state_v, state_bias, heads)
    _steps.launch(
        _step, (B * H, 1, 1), kind and (kind, H, G, W, D, E, M, S, STEP_WARPS),
        (q, k, v, write, bias, state_k, state_v, state_bias, heads, new_k, new_v, new_bias, o, scale, M, S,
         H, G, W, D, E, _pow2(D), _pow2(E), _pow2(G), BM, _cdiv(M, BM), bias is not None,
         state_k is not None, heads is not None),
        num_warps=STEP_WARPS, num_stages=1,
    )  # fmt: skip
    return o, new_k, new_v, new_bias


_steps = Compiled()
step_op = torch.library.custom_op(
    f"{OPS}::step",
    _one_step,
    mutates_args=(),
    schema=f"{_DEFINITION}Tensor? state_bias, Tensor? heads, int most, int slots, float scale) -> ({_four})",
)


@step_op.register_fake
def _(q, k, v, write, bias, state_k, state_v, state_bias, heads, M, S, scale):
    (B, _, HQ, D), E = q.shape, v.shape[3]
    new = (k.new_empty((B, S, D)), v.new_empty((B, S, E)), q.new_empty((B, S), dtype=torch.float32))
    return q.new_empty((B, 1, HQ, E)), *new
