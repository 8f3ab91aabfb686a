"""Slot attention with one-hot writes as Triton kernels; the maths and its picture are in onehot.py.

A tile is a chunk of C tokens of one document and one key/value head. Its queries, r = token * G + head of the
group, see M owners (who stands in each slot before the chunk) and the C tokens of the chunk:

    S_rj = scale q_r . k_j + L_ij        P = exp(S - lse)        O = P V
    dV = P^T dO      dS = P (dO V^T - delta), delta_r = dO_r . O_r      dQ = scale dS K      dK = scale dS^T Q
    db_j = sum_r dS_rj

L_ij, i = r // G: for an owner its bias while i < until (the first overwrite in the chunk); for a token j <= i
of the chunk log(e^b1 + e^b2) while both its copies live (i < lo), the bias of the one that lives longer after
that (i < hi), then -inf. Kernels take logarithms to base 2.

An owner's gradient is a sum over all the chunks that it stands before. Each tile leaves its part in a buffer
[tiles, M, D + E]; one reverse pass over the tiles of a document turns that into

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

import itertools
import re
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # a build of torch without GPUs
    raise ImportError("slot_attention: backend 'triton' needs triton; use 'torch'") from error

from unsoftmax.kernels.gsa.onehot_reference import SlotState

OPS = re.sub(r"\W", "_", __name__)  # a copy in a checkpoint's folder registers its own
SCAN = 32  # tiles of one step of the running maximum
ELEMENTS = 128  # of the buffer, in each program of the reverse pass, a warp
STEP_WARPS = 4


class Blocks(NamedTuple):
    """Sizes that the results do not depend on, but for rounding."""

    chunk: int = 64
    keys: int = 64  # in a tile of scores; divides chunk
    read_rows: int = 64  # tokens of a program of _read; divides chunk
    read_heads: int = 1  # of the group, one after another in a program; divides G
    read_warps: int = 4
    read_stages: int = 1
    dq_keys: int = 64  # the same of _dq, and its keys
    dq_rows: int = 64
    dq_heads: int = 1
    dq_warps: int = 4
    dq_stages: int = 1
    dkv_rows: int = 32  # queries, token * G + head, of a step of _dkv
    dkv_warps: int = 4
    dkv_stages: int = 2
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
    return blocks._replace(dq_keys=min(blocks.dq_keys, 32), dq_heads=1)


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
def _lives(
    write, bias, table, last, until, dies, T, n, M,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BIAS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid [B H n]. last [B H, n, M]: number in the row (tile C W + ...) of the chunk's last write to a slot,
    -1 if none; until [B H, n, M]; dies [B H, n, C, W]: C if it holds its slot at the chunk's end, 0 if none.
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
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        hit = slot[:, None] == m[None, :]
        latest = tl.max(tl.where(hit, order[:, None], -1), axis=0)
        first = tl.min(tl.where(hit, (order // W)[:, None], C), axis=0)
        tl.store(last + tile * M + m, tl.where(latest >= 0, t * C * W + latest, -1), mask=m < M)
        tl.store(until + tile * M + m, first, mask=m < M)
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
    last, bias, state_bias, table, owner, slot_bias, end_copy, T, n, M,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
    BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid [B H, slots / BM]. owner [B H, n, M]: token W + w of who stands in a slot before tile t, -1 if it
    is the document's initial slot; slot_bias its bias; end_copy [N, H, M]: owner after a document's end.
    """
    bh = tl.program_id(0)
    b, h = bh // H, bh % H
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = bh.to(tl.int64) * n
    carry = tl.full((BM,), -1, tl.int32)
    for t0 in range(0, n + 1, BT):
        t = t0 + tl.arange(0, BT)
        ok = (m < M)[None, :] & (t <= n)[:, None]
        x = tl.load(last + (row + t - 1)[:, None] * M + m[None, :], mask=ok & (t > 0)[:, None], other=-1)
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
            at = (doc.to(tl.int64) * H + h)[:, None] * M + m[None, :]
            weight = tl.load(state_bias + at, mask=inside & (mine == 0), other=float("-inf"))
        if BIAS:
            at = (b.to(tl.int64) * T + copy // W) * (H * W) + h * W + copy % W
            weight = tl.where(mine, tl.load(bias + at, mask=inside & mine, other=0.0), weight)
        else:
            weight = tl.where(mine, 0.0, weight)
        at = (row + t)[:, None] * M + m[None, :]
        tl.store(owner + at, tl.where(mine, copy, -1), mask=inside)
        tl.store(slot_bias + at, weight, mask=inside)
        if PACKED:
            ends = (t > 0) & (t <= n) & (first != first_before)
        else:
            ends = (t == n) & (t > 0)
        left = (run >= (first_before * (C * W))[:, None]) & (run >= 0)
        at = (doc_before.to(tl.int64) * H + h)[:, None] * M + m[None, :]
        tl.store(end_copy + at, tl.where(left, copy, -1), mask=ok & ends[:, None])


@triton.jit
def _take(
    k, v, bias, state_k, state_v, state_bias, end_copy, end_k, end_v, end_bias, T, M,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid [N H]: the final slots of a document."""
    nh = tl.program_id(0).to(tl.int64)
    h = nh % H
    b = nh // H
    if PACKED:
        b = b * 0
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        ok = m < M
        copy = tl.load(end_copy + nh * M + m, mask=ok, other=-1)
        mine = copy >= 0
        row = (b * T + copy // W) * H + h
        held = nh * M + m
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
    k, v, state_k, state_v, owner, slot_bias, until, tile, line, held, h, m, d, e, M,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """k, v, until and weight of slots m's owners; line is the first token of the row, b T."""
    ok = m < M
    copy = tl.load(owner + tile * M + m, mask=ok, other=-1)
    row = (line + copy // W) * H + h
    y = _gather(k, state_k, row, held + m, copy >= 0, ok, d, D, STATE)
    z = _gather(v, state_v, row, held + m, copy >= 0, ok, e, E, STATE)
    hi = tl.load(until + tile * M + m, mask=ok, other=0)
    weight = tl.load(slot_bias + tile * M + m, mask=ok, other=float("-inf")) * 1.4426950408889634
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
    k, v, state_k, state_v, owner, slot_bias, until, tile, line, held, h, i, m, d, e, M,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """k, v of slots m's owners and L [tokens i, slots m]."""
    y, z, hi, weight = _slot_keys(
        k, v, state_k, state_v, owner, slot_bias, until, tile, line, held, h, m, d, e, M, H, W, D, E, STATE
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
def _place(table, n, T, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
           HB: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Of a program of _read or _dq: key head, tile, first token of the row and of the tile, tokens of the
    tile, its document, and where the program's tokens and heads begin in tile and group.
    """
    part, SPLIT = tl.program_id(0), (C // BR) * (G // HB)
    t, bh = (part // SPLIT) % n, part // (SPLIT * n)
    b = bh // H
    begin, count, _, doc = _tile(table, t, b, T, C, PACKED)
    line = b.to(tl.int64) * T
    g0, i0 = part % (G // HB) * HB, (part // (G // HB)) % (C // BR) * BR
    return bh % H, bh.to(tl.int64) * n + t, line, line + begin, count, doc, i0, g0


@triton.jit
def _read(
    q, k, v, bias, state_k, state_v, table, owner, slot_bias, until, dies, o, lse, scale, T, n, M,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, NS: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid [B H n (C / BR) (G / HB)]: BR of the tile's tokens, HB heads one after another.

    A tile of queries [BR, D] of a head sees the chunk's tokens, then its owners, BN keys a step. Where a step
    is all there is of both, their keys, values and L are made once and serve every head.
    """
    h, tile, line, start, count, doc, i0, g0 = _place(table, n, T, H, G, C, BR, HB, PACKED)
    held = (doc.to(tl.int64) * H + h) * M
    i = i0 + tl.arange(0, BR)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    factor = scale * 1.4426950408889634
    ONCE: tl.constexpr = C == BN and NS == 1
    if ONCE:
        y, z, L = _own_block(
            k, v, bias, dies, tile, start, h, count, i, tl.arange(0, BN), d, e, H, W, D, E, C, BIAS
        )  # fmt: skip
        y2, z2, L2 = _slot_block(
            k, v, state_k, state_v, owner, slot_bias, until, tile, line, held, h, i, tl.arange(0, BN), d, e,
            M, H, W, D, E, STATE,
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
            for m0 in range(0, NS * BN, BN):
                y, z, L = _slot_block(
                    k, v, state_k, state_v, owner, slot_bias, until, tile, line, held, h, i,
                    m0 + tl.arange(0, BN), d, e, M, H, W, D, E, STATE,
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
    q, k, v, bias, state_k, state_v, table, owner, slot_bias, until, dies,
    o, lse, do, dq, delta, scale, T, n, M,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, HB: tl.constexpr,
    BN: tl.constexpr, NS: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid and tiles as _read. delta [B, T, HQ] float32."""
    h, tile, line, start, count, doc, i0, g0 = _place(table, n, T, H, G, C, BR, HB, PACKED)
    held = (doc.to(tl.int64) * H + h) * M
    i = i0 + tl.arange(0, BR)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    factor = scale * 1.4426950408889634
    ONCE: tl.constexpr = C == BN and NS == 1
    if ONCE:
        y, z, L = _own_block(
            k, v, bias, dies, tile, start, h, count, i, tl.arange(0, BN), d, e, H, W, D, E, C, BIAS
        )  # fmt: skip
        y2, z2, L2 = _slot_block(
            k, v, state_k, state_v, owner, slot_bias, until, tile, line, held, h, i, tl.arange(0, BN), d, e,
            M, H, W, D, E, STATE,
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
            for m0 in range(0, NS * BN, BN):
                y, z, L = _slot_block(
                    k, v, state_k, state_v, owner, slot_bias, until, tile, line, held, h, i,
                    m0 + tl.arange(0, BN), d, e, M, H, W, D, E, STATE,
                )  # fmt: skip
                acc = tl.dot(_dscores(x, g, y, z, L, norm, dot, factor), y, acc, input_precision="ieee")
        tl.store(dq + at_d, (acc * scale).to(dq.dtype.element_ty), mask=in_d)


@triton.jit
def _standing(
    dies, write, tile, row, j, ok, w, M, W: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """When write w of tokens j ends; its row of the buffer if it stands at the chunk's end, else -1."""
    death = tl.load(dies + (tile * C + j) * W + w, mask=ok, other=0)
    slot = tl.load(write + row * W + w, mask=ok, other=0).to(tl.int32)
    return death, tl.where((death == C) | (death == -C), tile * M + slot, -1)


@triton.jit
def _finish(
    acc, out, part, dies, write, tile, row, j, ok, d, M,
    W: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, AT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores acc [tokens j, D] plus what later chunks ask of the slots they hold, at AT of SIZE."""
    inside = (d < D)[None, :]
    for w in tl.static_range(W):
        _, at = _standing(dies, write, tile, row, j, ok, w, M, W, C)
        asked = part + at[:, None] * SIZE + AT + d[None, :]
        acc += tl.load(asked, mask=(at >= 0)[:, None] & inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=ok[:, None] & inside)


@triton.jit
def _dkv(
    q, k, v, bias, state_k, state_v, table, owner, slot_bias, until, dies, lse, do, delta,
    write, part, part_bias, dk, dv, dbias, scale, T, n, M,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    KB: tl.constexpr, OWN: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid [B H n KB]: BN keys of the tile, its own (OWN) or its owners, over all its queries, BR a step.

    Scores are transposed, [keys, queries], so that no result of a dot needs to be.
    """
    pid = tl.program_id(0)
    kb, t, bh = pid % KB, (pid // KB) % n, pid // (KB * n)
    b, h = bh // H, bh % H
    begin, count, _, doc = _tile(table, t, b, T, C, PACKED)
    tile, line = bh.to(tl.int64) * n + t, b.to(tl.int64) * T
    j = kb * BN + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    if OWN:
        y, z, lo, hi, both, one = _own_keys(
            k, v, bias, dies, tile, line + begin, h, count, j, d, e, H, W, D, E, C, BIAS
        )
    else:
        held = (doc.to(tl.int64) * H + h) * M
        y, z, hi, one = _slot_keys(
            k, v, state_k, state_v, owner, slot_bias, until, tile, line, held, h, j, d, e, M,
            H, W, D, E, STATE,
        )  # fmt: skip
    factor = scale * 1.4426950408889634
    acc_k, acc_v = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BE), tl.float32)
    sum_lo, sum_hi = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for r0 in range(0, C * G, BR):
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
        _finish(acc_k, dk, part, dies, write, tile, row, j, ok, d, M, W, D, D + E, 0, C)
        _finish(acc_v, dv, part, dies, write, tile, row, j, ok, e, M, W, E, D + E, D, C)
        if BIAS:
            for w in tl.static_range(W):
                death, at = _standing(dies, write, tile, row, j, ok, w, M, W, C)
                found = tl.where(death > lo, sum_hi, 0.0)
                if W == 2:
                    weight = tl.load(bias + row * W + w, mask=ok, other=0.0) * 1.4426950408889634
                    found += sum_lo * tl.where((death >= lo) & (lo > 0), tl.exp2(weight - both), 0.0)
                found += tl.load(part_bias + at, mask=at >= 0, other=0.0)
                tl.store(dbias + row * W + w, found, mask=ok)
    else:
        ok = j < M
        at = tile * M + j
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
    part, last, d_end, d_state, table, bh, x, n, M,
    H: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr, STATE: tl.constexpr,
    PACKED: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Elements x of M SIZE: part becomes after, tile by tile from the last; the loads of U tiles at once."""
    b, h = bh // H, bh % H
    u, ok = tl.arange(0, U), x < M * SIZE
    row, groups = bh.to(tl.int64) * n, tl.cdiv(n, U)
    acc = tl.zeros(x.shape, tl.float32)
    for back in range(0, groups):
        t0 = (groups - 1 - back) * U
        t = t0 + u
        inside = (t < n)[:, None] & ok[None, :]
        parts = tl.load(part + (row + t)[:, None] * M * SIZE + x[None, :], mask=inside, other=0.0)
        parts = parts.to(tl.float32)
        stay = tl.load(last + (row + t)[:, None] * M + (x // SIZE)[None, :], mask=inside, other=0) < 0
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
                side = (doc.to(tl.int64) * H + h) * M * SIZE + x
            open, kept = (x * 0 + (opens >> now & 1)) > 0, (stay >> now & 1) > 0
            start = tl.zeros(x.shape, tl.float32)
            if END:
                start = tl.load(d_end + side, mask=ok & open, other=0.0).to(tl.float32)
            acc = tl.where(open, start, acc)
            read = ok & (kept == 0) & (x * 0 + t0 + now < n)  # nobody reads the others
            tl.store(part + (row + t0 + now) * M * SIZE + x, acc.to(part.dtype.element_ty), mask=read)
            own = tl.sum(tl.where((u == now)[:, None], parts, 0.0), axis=0)  # one register of a thread
            acc = own + tl.where(kept, acc, 0.0)
            if STATE:
                close = (x * 0 + (closes >> now & 1)) > 0
                tl.store(d_state + side, acc.to(d_state.dtype.element_ty), mask=ok & close)


@triton.jit
def _after(
    part, part_bias, last, d_end, d_end_bias, d_state, d_state_bias, table, n, M, blocks,
    H: tl.constexpr, SIZE: tl.constexpr, BX: tl.constexpr, BIAS: tl.constexpr,
    END: tl.constexpr, STATE: tl.constexpr, PACKED: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Grid [B H, blocks (+ more for the biases)]: the reverse pass over the tiles of a row."""
    bh, block = tl.program_id(0), tl.program_id(1)
    if block < blocks:
        x = block * BX + tl.arange(0, BX)
        _walk_back(part, last, d_end, d_state, table, bh, x, n, M, H, SIZE, END, STATE, PACKED, U)
    else:
        x = (block - blocks) * BX + tl.arange(0, BX)
        _walk_back(part_bias, last, d_end_bias, d_state_bias, table, bh, x, n, M, H, 1, END, STATE, PACKED, U)


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
    q, k, v, write, bias, state_k, state_v, state_bias, new_k, new_v, new_bias, o, scale, M,
    H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BG: tl.constexpr, BM: tl.constexpr, NS: tl.constexpr,
    BIAS: tl.constexpr, STATE: tl.constexpr,
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
    for m0 in range(0, NS * BM, BM):
        m = m0 + tl.arange(0, BM)
        ok, held, hit = m < M, bh * M + m, m < 0
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
    return max(16, triton.next_power_of_2(x))


class _Call(NamedTuple):
    """The sizes of one call."""

    B: int
    T: int
    H: int
    G: int
    D: int
    E: int
    W: int
    M: int
    n: int
    N: int
    blocks: Blocks

    @property
    def sizes(self) -> dict[str, int]:
        D, E = self.D, self.E
        return {
            "H": self.H,
            "G": self.G,
            "W": self.W,
            "D": D,
            "E": E,
            "BD": _pow2(D),
            "BE": _pow2(E),
            "C": self.blocks.chunk,
        }


def _call(q, k, v, write, table, num_docs: int, M: int, blocks: list[int]) -> _Call:
    (B, T, HQ, D), (H, E), sizes = q.shape, v.shape[2:], Blocks(*blocks)
    n = -(-T // sizes.chunk) if table is None else len(table)
    return _Call(B, T, H, HQ // H, D, E, write.shape[-1], M, n, num_docs, sizes)


def _forward(q, k, v, write, bias, state_k, state_v, state_bias, table, num_docs, M, scale, blocks):
    c = _call(q, k, v, write, table, num_docs, M, blocks)
    BH, s = c.B * c.H, c.blocks
    ints = q.new_empty((3, BH, c.n, M), dtype=torch.int32)
    last, until, owner = ints.unbind()
    dies = ints.new_empty((BH, c.n, s.chunk, c.W))
    slot_bias = q.new_empty((BH, c.n, M), dtype=torch.float32)
    end_copy = ints.new_full((c.N, c.H, M), -1)
    flags = {"BIAS": bias is not None, "PACKED": table is not None}
    some = {"STATE": state_k is not None}
    head = {"H": c.H, "W": c.W, "C": s.chunk}
    slots = min(64, _pow2(M))
    o, lse = q.new_empty((c.B, c.T, c.H * c.G, c.E)), q.new_empty((c.B, c.T, c.H * c.G), dtype=torch.float32)
    if c.n:
        _lives[(BH * c.n,)](write, bias, table, last, until, dies, c.T, c.n, M, BM=slots, **head, **flags)
        _owners[(BH, triton.cdiv(M, 16))](
            last, bias, state_bias, table, owner, slot_bias, end_copy, c.T, c.n, M,
            BT=SCAN, BM=16, **head, **flags, **some,
        )  # fmt: skip
        _read[(BH * c.n * (s.chunk // s.read_rows) * (c.G // s.read_heads),)](
            q, k, v, bias, state_k, state_v, table, owner, slot_bias, until, dies, o, lse, scale, c.T, c.n, M,
            BR=s.read_rows, HB=s.read_heads, BN=s.keys, NS=triton.cdiv(M, s.keys), **c.sizes, **flags, **some,
            num_warps=s.read_warps, num_stages=s.read_stages,
        )  # fmt: skip
    end_k, end_v = k.new_empty((c.N, c.H, M, c.D)), v.new_empty((c.N, c.H, M, c.E))
    end_bias = slot_bias.new_empty((c.N, c.H, M))
    sizes = {name: x for name, x in c.sizes.items() if name not in ("G", "C")}
    _take[(c.N * c.H,)](
        k, v, bias, state_k, state_v, state_bias, end_copy, end_k, end_v, end_bias, c.T, M,
        BM=16, **sizes, **flags, **some,
    )  # fmt: skip
    return o, lse, end_k, end_v, end_bias, ints, slot_bias, dies


def _backward(
    q, k, v, write, bias, state_k, state_v, table, o, lse, ints, slot_bias, dies, do, d_end_k, d_end_v,
    d_end_bias, num_docs, M, scale, blocks,
):  # fmt: skip
    c = _call(q, k, v, write, table, num_docs, M, blocks)
    BH, s = c.B * c.H, c.blocks
    if q.is_cuda:
        s = fitted(s, torch.cuda.get_device_capability(q.device))
    last, until, owner = ints.unbind()
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    dbias = lse.new_empty(write.shape if bias is not None else (0,))
    part = q.new_empty((BH, c.n, M, c.D + c.E), dtype=torch.float32 if s.wide_parts else q.dtype)
    biased = bias is not None or state_k is not None
    part_bias = lse.new_empty((BH, c.n, M) if biased else (0,))
    state = state_k is not None
    ends = torch.cat((d_end_k, d_end_v), -1) if d_end_k is not None else None
    # Without tokens the slots that came are the slots that go.
    d_state = part.new_empty((c.N, c.H, M, c.D + c.E) if state else (0,), dtype=torch.float32)
    d_state_bias = lse.new_empty((c.N, c.H, M) if state else (0,))
    if state:
        d_state.copy_(0 if ends is None else ends)
        d_state_bias.copy_(0 if d_end_bias is None else d_end_bias)
    if c.n:
        flags = {"BIAS": bias is not None, "STATE": state, "PACKED": table is not None}
        reads = (q, k, v, bias, state_k, state_v, table, owner, slot_bias, until, dies)
        _dq[(BH * c.n * (s.chunk // s.dq_rows) * (c.G // s.dq_heads),)](
            *reads, o, lse, do, dq, delta, scale, c.T, c.n, M,
            BR=s.dq_rows, HB=s.dq_heads, BN=s.dq_keys, NS=triton.cdiv(M, s.dq_keys), **c.sizes, **flags,
            num_warps=s.dq_warps, num_stages=s.dq_stages,
        )  # fmt: skip
        more = (lse, do, delta, write, part, part_bias, dk, dv, dbias, scale, c.T, c.n, M)
        tiles = {
            "BR": s.dkv_rows,
            "BN": s.keys,
            "num_warps": s.dkv_warps,
            "num_stages": s.dkv_stages,
            **c.sizes,
        }
        KB = triton.cdiv(M, s.keys)
        _dkv[(BH * c.n * KB,)](*reads, *more, KB=KB, OWN=False, **tiles, **flags | {"BIAS": biased})
        count = triton.cdiv(M * (c.D + c.E), ELEMENTS)
        _after[(BH, count + (triton.cdiv(M, ELEMENTS) if biased else 0))](
            part, part_bias, last, ends, d_end_bias, d_state, d_state_bias, table, c.n, M, count,
            H=c.H, SIZE=c.D + c.E, BX=ELEMENTS, BIAS=biased, END=ends is not None, STATE=state,
            PACKED=table is not None, U=s.ahead, num_warps=1,
        )  # fmt: skip
        KB = triton.cdiv(s.chunk, s.keys)
        _dkv[(BH * c.n * KB,)](*reads, *more, KB=KB, OWN=True, **tiles, **flags)
    return dq, dk, dv, dbias, d_state, d_state_bias


_DEFINITION = "(Tensor q, Tensor k, Tensor v, Tensor write, Tensor? bias, Tensor? state_k, Tensor? state_v, "
_SIZES = "int num_docs, int num_slots, float scale, int[] blocks) -> "
_four, _six, _eight = (", ".join(["Tensor"] * n) for n in (4, 6, 8))

forward_op = torch.library.custom_op(
    f"{OPS}::forward",
    _forward,
    mutates_args=(),
    schema=f"{_DEFINITION}Tensor? state_bias, Tensor? table, {_SIZES}({_eight})",
)
backward_op = torch.library.custom_op(
    f"{OPS}::backward",
    _backward,
    mutates_args=(),
    schema=f"{_DEFINITION}Tensor? table, Tensor o, Tensor lse, Tensor ints, Tensor slot_bias, Tensor dies, "
    f"Tensor do, Tensor? d_end_k, Tensor? d_end_v, Tensor? d_end_bias, {_SIZES}({_six})",
)


@forward_op.register_fake
def _(q, k, v, write, bias, state_k, state_v, state_bias, table, num_docs, num_slots, scale, blocks):
    c = _call(q, k, v, write, table, num_docs, num_slots, blocks)
    BH, M = c.B * c.H, num_slots
    return (
        q.new_empty((c.B, c.T, c.H * c.G, c.E)),
        q.new_empty((c.B, c.T, c.H * c.G), dtype=torch.float32),
        k.new_empty((c.N, c.H, M, c.D)),
        v.new_empty((c.N, c.H, M, c.E)),
        q.new_empty((c.N, c.H, M), dtype=torch.float32),
        q.new_empty((3, BH, c.n, M), dtype=torch.int32),
        q.new_empty((BH, c.n, M), dtype=torch.float32),
        q.new_empty((BH, c.n, c.blocks.chunk, c.W), dtype=torch.int32),
    )


@backward_op.register_fake
def _(q, k, v, write, bias, state_k, state_v, table, o, lse, *rest):
    num_docs, M = rest[-4:-2]
    state = (num_docs, k.shape[2], M) if state_k is not None else (0,)
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
    q, k, v, write, bias, state_k, state_v, _, table, *ctx.sizes = inputs
    o, lse, _, _, _, ints, slot_bias, dies = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, ints, slot_bias, dies)
    ctx.save_for_backward(q, k, v, write, bias, state_k, state_v, table, o, lse, ints, slot_bias, dies)


def _gradients(ctx, do, _lse, d_end_k, d_end_v, d_end_bias, *_):
    saved = ctx.saved_tensors
    q, k, v, bias, state_k, o = *saved[:3], *saved[4:6], saved[8]
    do = torch.zeros_like(o) if do is None else do.contiguous()
    N, M = ctx.sizes[:2]
    ends = (d_end_k, d_end_v, d_end_bias)
    if any(x is not None for x in ends):
        shapes = (k.shape[-1:], v.shape[-1:], ())
        ends = [
            q.new_zeros((N, k.shape[2], M, *size), dtype=torch.float32)
            if x is None
            else x.float().contiguous()
            for x, size in zip(ends, shapes)
        ]
    dq, dk, dv, dbias, d_state, d_state_bias = backward_op(*saved, do, *ends, *ctx.sizes)
    D = k.shape[-1]
    if state_k is None:
        return dq, dk, dv, None, None if bias is None else dbias, *(None,) * 8
    d_k, d_v = d_state[..., :D].to(k.dtype), d_state[..., D:].to(v.dtype)
    return dq, dk, dv, None, None if bias is None else dbias, d_k, d_v, d_state_bias, *(None,) * 5


forward_op.register_autograd(_gradients, setup_context=_setup)


def slot_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    write: torch.Tensor,
    bias: torch.Tensor | None,
    num_slots: int,
    scale: float,
    state: SlotState | None,
    cu_seqlens: torch.Tensor | None,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, SlotState]:
    """slot_attention of onehot.py, for float32, float16 and bfloat16 and head sizes up to 256.

    Autocast casts q, k and v to its dtype; else they go to the widest of theirs.
    """
    D, E, G, out = q.shape[-1], v.shape[-1], q.shape[2] // k.shape[2], (k.dtype, v.dtype)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    else:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if q.device.type == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float32  # Triton's interpreter has no bfloat16
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    write = write.contiguous()
    if bias is not None:
        bias = bias.float().contiguous()
    held = (None,) * 3
    if state is not None:
        held = (
            state.k.to(dtype).contiguous(),
            state.v.to(dtype).contiguous(),
            state.bias.float().contiguous(),
        )
    sizes = blocks or blocks_for(D, E, G, dtype)
    if q.shape[1] == 1 and cu_seqlens is None and not _needs_grad(q, k, v, bias, *held):
        o, *end = step_op(q, k, v, write, bias, *held, num_slots, scale)
        return _in_dtypes(o, end, out)
    table, N = None, len(q)
    if cu_seqlens is not None:
        table, N = tile_table(cu_seqlens, sizes.chunk), len(cu_seqlens) - 1
    o, _, *end = forward_op(q, k, v, write, bias, *held, table, N, num_slots, scale, list(sizes))[:5]
    return _in_dtypes(o, end, out)


def _in_dtypes(o, end, out: tuple[torch.dtype, torch.dtype]) -> tuple[torch.Tensor, SlotState]:
    return o.to(out[1]), SlotState(end[0].to(out[0]), end[1].to(out[1]), end[2])


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def tile_table(cu_seqlens: torch.Tensor, C: int) -> torch.Tensor:
    """[tiles, 4] int32: the first token of each tile, its tokens, its document's first tile, its document."""
    rows, ends = [], cu_seqlens.tolist()
    for doc, (a, b) in enumerate(itertools.pairwise(ends)):
        first = len(rows)
        rows += [(at, min(C, b - at), first, doc) for at in range(a, b, C)]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 4).to(cu_seqlens.device)


def _one_step(q, k, v, write, bias, state_k, state_v, state_bias, M, scale):
    (B, _, HQ, D), (H, E) = q.shape, v.shape[2:]
    o, new_k, new_v = q.new_empty((B, 1, HQ, E)), k.new_empty((B, H, M, D)), v.new_empty((B, H, M, E))
    new_bias, G = q.new_empty((B, H, M), dtype=torch.float32), HQ // H
    BM = min(_pow2(M), blocks_for(D, E, G, q.dtype).keys)
    _step[(B * H,)](
        q, k, v, write, bias, state_k, state_v, state_bias, new_k, new_v, new_bias, o, scale, M,
        H=H, G=G, W=write.shape[-1], D=D, E=E, BD=_pow2(D), BE=_pow2(E), BG=_pow2(G), BM=BM,
        NS=triton.cdiv(M, BM), BIAS=bias is not None, STATE=state_k is not None,
        num_warps=STEP_WARPS, num_stages=1,
    )  # fmt: skip
    return o, new_k, new_v, new_bias


step_op = torch.library.custom_op(
    f"{OPS}::step",
    _one_step,
    mutates_args=(),
    schema=f"{_DEFINITION}Tensor? state_bias, int num_slots, float scale) -> ({_four})",
)


@step_op.register_fake
def _(q, k, v, write, bias, state_k, state_v, state_bias, num_slots, scale):
    (B, _, HQ, D), (H, E), M = q.shape, v.shape[2:], num_slots
    new = (k.new_empty((B, H, M, D)), v.new_empty((B, H, M, E)), q.new_empty((B, H, M), dtype=torch.float32))
    return q.new_empty((B, 1, HQ, E)), *new
