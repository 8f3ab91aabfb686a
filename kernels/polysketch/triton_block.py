"""PolySketch attention on a GPU: the block algorithm of chunked.py in Triton, forward and backward.

A query i in block l of C tokens, weights s^p near by and squared sketch products far away:

    N_i = sum_{j <= i, j in l} (q_i . k_j + offset)^p [v_j, 1] + features(phi_q_i) S_l,    o_i = N_i / den_i
    S_l = sum_{blocks m < l} sum_{j in m} features(phi_k_j) [v_j, 1]

    dN_i = do_i / den_i, and - (do_i . o_i) / den_i for the ones column
    R_l = sum_{blocks m > l} sum_{i in m} features(phi_q_i) dN_i      what the keys of block l see
    near  dA_ij = p s_ij^(p - 1) dN_i . [v_j, 1],  dq = dA k,  dk = dA^T q,  dv = P^T dN
    far   dfeatures(phi_q_i) = S_l dN_i,  dfeatures(phi_k_j) = R_l [v_j, 1],  dv_j += R_l^T features(phi_k_j)

Features never reach memory. They come in tiles of 8 x 8 products of two slices of a sketch, one tile for each
pair of slices a <= b (sketch.features has the same order; the weight 2 of a < b is the keys'), are built in
registers as an outer product and meet a [64, E] slice of the state on the tensor cores.

The ones column stays apart in float32: its sums z [F] are U, an r x r matrix, and a row's far mass is
phi_q . U phi_q, so that no rounded feature takes part in a denominator. Far values count from a center, the
mean of the first block: where all values are alike, no rounding of features shows. Exact weights are rounded
to v's dtype before they are added up, so that they average. 1 / den scales weights and features in float32,
and do is read as it comes.

States are summed in segments of SEGMENT blocks, in parallel, and what came before a segment is added after.
The segments start with the document, so that how sums are rounded never depends on later tokens. There are no
atomics: the same input gives the same bits.

Kernels   _states   S or R within segments, and each segment's total
          _join     adds the other segments' totals
          _forward  o and den
          _queries  dq, dphi_q, doffset's rows and do . o
          _keys     dk, dv, dphi_k
"""

import re
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # a build of torch without GPUs
    raise ImportError("the PolySketch kernels need triton") from error

from unsoftmax.kernels.polysketch.sketch import TILE, num_features

OPS = re.sub(r"\W", "_", __name__)  # a copy in a checkpoint's folder registers its own
SEGMENT = tl.constexpr(16)  # blocks whose states one program sums
SIDE = tl.constexpr(TILE)
PAIR = tl.constexpr(TILE * TILE)
EXACT = tl.constexpr("tf32x3")  # float32 operands in three parts; plain float32 dots spill by kilobytes


@triton.jit
def _pair(p, SLICES: tl.constexpr):
    """The slices a <= b of pair p, in the order of sketch.features, and the pair's weight on the key side."""
    a = p * 0
    for t in tl.static_range(1, SLICES):
        a += tl.minimum(tl.maximum(p - (t * SLICES - t * (t - 1) // 2) + 1, 0), 1)
    b = p - (a * SLICES - a * (a - 1) // 2) + a
    return a, b, tl.minimum(b - a, 1) + 1


@triton.jit
def _odd_power(s, DEGREE: tl.constexpr):
    """s^(DEGREE - 1)."""
    square = s * s
    power = s
    for _ in tl.static_range((DEGREE - 2) // 2):
        power *= square
    return power


@triton.jit
def _outer(left, right, ROWS: tl.constexpr):
    """[ROWS, SIDE] twice to their products, [ROWS, PAIR]."""
    return tl.reshape(left[:, :, None] * right[:, None, :], (ROWS, PAIR))


@triton.jit
def _slice(phi, row, live, index, R: tl.constexpr):
    """Slice `index` of the sketches in the rows given, [ROWS, SIDE] float32."""
    c = tl.arange(0, SIDE)
    return tl.load(phi + row[:, None] * R + index * SIDE + c[None, :], mask=live[:, None], other=0.0).to(
        tl.float32
    )


@triton.jit
def _matrix(z, R: tl.constexpr, SLICES: tl.constexpr, BR: tl.constexpr):
    """U [BR, BR] of the sums z: phi . U phi is the far mass of phi."""
    i = tl.arange(0, BR)[:, None]
    j = tl.arange(0, BR)[None, :]
    a = i // SIDE
    b = j // SIDE
    at = (a * SLICES - a * (a - 1) // 2 + b - a) * PAIR + (i % SIDE) * SIDE + j % SIDE
    U = tl.load(z + at, mask=(b >= a) & (i < R) & (j < R), other=0.0)
    return U, tl.sum(tl.where(i == j, U, 0.0))


@triton.jit
def _far_mass(phi, z, R: tl.constexpr, SLICES: tl.constexpr, BR: tl.constexpr):
    """The far mass of sketches phi [ROWS, BR], and where it is more than rounding (as chunked._far)."""
    U, norms = _matrix(z, R, SLICES, BR)
    if phi.dtype == tl.float32:
        y = tl.dot(phi, U, input_precision=EXACT)
    else:  # a sum of three operands of 8 bits is a float32
        high = U.to(phi.dtype)
        rest = U - high.to(tl.float32)
        middle = rest.to(phi.dtype)
        low = (rest - middle.to(tl.float32)).to(phi.dtype)
        y = tl.dot(phi, low)
        y = tl.dot(phi, middle, y)
        y = tl.dot(phi, high, y)
    wide = phi.to(tl.float32)
    mass = tl.sum(y * wide, 1)
    live = mass > 1.9073486e-06 * norms * tl.sum(wide * wide, 1)  # 16 eps
    return tl.where(live, mass, 0.0), live


@triton.jit(do_not_specialize=["T", "n"])
def _states(
    phi, x, den, delta, S, z, totals, ztotals, T, n,
    HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    SLICES: tl.constexpr, PAIRS: tl.constexpr, REVERSE: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Sums of features(phi) [x, 1] over the blocks before each block of a segment, or after it (REVERSE).

    Grid     (pairs x E tiles, segments, B x H); the first runs fastest, so that a segment's x stays in L2.
    Reads    phi [B, T, HEADS, R] and x [B, T, HEADS, E], GROUP heads a state; for REVERSE den and delta
             [B, T, HEADS]: features / den meet x = do and, for the ones column, - delta.
    Writes   S [B, n, H, F, E] in x's dtype, z [B, n, H, F] float32, totals [B, segments, H, F, E] and
             ztotals [B, segments, H, F] float32. Forward sums leave out the last block when it is not full.
    Tiles    float32 [PAIR, BE] in registers; BC rows at a time.
    """
    H: tl.constexpr = HEADS // GROUP
    F: tl.constexpr = PAIRS * PAIR
    p = tl.program_id(0) % PAIRS
    e0 = tl.program_id(0) // PAIRS * BE
    segment = tl.program_id(1)
    batch = (tl.program_id(2) // H).to(tl.int64)
    h = tl.program_id(2) % H
    a, b, weight = _pair(p, SLICES)
    if REVERSE:
        weight = 1
    f = p * PAIR + tl.arange(0, PAIR)
    e = e0 + tl.arange(0, BE)
    c = tl.arange(0, SIDE)[:, None]
    acc = tl.zeros((PAIR, BE), tl.float32)
    sums = tl.zeros((PAIR,), tl.float32)
    first = segment * SEGMENT
    count = tl.minimum(n - first, SEGMENT)
    for i in range(count):
        block = first + i
        if REVERSE:
            block = first + count - 1 - i
        slot = (batch * n + block) * H + h
        tl.store(
            S + slot * F * E + f[:, None] * E + e[None, :], acc.to(S.dtype.element_ty), mask=(e < E)[None, :]
        )
        if e0 == 0:
            tl.store(z + slot * F + f, sums)
        rows = C * GROUP
        if not REVERSE:
            rows = tl.where((block + 1) * C <= T, C * GROUP, 0)
        for m0 in range(0, rows, BC):
            m = m0 + tl.arange(0, BC)
            token = block * C + m // GROUP
            real = token < T
            row = (batch * T + token) * HEADS + h * GROUP + m % GROUP
            left = tl.load(phi + row[None, :] * R + a * SIDE + c, mask=real[None, :], other=0.0).to(
                tl.float32
            )
            right = tl.load(phi + row[None, :] * R + b * SIDE + c, mask=real[None, :], other=0.0).to(
                tl.float32
            )
            if REVERSE:
                mass = tl.load(den + row, mask=real, other=0.0)
                right = right * tl.where(mass > 0, 1 / mass, 0.0)[None, :]
            else:
                right = right * weight
            features = tl.reshape(left[:, None, :] * right[None, :, :], (PAIR, BC))
            if REVERSE:
                sums -= tl.sum(features * tl.load(delta + row, mask=real, other=0.0)[None, :], 1)
            else:
                sums += tl.sum(features, 1)
            tile = tl.load(
                x + row[:, None] * E + e[None, :], mask=real[:, None] & (e < E)[None, :], other=0.0
            )
            acc = tl.dot(features.to(tile.dtype), tile, acc, input_precision=EXACT)
    slot = (batch * tl.num_programs(1) + segment) * H + h
    tl.store(totals + slot * F * E + f[:, None] * E + e[None, :], acc, mask=(e < E)[None, :])
    if e0 == 0:
        tl.store(ztotals + slot * F + f, sums)


@triton.jit(do_not_specialize=["n", "segments", "H"])
def _join(S, totals, n, segments, H, SIZE, REVERSE: tl.constexpr, BS: tl.constexpr):
    """Adds to S [B, n, H, SIZE] the totals [B, segments, H, SIZE] of all earlier, or later, segments.

    Grid (tiles of BS numbers, segments, B x H). Always in the same order: from the document's start, or end.
    """
    at = tl.program_id(0) * BS + tl.arange(0, BS)
    segment = tl.program_id(1)
    batch = (tl.program_id(2) // H).to(tl.int64)
    h = tl.program_id(2) % H
    live = at < SIZE
    before = tl.zeros((BS,), tl.float32)
    others = segment
    if REVERSE:
        others = segments - 1 - segment
    for i in range(others):
        other = i
        if REVERSE:
            other = segments - 1 - i
        before += tl.load(totals + ((batch * segments + other) * H + h) * SIZE + at, mask=live, other=0.0)
    first = segment * SEGMENT
    for block in range(first, tl.minimum(n, first + SEGMENT)):
        where = S + ((batch * n + block) * H + h) * SIZE + at
        tl.store(
            where,
            (tl.load(where, mask=live, other=0.0).to(tl.float32) + before).to(S.dtype.element_ty),
            mask=live,
        )


@triton.jit(do_not_specialize=["T", "n", "normaliser"])
def _forward(
    q, k, v, phi_q, offset, S, z, center, o, den, T, n, normaliser,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    DEGREE: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, STACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """o [B, T, HQ, E] and den [B, T, HQ], which is 0 where no key has weight.

    Grid     (tiles of BM / STACK tokens, HQ / STACK, B): a tile is STACK query heads of one group.
    Reads    q, k, v, phi_q, offset [HQ] or None, S, z, center [B, H, E]. The block's keys up to the
             diagonal, BN at a time; then its whole state, PAIR features at a time.
    """
    F: tl.constexpr = PAIRS * PAIR
    TOKENS: tl.constexpr = BM // STACK
    t0 = tl.program_id(0) * TOKENS
    block = t0 // C
    batch = tl.program_id(2).to(tl.int64)
    head0 = tl.program_id(1) * STACK
    h = head0 // (HQ // H)
    m = tl.arange(0, BM)
    token = t0 + m // STACK
    head = head0 + m % STACK
    real = token < T
    row = (batch * T + token) * HQ + head
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    x = tl.load(q + row[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    acc = tl.zeros((BM, BE), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    shift = tl.zeros((BM,), tl.float32)
    if offset is not None:
        shift = tl.load(offset + head)
    for j0 in range(block * C, tl.minimum(t0 + TOKENS, T), BN):
        j = j0 + tl.arange(0, BN)
        key = (batch * T + j) * H + h
        y = tl.load(k + key[:, None] * D + d[None, :], mask=(j < T)[:, None] & (d < D)[None, :], other=0.0)
        s = tl.dot(x, tl.trans(y), input_precision=EXACT) + shift[:, None]
        w = tl.where(j[None, :] <= token[:, None], _odd_power(s, DEGREE) * s, 0.0)
        u = tl.load(v + key[:, None] * E + e[None, :], mask=(j < T)[:, None] & (e < E)[None, :], other=0.0)
        w = w.to(u.dtype)
        mass += tl.sum(w.to(tl.float32), 1)
        acc = tl.dot(w, u, acc, input_precision=EXACT)
    if block > 0:
        slot = (batch * n + block) * H + h
        r = tl.arange(0, BR)
        phi = tl.load(phi_q + row[:, None] * R + r[None, :], mask=real[:, None] & (r < R)[None, :], other=0.0)
        far, live = _far_mass(phi, z + slot * F, R, SLICES, BR)
        mass += far
        live = live & real
        f = tl.arange(0, PAIR)
        for p in range(PAIRS):
            a, b, _weight = _pair(p, SLICES)
            features = _outer(_slice(phi_q, row, live, a, R), _slice(phi_q, row, live, b, R), BM)
            state = tl.load(
                S + (slot * F + p * PAIR + f[:, None]) * E + e[None, :], mask=(e < E)[None, :], other=0.0
            )
            acc = tl.dot(features.to(state.dtype), state, acc, input_precision=EXACT)
        middle = tl.load(center + (batch * H + h) * E + e, mask=e < E, other=0.0)
        acc += far[:, None] * middle.to(tl.float32)[None, :]
    mass += normaliser
    acc = acc * tl.where(mass > 0, 1 / mass, 0.0)[:, None]
    tl.store(
        o + row[:, None] * E + e[None, :], acc.to(o.dtype.element_ty), mask=real[:, None] & (e < E)[None, :]
    )
    tl.store(den + row, mass, mask=real)


@triton.jit(do_not_specialize=["T", "n"])
def _queries(
    q, k, v, phi_q, offset, S, z, center, o, den, do, dq, dphi_q, doffset, delta, far_delta, T, n,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    DEGREE: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, STACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dq, dphi_q, doffset's addends [B, T, HQ] when there is an offset, delta = do . o and do . (o - center).

    Grid and tiles as _forward. Each pair's [BM, PAIR] gradient of features is brought down to its two slices
    of phi at once.
    """
    F: tl.constexpr = PAIRS * PAIR
    TOKENS: tl.constexpr = BM // STACK
    t0 = tl.program_id(0) * TOKENS
    block = t0 // C
    batch = tl.program_id(2).to(tl.int64)
    head0 = tl.program_id(1) * STACK
    h = head0 // (HQ // H)
    m = tl.arange(0, BM)
    token = t0 + m // STACK
    head = head0 + m % STACK
    real = token < T
    row = (batch * T + token) * HQ + head
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    inside = real[:, None] & (e < E)[None, :]
    g = tl.load(do + row[:, None] * E + e[None, :], mask=inside, other=0.0)
    out = tl.load(o + row[:, None] * E + e[None, :], mask=inside, other=0.0)
    dot = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    middle = tl.load(center + (batch * H + h) * E + e, mask=e < E, other=0.0)
    far_dot = dot - tl.sum(g.to(tl.float32) * middle.to(tl.float32)[None, :], 1)
    tl.store(delta + row, dot, mask=real)
    tl.store(far_delta + row, far_dot, mask=real)
    mass = tl.load(den + row, mask=real, other=0.0)
    inverse = tl.where(mass > 0, 1 / mass, 0.0)
    shift = tl.zeros((BM,), tl.float32)
    if offset is not None:
        shift = tl.load(offset + head)
    x = tl.load(q + row[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    acc = tl.zeros((BM, BD), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    for j0 in range(block * C, tl.minimum(t0 + TOKENS, T), BN):
        j = j0 + tl.arange(0, BN)
        key = (batch * T + j) * H + h
        y = tl.load(k + key[:, None] * D + d[None, :], mask=(j < T)[:, None] & (d < D)[None, :], other=0.0)
        u = tl.load(v + key[:, None] * E + e[None, :], mask=(j < T)[:, None] & (e < E)[None, :], other=0.0)
        s = tl.dot(x, tl.trans(y), input_precision=EXACT) + shift[:, None]
        dw = tl.dot(g, tl.trans(u), input_precision=EXACT) - dot[:, None]
        ds = DEGREE * _odd_power(s, DEGREE) * (inverse[:, None] * dw)
        ds = tl.where(j[None, :] <= token[:, None], ds, 0.0)
        if offset is not None:
            sums += tl.sum(ds, 1)
        acc = tl.dot(ds.to(y.dtype), y, acc, input_precision=EXACT)
    tl.store(
        dq + row[:, None] * D + d[None, :], acc.to(dq.dtype.element_ty), mask=real[:, None] & (d < D)[None, :]
    )
    if offset is not None:
        tl.store(doffset + row, sums, mask=real)
    ROUND: tl.constexpr = BR // SIDE
    which = tl.arange(0, ROUND)
    grad = tl.zeros((BM, ROUND, SIDE), tl.float32)
    if block > 0:
        slot = (batch * n + block) * H + h
        r = tl.arange(0, BR)
        phi = tl.load(phi_q + row[:, None] * R + r[None, :], mask=real[:, None] & (r < R)[None, :], other=0.0)
        _far, live = _far_mass(phi, z + slot * F, R, SLICES, BR)
        live = live & real
        f = tl.arange(0, PAIR)
        inverse = tl.where(live, inverse, 0.0)
        for p in range(PAIRS):
            a, b, _weight = _pair(p, SLICES)
            state = tl.load(
                S + (slot * F + p * PAIR + f[:, None]) * E + e[None, :], mask=(e < E)[None, :], other=0.0
            )
            ones = tl.load(z + slot * F + p * PAIR + f)
            df = tl.dot(g, tl.trans(state), input_precision=EXACT) - far_dot[:, None] * ones[None, :]
            df = tl.reshape(df * inverse[:, None], (BM, SIDE, SIDE))
            right = _slice(phi_q, row, live, b, R)
            left = _slice(phi_q, row, live, a, R)
            dleft = tl.sum(df * right[:, None, :], 2)
            dright = tl.sum(df * left[:, :, None], 1)
            grad += tl.where((which == a)[None, :, None], dleft[:, None, :], 0.0)
            grad += tl.where((which == b)[None, :, None], dright[:, None, :], 0.0)
    c = which[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(
        dphi_q + row[:, None, None] * R + c[None, :, :],
        grad.to(dphi_q.dtype.element_ty),
        mask=real[:, None, None] & (c < R)[None, :, :],
    )


@triton.jit(do_not_specialize=["T", "n"])
def _keys(
    q, k, v, far_v, phi_k, offset, S, z, den, delta, do, dk, dv, dphi_k, T, n,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    DEGREE: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, STACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dk, dv, dphi_k. S and z are R and its ones column, far_v is v less its center.

    Grid (tiles of BN keys, H, B). First the far part, then the block's queries from the tile on, BM / STACK
    tokens of STACK heads at a time.
    """
    F: tl.constexpr = PAIRS * PAIR
    TOKENS: tl.constexpr = BM // STACK
    TURNS: tl.constexpr = HQ // H // STACK
    j0 = tl.program_id(0) * BN
    block = j0 // C
    batch = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1)
    j = j0 + tl.arange(0, BN)
    real = j < T
    key = (batch * T + j) * H + h
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    gv = tl.zeros((BN, BE), tl.float32)
    ROUND: tl.constexpr = BR // SIDE
    which = tl.arange(0, ROUND)
    grad = tl.zeros((BN, ROUND, SIDE), tl.float32)
    if (block + 1) * C < T:
        u = tl.load(far_v + key[:, None] * E + e[None, :], mask=real[:, None] & (e < E)[None, :], other=0.0)
        slot = (batch * n + block) * H + h
        f = tl.arange(0, PAIR)
        for p in range(PAIRS):
            a, b, weight = _pair(p, SLICES)
            state = tl.load(
                S + (slot * F + p * PAIR + f[:, None]) * E + e[None, :], mask=(e < E)[None, :], other=0.0
            )
            ones = tl.load(z + slot * F + p * PAIR + f)
            right = _slice(phi_k, key, real, b, R) * weight
            left = _slice(phi_k, key, real, a, R)
            gv = tl.dot(_outer(left, right, BN).to(state.dtype), state, gv, input_precision=EXACT)
            df = tl.dot(u, tl.trans(state), input_precision=EXACT) + ones[None, :]
            df = tl.reshape(df, (BN, SIDE, SIDE))
            dleft = tl.sum(df * right[:, None, :], 2)
            dright = tl.sum(df * left[:, :, None], 1) * weight
            grad += tl.where((which == a)[None, :, None], dleft[:, None, :], 0.0)
            grad += tl.where((which == b)[None, :, None], dright[:, None, :], 0.0)
    c = which[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(
        dphi_k + key[:, None, None] * R + c[None, :, :],
        grad.to(dphi_k.dtype.element_ty),
        mask=real[:, None, None] & (c < R)[None, :, :],
    )
    y = tl.load(k + key[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    u = tl.load(v + key[:, None] * E + e[None, :], mask=real[:, None] & (e < E)[None, :], other=0.0)
    gk = tl.zeros((BN, BD), tl.float32)
    m = tl.arange(0, BM)
    start = j0 // TOKENS * TOKENS
    turns = tl.cdiv(tl.minimum((block + 1) * C, T) - start, TOKENS) * TURNS
    for i in range(turns):
        token = start + i // TURNS * TOKENS + m // STACK
        head = (h * TURNS + i % TURNS) * STACK + m % STACK
        row = (batch * T + token) * HQ + head
        here = token < T
        x = tl.load(q + row[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        g = tl.load(do + row[:, None] * E + e[None, :], mask=here[:, None] & (e < E)[None, :], other=0.0)
        mass = tl.load(den + row, mask=here, other=0.0)
        dot = tl.load(delta + row, mask=here, other=0.0)
        inverse = tl.where(mass > 0, 1 / mass, 0.0)
        s = tl.dot(y, tl.trans(x), input_precision=EXACT)
        if offset is not None:
            s += tl.load(offset + head)[None, :]
        power = tl.where(j[:, None] <= token[None, :], _odd_power(s, DEGREE) * inverse[None, :], 0.0)
        gv = tl.dot((power * s).to(g.dtype), g, gv, input_precision=EXACT)
        dw = tl.dot(u, tl.trans(g), input_precision=EXACT) - dot[None, :]
        gk = tl.dot((DEGREE * power * dw).to(x.dtype), x, gk, input_precision=EXACT)
    tl.store(
        dk + key[:, None] * D + d[None, :], gk.to(dk.dtype.element_ty), mask=real[:, None] & (d < D)[None, :]
    )
    tl.store(
        dv + key[:, None] * E + e[None, :], gv.to(dv.dtype.element_ty), mask=real[:, None] & (e < E)[None, :]
    )


class Tiles(NamedTuple):
    """How one kernel is cut: rows of queries, keys (for _states: rows a step), warps, loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The tiles of every kernel."""

    forward: Tiles
    queries: Tiles
    keys: Tiles
    states: Tiles
    gradients: Tiles  # _states in reverse


def plan(dtype: torch.dtype, widest: int) -> Plan:
    """The tiles for operands of dtype and heads of at most `widest` numbers."""
    if dtype == torch.float32:
        size = 32 if widest <= 128 else 16
        small, sums = Tiles(size, size, 8, 1), Tiles(0, 32, 4, 1)
        return Plan(small, small, small, sums, sums)
    if widest > 128:
        return Plan(
            Tiles(64, 64, 8, 1),
            Tiles(64, 32, 8, 1),
            Tiles(32, 64, 8, 1),
            Tiles(0, 32, 4, 2),
            Tiles(0, 32, 4, 2),
        )
    return Plan(  # the fastest on an H200
        Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3), Tiles(32, 64, 4, 2), Tiles(0, 32, 4, 4), Tiles(0, 32, 4, 4)
    )


def unsupported(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, *, degree: int, block: int
) -> str | None:
    """What in such inputs these kernels cannot take, or None."""
    D, E, r = q.shape[-1], v.shape[-1], phi_q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {q.dtype}"  # in float16 a power of a score soon passes 65,504
    if degree not in (2, 4, 8):
        return f"degree {degree}"
    if r % TILE or not TILE <= r <= 64:
        return f"sketch size {r}"
    if block < 16 or block % 16:
        return f"block {block}"
    if max(D, E) > 256 or q.shape[1] == 0:
        return f"head dimensions {D} and {E}" if q.shape[1] else "no tokens"
    return None


def _power_of_two(x: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(x))


def _stack(group: int, rows: int, block: int) -> tuple[int, int]:
    """How many heads of a group one tile of queries holds, and the tile's rows: whole tiles make a block."""
    stack = min(group & -group, rows)
    return stack, min(rows, (block & -block) * stack)


class _Shape(NamedTuple):
    """What the launches share."""

    B: int
    T: int
    HQ: int
    H: int
    D: int
    E: int
    R: int
    C: int

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.T, self.C)

    @property
    def segments(self) -> int:
        return triton.cdiv(self.blocks, SEGMENT.value)

    @property
    def pairs(self) -> int:
        return num_features(self.R) // TILE**2

    def query_tiles(self, tiles: Tiles, degree: int) -> dict:
        stack, rows = _stack(self.HQ // self.H, tiles.rows, self.C)
        return {
            "HQ": self.HQ, "H": self.H, "D": self.D, "E": self.E, "R": self.R, "C": self.C, "DEGREE": degree,
            "SLICES": self.R // TILE, "PAIRS": self.pairs, "STACK": stack, "BM": rows,
            "BN": min(tiles.keys, self.C & -self.C), "BD": _power_of_two(self.D), "BE": _power_of_two(self.E),
            "BR": _power_of_two(self.R), "num_warps": tiles.warps, "num_stages": tiles.stages,
        }  # fmt: skip


def _shape(q, k, v, phi_q, block) -> _Shape:
    B, T, HQ, D = q.shape
    return _Shape(B, T, HQ, k.shape[2], D, v.shape[-1], phi_q.shape[-1], block)


def _sum_states(phi, x, den, delta, s: _Shape, tiles: Tiles) -> tuple[torch.Tensor, ...]:
    """S [B, n, H, F, E] and z [B, n, H, F], before each block, and the totals after all; R with den."""
    reverse, F = den is not None, s.pairs * TILE**2
    shape, device = (s.B, s.blocks, s.H, F), x.device
    S = torch.empty(*shape, s.E, dtype=x.dtype, device=device)
    z = torch.empty(shape, dtype=torch.float32, device=device)
    totals = torch.empty(s.B, s.segments, s.H, F, s.E, dtype=torch.float32, device=device)
    ztotals = torch.empty(totals.shape[:-1], dtype=torch.float32, device=device)
    BE = min(128, _power_of_two(s.E))
    heads = phi.shape[2]
    _states[(s.pairs * triton.cdiv(s.E, BE), s.segments, s.B * s.H)](
        phi, x, den, delta, S, z, totals, ztotals, s.T, s.blocks,
        HEADS=heads, GROUP=heads // s.H, E=s.E, R=s.R, C=s.C, SLICES=s.R // TILE, PAIRS=s.pairs,
        REVERSE=reverse, BC=min(tiles.keys, s.C & -s.C), BE=BE,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if s.segments > 1:
        for sums, total, size in ((S, totals, F * s.E), (z, ztotals, F)):
            _join[(triton.cdiv(size, 2048), s.segments, s.B * s.H)](
                sums, total, s.blocks, s.segments, s.H, size, REVERSE=reverse, BS=2048, num_warps=8
            )
    return S, z, totals, ztotals


def _centered(v: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of v over the first block [B, H, E], which all who look further have seen, and v less it."""
    center = v[:, :block].float().mean(1).to(v.dtype)
    return center, v - center.unsqueeze(1)


@torch.library.custom_op(f"{OPS}::forward", mutates_args=())
def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor,
    offset: torch.Tensor | None, degree: int, block: int, normaliser: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    s, cut = _shape(q, k, v, phi_q, block), plan(q.dtype, max(q.shape[-1], v.shape[-1]))
    center, far_v = _centered(v, block)
    S, z, totals, ztotals = _sum_states(phi_k, far_v, None, None, s, cut.states)
    o, den = torch.empty(s.B, s.T, s.HQ, s.E, dtype=v.dtype, device=v.device), _rows_of(q)
    options = s.query_tiles(cut.forward, degree)
    tokens, stack = options["BM"] // options["STACK"], options["STACK"]
    _forward[(triton.cdiv(s.T, tokens), s.HQ // stack, s.B)](
        q, k, v, phi_q, offset, S, z, center, o, den, s.T, s.blocks, normaliser, **options
    )
    mass = ztotals.sum(1).unsqueeze(-1)
    return o, den, torch.cat((totals.sum(1) + mass * center.unsqueeze(2), mass), -1)


@_forward_op.register_fake
def _(q, k, v, phi_q, phi_k, offset, degree, block, normaliser):
    B, T, HQ, _ = q.shape
    E, F = v.shape[-1], num_features(phi_q.shape[-1])
    state = q.new_empty(B, k.shape[2], F, E + 1, dtype=torch.float32)
    return v.new_empty(B, T, HQ, E), _rows_of(q), state


@torch.library.custom_op(f"{OPS}::backward", mutates_args=())
def _backward_op(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor,
    phi_k: torch.Tensor, offset: torch.Tensor | None, o: torch.Tensor, den: torch.Tensor,
    degree: int, block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    s, cut = _shape(q, k, v, phi_q, block), plan(q.dtype, max(q.shape[-1], v.shape[-1]))
    center, far_v = _centered(v, block)
    S, z, _, _ = _sum_states(phi_k, far_v, None, None, s, cut.states)
    dq, dphi_q = torch.empty_like(q), torch.empty_like(phi_q)
    delta, far_delta = torch.empty_like(den), torch.empty_like(den)
    doffset = torch.empty_like(den) if offset is not None else None
    options = s.query_tiles(cut.queries, degree)
    tokens, stack = options["BM"] // options["STACK"], options["STACK"]
    _queries[(triton.cdiv(s.T, tokens), s.HQ // stack, s.B)](
        q, k, v, phi_q, offset, S, z, center, o, den, do, dq, dphi_q, doffset, delta, far_delta,
        s.T, s.blocks, **options,
    )  # fmt: skip
    del S, z
    S, z, _, _ = _sum_states(phi_q, do, den, far_delta, s, cut.gradients)
    dk, dv, dphi_k = torch.empty_like(k), torch.empty_like(v), torch.empty_like(phi_k)
    options = s.query_tiles(cut.keys, degree)
    _keys[(triton.cdiv(s.T, options["BN"]), s.H, s.B)](
        q, k, v, far_v, phi_k, offset, S, z, den, delta, do, dk, dv, dphi_k, s.T, s.blocks, **options
    )
    return dq, dk, dv, dphi_q, dphi_k, q.new_zeros(0) if doffset is None else doffset.sum((0, 1))


@_backward_op.register_fake
def _(do, q, k, v, phi_q, phi_k, offset, o, den, degree, block):
    doffset = q.new_empty(0) if offset is None else q.new_empty(q.shape[2], dtype=torch.float32)
    return *(torch.empty_like(x) for x in (q, k, v, phi_q, phi_k)), doffset


def _rows_of(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _save(ctx, inputs, output):
    *tensors, ctx.degree, ctx.block, _ = inputs
    o, den, S = output
    ctx.mark_non_differentiable(den, S)
    ctx.save_for_backward(*tensors, o, den)


def _gradients(ctx, do, _den, _S):
    q, k, v, phi_q, phi_k, offset, o, den = ctx.saved_tensors
    *grads, doffset = _backward_op(
        do.contiguous(), q, k, v, phi_q, phi_k, offset, o, den, ctx.degree, ctx.block
    )
    return *grads, None if offset is None else doffset.to(offset.dtype), None, None, None


_forward_op.register_autograd(_gradients, setup_context=_save)


def polysketch_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor, *,
    degree: int, block: int, offset: torch.Tensor | None = None, normaliser: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """chunked.polysketch with local="power", window = block, no sinks and no gates.

    Args:
        q, k, v, phi_q, phi_k: as there, all of one dtype, bfloat16 or float32 (full precision, slow).
        degree: 2, 4 or 8. block: a multiple of 16, best of 64. offset: [HQ] or None.

    Returns:
        o [B, T, HQ, E] in v's dtype, and S [B, H, F, E + 1] float32 before the open block, without gradient.
    """
    tensors = [x.contiguous() for x in (q, k, v, phi_q, phi_k)]
    o, _, S = _forward_op(
        *tensors, None if offset is None else offset.float().contiguous(), degree, block, float(normaliser)
    )
    return o, S
