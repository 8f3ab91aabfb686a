"""PolySketch attention on a GPU: the block algorithm of chunked.py in Triton, forward and backward.

A query i sees keys near by and far away, the last with squared sketch products. States S lie one a chunk,
which is a block, or several short ones; keys of the chunk that the window has passed are met one by one:

    N_i = sum_near w_ij [v_j, 1] + e^lift_i (sum_passed (phi_q_i . phi_k_j)^2 [v_j, 1] + f(phi_q_i) S_c)
    w_ij = (q_i . k_j + offset)^p or exp(q_i . k_j),    o_i = N_i / den_i
    S_c = sum_{chunks m < c} sum_{j in m} f(phi_k_j) [v_j, 1],    f short for features

    dN_i = do_i / den_i, and - (do_i . o_i) / den_i for the ones column
    R_c = sum_{chunks m > c} sum_{i in m} f(phi_q_i) dN_i      what the keys of chunk c see
    near  dA_ij = w'_ij dN_i . [v_j, 1],  dq = dA k,  dk = dA^T q,  dv = w^T dN
    far   df(phi_q_i) = S_c dN_i,  df(phi_k_j) = R_c [v_j, 1],  dv_j += R_c^T f(phi_k_j)

A query belongs to the chunk in which its window starts. Near is a window of whole blocks, and the sinks, the
document's first tokens. Softmax weights are kept in range by a running maximum over what the row sees, in a
fixed order, far mass included; a power needs none.

Features never reach memory. They come in tiles of 8 x 8 products of two slices of a sketch, one tile for each
pair of slices a <= b (sketch.features has the same order; the weight 2 of a < b is the keys'), are built in
registers as an outer product and meet a [64, E] slice of the state on the tensor cores.

The ones column stays apart in float32: its sums z [F] are U, an r x r matrix, and a row's far mass is
phi_q . U phi_q, so that no rounded feature takes part in a denominator. Far values count from a center, the
mean of the first chunk: where all values are alike, no rounding of features shows. Exact weights are rounded
to v's dtype before they are added up, so that they average. 1 / den scales weights and features in float32,
and do is read as it comes.

States are summed in segments of SEGMENT chunks, in parallel, and what came before a segment is added after.
The segments start with the document, so that how sums are rounded never depends on later tokens. There are no
atomics: the same input gives the same bits.

Kernels   _starts, _programs    where packed documents lie, and whose each program is
          _center   the center of values, and values less it
          _masses   each chunk's own sums of the ones column
          _prefix   those of all chunks before it, or after it
          _states   S or R within segments, and each segment's total
          _join     adds the other segments' totals
          _forward  o and den
          _queries  dq, dphi_q, the rows of doffset and dlift, and do . o
          _sinks    dk and dv of the sinks, from queries far from them
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

from unsoftmax.kernels.chip import registers
from unsoftmax.kernels.polysketch.sketch import TILE, num_features

OPS = re.sub(r"\W", "_", __name__)  # a copy in a checkpoint's folder registers its own
CHUNK = 256  # tokens between two states, or one block when that is longer
EARLY = 16  # values whose mean is the center: no more than a block
SEGMENT = tl.constexpr(8)  # chunks whose states one program sums
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
def _places_of_sums(R: tl.constexpr, SLICES: tl.constexpr, BR: tl.constexpr):
    """Where z has the sum of coordinates i and j, [BR, BR], and whether it does: for slices a <= b."""
    i = tl.arange(0, BR)[:, None]
    j = tl.arange(0, BR)[None, :]
    a = i // SIDE
    b = j // SIDE
    at = (a * SLICES - a * (a - 1) // 2 + b - a) * PAIR + (i % SIDE) * SIDE + j % SIDE
    return at, (b >= a) & (i < R) & (j < R)


@triton.jit
def _matrix(z, R: tl.constexpr, SLICES: tl.constexpr, BR: tl.constexpr, APART: tl.constexpr):
    """U [BR, BR] of the sums z, numbers APART: phi . U phi is the far mass of phi."""
    at, stored = _places_of_sums(R, SLICES, BR)
    U = tl.load(z + at * APART, mask=stored, other=0.0)
    i = tl.arange(0, BR)
    return U, tl.sum(tl.where(i[:, None] == i[None, :], U, 0.0))


@triton.jit
def _far_mass(phi, z, R: tl.constexpr, SLICES: tl.constexpr, BR: tl.constexpr, APART: tl.constexpr = 1):
    """The far mass of sketches phi [ROWS, BR], and where it is more than rounding (as chunked._far)."""
    U, norms = _matrix(z, R, SLICES, BR, APART)
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


@triton.jit(do_not_specialize=["N"])
def _starts(cu, table, N, CHUNK: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BN: tl.constexpr):
    """table [2, N + 1]: where each document starts, as cu [N + 1] has it, and where its states do."""
    i = tl.arange(0, BN)
    start = tl.load(cu + i, mask=i <= N, other=0)
    length = tl.load(cu + i + 1, mask=i < N, other=0) - start
    count = tl.where(i < N, tl.maximum(length // C * C - (W - C), 0) // CHUNK + 1, 0).to(tl.int32)
    tl.store(table + i, start.to(tl.int32), mask=i <= N)
    tl.store(table + N + 1 + i, tl.cumsum(count, 0) - count, mask=i <= N)


@triton.jit(do_not_specialize=["N", "size", "count"])
def _programs(ends, places, firsts, N, size, count, BN: tl.constexpr, BP: tl.constexpr):
    """places [1 + 2 count]: N, then the document and the place of each program; those past the end have none.

    Grid (N). Document i has its things from ends [i] to ends [i + 1], `size` of them a program, and its first
    program is firsts [i].
    """
    doc = tl.program_id(0)
    i = tl.arange(0, BN)
    have = tl.load(ends + i + 1, mask=i < N, other=0) - tl.load(ends + i, mask=i < N, other=0)
    programs = (have + size - 1) // size
    first = tl.sum(tl.where(i < doc, programs, 0))
    own = tl.sum(tl.where(i == doc, programs, 0))
    tl.store(firsts + doc, first)
    if doc == 0:
        tl.store(places, N)
    stop = tl.where(doc == N - 1, count - first, own)
    for p0 in range(0, stop, BP):
        p = p0 + tl.arange(0, BP)
        at = places + 1 + 2 * (first + p)
        tl.store(at, tl.zeros((BP,), tl.int32) + doc, mask=p < stop)
        tl.store(at + 1, tl.where(p < own, p, 1 << 20), mask=p < stop)


@triton.jit
def _document(table, places, index, batch, T, n):
    """Of a program: its document, the first row, the length, the first state, their number; its place in it.

    table [2, N + 1] int32 has where documents and their states start, places N and then the document and
    the place of each program; None where each row is a document.
    """
    if table is None:
        return batch, batch * T, T, batch * n, n, index
    else:
        N = tl.load(places)
        doc = tl.load(places + 2 * index + 1).to(tl.int64)
        start = tl.load(table + doc).to(tl.int64)
        base = tl.load(table + N + 1 + doc).to(tl.int64)
        length = (tl.load(table + doc + 1) - start).to(tl.int32)
        count = (tl.load(table + N + 2 + doc) - base).to(tl.int32)
        return doc, start, length, base, count, tl.load(places + 2 * index + 2)


@triton.jit
def _pair_features(phi, row, live, p, factor, R: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr):
    """Features of pair p of the sketches in the rows given, times factor [ROWS] or the keys' weight."""
    a, b, weight = _pair(p, SLICES)
    left = _slice(phi, row, live, a, R)
    if factor is not None:
        left = left * factor[:, None]
    else:
        left = left * weight
    return _outer(left, _slice(phi, row, live, b, R), ROWS)


@triton.jit
def _chunk_rows(
    block, m, origin, T, h, HEADS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Rows m of a chunk of keys, or of the queries that see up to there: the row, and whether it counts.

    Keys count from FIRST on until the open block's window; queries lie W - C tokens late.
    """
    token = block * CHUNK + m // GROUP
    if REVERSE:
        token += W - C
        real = token < T
    else:
        real = (token >= FIRST) & (token < T // C * C - (W - C))
    return (origin + token) * HEADS + h * GROUP + m % GROUP, real


@triton.jit(do_not_specialize=["T", "n"])
def _states(
    phi, x, scale, S, totals, table, places, T, n,
    HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr,
    REVERSE: tl.constexpr, TWO: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Sums of features(phi) x over the chunks before each chunk of a segment, or after it (REVERSE).

    Grid     (pairs, or twos of pairs, x E tiles; segments; B x H); the first runs fastest, so that a
             segment's x stays in L2.
    Reads    phi [B, T, HEADS, R] and x [B, T, HEADS, E], GROUP heads a state. For REVERSE scale
             [B, T, HEADS], a factor on features.
    Writes   S [B, n, H, F, E] in x's dtype and totals [B, segments, H, F, E] float32.
    Tiles    float32 [PAIR, BE] in registers, one or two; BC rows at a time. Each thread builds whole features
             of its rows.
    """
    H: tl.constexpr = HEADS // GROUP
    F: tl.constexpr = PAIRS * PAIR
    TURNS: tl.constexpr = PAIRS // 2 if TWO else PAIRS
    p = tl.program_id(0) % TURNS
    if TWO:
        p = 2 * p
    e = tl.program_id(0) // TURNS * BE + tl.arange(0, BE)
    batch = (tl.program_id(2) // H).to(tl.int64)
    h = tl.program_id(2) % H
    _doc, origin, T, base, n, segment = _document(table, places, tl.program_id(1), batch, T, n)
    if table is not None:  # noqa: SIM102
        if segment * SEGMENT >= n:
            return
    f = p * PAIR + tl.arange(0, PAIR)
    at = f[:, None] * E + e[None, :]
    inside = (e < E)[None, :]
    acc = tl.zeros((PAIR, BE), tl.float32)
    second = tl.zeros((PAIR, BE), tl.float32)
    first = segment * SEGMENT
    count = tl.minimum(n - first, SEGMENT)
    for i in range(count):
        block = first + i
        if REVERSE:
            block = first + count - 1 - i
        state = S + ((base + block) * H + h) * F * E + at
        tl.store(state, acc.to(S.dtype.element_ty), mask=inside)
        if TWO:
            tl.store(state + PAIR * E, second.to(S.dtype.element_ty), mask=inside)
        for m0 in range(0, CHUNK * GROUP, BC):
            m = m0 + tl.arange(0, BC)
            row, real = _chunk_rows(block, m, origin, T, h, HEADS, GROUP, CHUNK, C, W, FIRST, REVERSE)
            factor = None
            if REVERSE:
                factor = tl.load(scale + row, mask=real, other=0.0)
            tile = tl.load(x + row[:, None] * E + e[None, :], mask=real[:, None] & inside, other=0.0)
            rows = _pair_features(phi, row, real, p, factor, R, SLICES, BC)
            acc = tl.dot(tl.trans(rows.to(tile.dtype)), tile, acc, input_precision=EXACT)
            if TWO:
                rows = _pair_features(phi, row, real, p + 1, factor, R, SLICES, BC)
                second = tl.dot(tl.trans(rows.to(tile.dtype)), tile, second, input_precision=EXACT)
    total = totals + ((batch * tl.num_programs(1) + tl.program_id(1)) * H + h) * F * E + at
    tl.store(total, acc, mask=inside)
    if TWO:
        tl.store(total + PAIR * E, second, mask=inside)


@triton.jit(do_not_specialize=["T", "n"])
def _masses(
    phi, scale, delta, own, table, places, T, n,
    HEADS: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, FIRST: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, REVERSE: tl.constexpr,
    BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Each chunk's own sums of the ones column of _states, in float32: own [B, n, H, F].

    Grid     (segments x SEGMENT, B x H). The sums are phi^T phi [BR, BR], whose products are exact in 16 bits
             too; for REVERSE phi^T (phi times - scale delta), the right side in two parts.
    """
    H: tl.constexpr = HEADS // GROUP
    F: tl.constexpr = PAIRS * PAIR
    batch = (tl.program_id(1) // H).to(tl.int64)
    h = tl.program_id(1) % H
    index = tl.program_id(0)
    _doc, origin, T, base, n, segment = _document(table, places, index // SEGMENT, batch, T, n)
    block = segment * SEGMENT + index % SEGMENT
    if block >= n:
        return
    at, stored = _places_of_sums(R, SLICES, BR)
    sums = tl.zeros((BR, BR), tl.float32)
    for m0 in range(0, CHUNK * GROUP, BC):
        m = m0 + tl.arange(0, BC)
        row, real = _chunk_rows(block, m, origin, T, h, HEADS, GROUP, CHUNK, C, W, FIRST, REVERSE)
        rows = _load(phi, row, real, R, BR)
        if REVERSE:
            factor = tl.load(scale + row, mask=real, other=0.0)
            factor = factor * tl.load(delta + row, mask=real, other=0.0)
            wide = rows.to(tl.float32) * -factor[:, None]
            high = wide.to(rows.dtype)
            sums = tl.dot(tl.trans(rows), high, sums, input_precision=EXACT)
            if rows.dtype != tl.float32:
                sums = tl.dot(tl.trans(rows), (wide - high.to(tl.float32)).to(rows.dtype), sums)
        else:
            sums = tl.dot(tl.trans(rows), rows, sums, input_precision=EXACT)
    if not REVERSE:
        i = tl.arange(0, BR) // SIDE
        sums *= tl.where(i[:, None] == i[None, :], 1.0, 2.0)
    tl.store(own + ((base + block) * H + h) * F + at, sums, mask=stored)


@triton.jit(do_not_specialize=["n"])
def _prefix(
    own, z, final, table, n, H, F, E, REVERSE: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    """z [B, n, H, F]: the sum of own over the chunks before each, or after it.

    Grid (tiles of BF features, documents, H). What all chunks sum to is the last column of final
    [B, H, F, E + 1], if that is given.
    """
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    doc = tl.program_id(1).to(tl.int64)
    h = tl.program_id(2)
    base = doc * n
    if table is not None:
        first = table + tl.num_programs(1) + 1 + doc
        base = tl.load(first).to(tl.int64)
        n = (tl.load(first + 1) - base).to(tl.int32)
    before = tl.zeros((BF,), tl.float32)
    for i0 in range(0, n, BN):
        i = i0 + tl.arange(0, BN)
        block, earlier = i, i - 1
        if REVERSE:
            block, earlier = n - 1 - i, n - i
        at = ((base + earlier) * H + h)[:, None] * F + f[None, :]
        new = tl.load(own + at, mask=((i > 0) & (i < n))[:, None] & (f < F)[None, :], other=0.0)
        at = ((base + block) * H + h)[:, None] * F + f[None, :]
        tl.store(z + at, tl.cumsum(new, 0) + before[None, :], mask=(i < n)[:, None] & (f < F)[None, :])
        before += tl.sum(new, 0)
    if final is not None:
        before += tl.load(own + ((base + n - 1) * H + h) * F + f, mask=f < F, other=0.0)
        tl.store(final + ((doc * H + h) * F + f) * (E + 1) + E, before, mask=f < F)


@triton.jit(do_not_specialize=["n", "segments", "H"])
def _join(
    S, totals, final, center, table, places, n, segments, H, SIZE, E, REVERSE: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Adds to S [B, n, H, SIZE] the totals [B, segments, H, SIZE] of all earlier, or later, segments.

    Grid (tiles of BS numbers, segments, B x H). Always in the same order: from the document's start, or end.
    final [B, H, F, E + 1], if given, holds the sums of all keys' ones, and gets those of their values.
    """
    at = tl.program_id(0) * BS + tl.arange(0, BS)
    batch = (tl.program_id(2) // H).to(tl.int64)
    h = tl.program_id(2) % H
    _doc, _origin, _T, base, n, segment = _document(table, places, tl.program_id(1), batch, 0, n)
    if table is not None:  # noqa: SIM102
        if segment * SEGMENT >= n:
            return
    mine = batch * segments + tl.program_id(1) - segment  # the document's first segment
    segments = tl.cdiv(n, SEGMENT)
    live = at < SIZE
    before = tl.zeros((BS,), tl.float32)
    others = segment
    if REVERSE:
        others = segments - 1 - segment
    for i in range(others):
        other = i
        if REVERSE:
            other = segments - 1 - i
        before += tl.load(totals + ((mine + other) * H + h) * SIZE + at, mask=live, other=0.0)
    if final is not None:  # noqa: SIM102
        if segment == segments - 1:
            sums = before + tl.load(totals + ((mine + segment) * H + h) * SIZE + at, mask=live, other=0.0)
            line = final + ((batch * H + h) * (SIZE // E) + at // E) * (E + 1)
            mass = tl.load(line + E, mask=live, other=0.0)
            middle = tl.load(center + (batch * H + h) * E + at % E, mask=live, other=0.0).to(tl.float32)
            tl.store(line + at % E, sums + mass * middle, mask=live)
    first = segment * SEGMENT
    if others > 0:
        for block in range(first, tl.minimum(n, first + SEGMENT)):
            where = S + ((base + block) * H + h) * SIZE + at
            state = tl.load(where, mask=live, other=0.0).to(tl.float32) + before
            tl.store(where, state.to(S.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["T"])
def _center(
    v, center, far_v, table, places, T,
    H: tl.constexpr, E: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr, BT: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """The mean of a document's first EARLY values, which all who look far have seen, and v less it.

    Grid (spans of SPAN tokens, H, B); center [N, H, E], far_v as v [B, T, H, E].
    """
    batch = tl.program_id(2).to(tl.int64)
    doc, origin, T, _base, _n, place = _document(table, places, tl.program_id(0), batch, T, 0)
    if place * SPAN >= T:
        return
    h = tl.program_id(1)
    early = tl.arange(0, EARLY)
    first = _load(v, (origin + early) * H + h, early < T, E, BE).to(tl.float32)
    middle = (tl.sum(first, 0) / tl.minimum(T, EARLY)).to(v.dtype.element_ty)
    e = tl.arange(0, BE)
    if place == 0:
        tl.store(center + (doc * H + h) * E + e, middle, mask=e < E)
    for t0 in range(place * SPAN, tl.minimum((place + 1) * SPAN, T), BT):
        token = t0 + tl.arange(0, BT)
        row = (origin + token) * H + h
        rows = _load(v, row, token < T, E, BE).to(tl.float32)
        _save(far_v, row, token < T, rows - middle.to(tl.float32)[None, :], E, BE)


@triton.jit
def _load(x, row, live, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Rows of x [..., SIZE], zeros where not live, [rows, WIDE]."""
    i = tl.arange(0, WIDE)
    return tl.load(x + row[:, None] * SIZE + i[None, :], mask=live[:, None] & (i < SIZE)[None, :], other=0.0)


@triton.jit
def _save(x, row, live, value, SIZE: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, WIDE)
    at = x + row[:, None] * SIZE + i[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=live[:, None] & (i < SIZE)[None, :])


@triton.jit
def _lower(acc, mass, top, new):
    """Sums divided by exp(top), now by exp(new)."""
    keep = tl.exp(top - new)
    return acc * keep[:, None], mass * keep, new


@triton.jit
def _near(acc, mass, top, x, y, u, allowed, shift, DEGREE: tl.constexpr, SOFT: tl.constexpr):
    """Adds a tile of exact weights, keys y and values u. Every row's first tile allows a key."""
    s = tl.dot(x, tl.trans(y), input_precision=EXACT)
    if SOFT:
        s = tl.where(allowed, s, float("-inf"))
        acc, mass, top = _lower(acc, mass, top, tl.maximum(top, tl.max(s, 1)))
        w = tl.exp(s - top[:, None])
    else:
        s += shift[:, None]
        w = tl.where(allowed, _odd_power(s, DEGREE) * s, 0.0)
    w = w.to(u.dtype)
    return tl.dot(w, u, acc, input_precision=EXACT), mass + tl.sum(w.to(tl.float32), 1), top


@triton.jit
def _make_room(acc, mass, top, far, lift):
    """Sums over what far weights exp(lift) far need; and what those are multiplied by."""
    log = tl.where(far > 0, lift + tl.log(tl.where(far > 0, far, 1.0)), float("-inf"))
    acc, mass, top = _lower(acc, mass, top, tl.maximum(top, log))
    return acc, mass, top, tl.exp(tl.minimum(lift - top, 80.0))


@triton.jit(do_not_specialize=["T", "n", "normaliser"])
def _forward(
    q, k, v, phi_q, phi_k, offset, lift, S, z, center, o, near_row, far_row, table, places, T, n, normaliser,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr, SOFT: tl.constexpr,
    DEGREE: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, STACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """o [B, T, HQ, E] and, for the backward pass, near_row and far_row [B, T, HQ].

    They hold 1 / den, which is 0 where no key has weight; for SOFT the log of den, and exp(lift) / den.

    Grid     (tiles of BM / STACK tokens, HQ / STACK, B): a tile is STACK query heads of one group.
    Reads    q, k, v, phi_q, phi_k, offset [HQ] or None, lift [B, T, HQ] for SOFT, S, z, center [B, H, E]. The
             sinks; the window's keys up to the diagonal, BN at a time; the chunk's keys before the window;
             then the whole state, PAIR features at a time.
    """
    F: tl.constexpr = PAIRS * PAIR
    TOKENS: tl.constexpr = BM // STACK
    batch = tl.program_id(2).to(tl.int64)
    doc, origin, T, base, _n, place = _document(table, places, tl.program_id(0), batch, T, n)
    t0 = place * TOKENS
    if table is not None:  # noqa: SIM102
        if t0 >= T:
            return
    start = tl.maximum(t0 // C * C - (W - C), 0)
    chunk = start // CHUNK
    head0 = tl.program_id(1) * STACK
    h = head0 // (HQ // H)
    m = tl.arange(0, BM)
    token = t0 + m // STACK
    head = head0 + m % STACK
    real = token < T
    row = (origin + token) * HQ + head
    x = _load(q, row, real, D, BD)
    acc = tl.zeros((BM, BE), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    shift = tl.zeros((BM,), tl.float32)
    if offset is not None:
        shift = tl.load(offset + head)
    if SOFT:
        shift = tl.load(lift + row, mask=real, other=0.0)
    if SINKS > 0:  # noqa: SIM102, since only the first is known to the compiler
        if start > 0:
            j = tl.arange(0, 16)
            key = (origin + j) * H + h
            here = (j < SINKS) & (j < start)
            y, u = _load(k, key, here, D, BD), _load(v, key, here, E, BE)
            acc, mass, top = _near(acc, mass, top, x, y, u, here[None, :], shift, DEGREE, SOFT)
    for j0 in range(start, tl.minimum(t0 + TOKENS, T), BN):
        j = j0 + tl.arange(0, BN)
        key = (origin + j) * H + h
        y, u = _load(k, key, j < T, D, BD), _load(v, key, j < T, E, BE)
        acc, mass, top = _near(acc, mass, top, x, y, u, j[None, :] <= token[:, None], shift, DEGREE, SOFT)
    if CHUNK > C or W > C:
        phi = _load(phi_q, row, real, R, BR)
        for j0 in range(chunk * CHUNK, start, BN):
            j = j0 + tl.arange(0, BN)
            key = (origin + j) * H + h
            s = tl.dot(phi, tl.trans(_load(phi_k, key, j >= SINKS, R, BR)), input_precision=EXACT)
            w = s * s
            if SOFT:
                acc, mass, top, factor = _make_room(acc, mass, top, tl.sum(w, 1), shift)
                w = w * factor[:, None]
            u = _load(v, key, j >= SINKS, E, BE)
            w = w.to(u.dtype)
            mass += tl.sum(w.to(tl.float32), 1)
            acc = tl.dot(w, u, acc, input_precision=EXACT)
    if chunk > 0:
        slot = (base + chunk) * H + h
        far, live = _far_mass(_load(phi_q, row, real, R, BR), z + slot * F, R, SLICES, BR)
        live = live & real
        if SOFT:
            acc, mass, top, factor = _make_room(acc, mass, top, far, shift)
            far = far * factor
        mass += far
        f = tl.arange(0, PAIR)
        for p in range(PAIRS):
            a, b, _weight = _pair(p, SLICES)
            left = _slice(phi_q, row, live, a, R)
            if SOFT:
                left = left * factor[:, None]
            features = _outer(left, _slice(phi_q, row, live, b, R), BM)
            state = _load(S, slot * F + p * PAIR + f, f >= 0, E, BE)
            acc = tl.dot(features.to(state.dtype), state, acc, input_precision=EXACT)
        e = tl.arange(0, BE)
        middle = tl.load(center + (doc * H + h) * E + e, mask=e < E, other=0.0)
        acc += far[:, None] * middle.to(tl.float32)[None, :]
    if SOFT:
        mass += normaliser * tl.exp(tl.minimum(-top, 80.0))
        log = top + tl.log(mass)
        tl.store(near_row + row, log, mask=real)
        tl.store(far_row + row, tl.exp(tl.minimum(shift - log, 80.0)), mask=real)
    else:
        mass += normaliser
    inverse = tl.where(mass > 0, 1 / mass, 0.0)
    if not SOFT:
        tl.store(near_row + row, inverse, mask=real)
    _save(o, row, real, acc * inverse[:, None], E, BE)


@triton.jit
def _near_gradient(
    acc, whole, even, slope, climb, x, y, u, g, dot, near, allowed, shift,
    DEGREE: tl.constexpr, SOFT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Adds a tile's gradient of queries to acc, and to the rows' sums: see _settle."""
    s = tl.dot(x, tl.trans(y), input_precision=EXACT)
    dw = tl.dot(g, tl.trans(u), input_precision=EXACT) - dot[:, None]
    if SOFT:
        w = tl.where(allowed, tl.exp(s - near[:, None]), 0.0)
        ds = w * dw
        whole += tl.sum(w, 1)
        even += tl.sum(ds, 1)
    else:
        s += shift[:, None]
        power = tl.where(allowed, _odd_power(s, DEGREE) * near[:, None], 0.0)
        ds = DEGREE * power * dw
        if OFFSET:
            w = power * s
            whole += tl.sum(w, 1)
            even += tl.sum(w * dw, 1)
            slope += DEGREE * tl.sum(power, 1)
            climb += tl.sum(ds, 1)
    return tl.dot(ds.to(y.dtype), y, acc, input_precision=EXACT), whole, even, slope, climb


@triton.jit
def _settle(whole, even, dot, none):
    """What delta = do . o lacks because o and the weights in den are rounded; and 1 over the shares' sum.

    Shares p of weights sum to 1 - none, and p (do . v - delta) to none delta, where none is the normaliser's
    share: what the sums, in float32, differ by is the rounding. It matters for scalars a head or row, whose
    gradients are sums over many keys of both signs.
    """
    total = whole + none
    inverse = tl.where(total > 0, 1 / total, 0.0)
    return (even - dot * none) * inverse, inverse


@triton.jit(do_not_specialize=["T", "n", "normaliser"])
def _queries(
    q, k, v, phi_q, phi_k, offset, S, z, center, o, near_row, far_row, do,
    dq, dphi_q, doffset, dlift, delta, far_delta, table, places, T, n, normaliser,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr, SOFT: tl.constexpr,
    DEGREE: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, STACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dq, dphi_q, delta = do . o and do . (o - center) [B, T, HQ]; dlift, or doffset's addends, alike.

    Grid and tiles as _forward. Each pair's [BM, PAIR] gradient of features is brought down to its two slices
    of phi at once.
    """
    F: tl.constexpr = PAIRS * PAIR
    TOKENS: tl.constexpr = BM // STACK
    batch = tl.program_id(2).to(tl.int64)
    doc, origin, T, base, _n, place = _document(table, places, tl.program_id(0), batch, T, n)
    t0 = place * TOKENS
    if table is not None:  # noqa: SIM102
        if t0 >= T:
            return
    start = tl.maximum(t0 // C * C - (W - C), 0)
    chunk = start // CHUNK
    head0 = tl.program_id(1) * STACK
    h = head0 // (HQ // H)
    m = tl.arange(0, BM)
    token = t0 + m // STACK
    head = head0 + m % STACK
    real = token < T
    row = (origin + token) * HQ + head
    e = tl.arange(0, BE)
    g = _load(do, row, real, E, BE)
    dot = tl.sum(g.to(tl.float32) * _load(o, row, real, E, BE).to(tl.float32), 1)
    middle = tl.load(center + (doc * H + h) * E + e, mask=e < E, other=0.0).to(tl.float32)
    far_dot = dot - tl.sum(g.to(tl.float32) * middle[None, :], 1)
    near = tl.load(near_row + row, mask=real, other=0.0)
    shift = tl.zeros((BM,), tl.float32)
    if offset is not None:
        shift = tl.load(offset + head)
    x = _load(q, row, real, D, BD)
    acc = tl.zeros((BM, BD), tl.float32)
    OFFSET: tl.constexpr = offset is not None
    whole = tl.zeros((BM,), tl.float32)
    even = tl.zeros((BM,), tl.float32)
    slope = tl.zeros((BM,), tl.float32)
    climb = tl.zeros((BM,), tl.float32)
    if SINKS > 0:  # noqa: SIM102, since only the first is known to the compiler
        if start > 0:
            j = tl.arange(0, 16)
            key = (origin + j) * H + h
            here = (j < SINKS) & (j < start)
            y, u = _load(k, key, here, D, BD), _load(v, key, here, E, BE)
            acc, whole, even, slope, climb = _near_gradient(
                acc, whole, even, slope, climb, x, y, u, g, dot, near, here[None, :], shift,
                DEGREE, SOFT, OFFSET,
            )  # fmt: skip
    for j0 in range(start, tl.minimum(t0 + TOKENS, T), BN):
        j = j0 + tl.arange(0, BN)
        key = (origin + j) * H + h
        y, u = _load(k, key, j < T, D, BD), _load(v, key, j < T, E, BE)
        acc, whole, even, slope, climb = _near_gradient(
            acc, whole, even, slope, climb, x, y, u, g, dot, near, j[None, :] <= token[:, None], shift,
            DEGREE, SOFT, OFFSET,
        )  # fmt: skip
    _save(dq, row, real, acc, D, BD)
    share = tl.zeros((BM,), tl.float32)  # of far keys
    gain = tl.zeros((BM,), tl.float32)  # their p (do . v - delta)
    scale = tl.load(far_row + row, mask=real, other=0.0)
    direct = tl.zeros((BM, BR), tl.float32)
    if CHUNK > C or W > C:
        phi = _load(phi_q, row, real, R, BR)
        for j0 in range(chunk * CHUNK, start, BN):
            j = j0 + tl.arange(0, BN)
            key = (origin + j) * H + h
            y, u = _load(phi_k, key, j >= SINKS, R, BR), _load(v, key, j >= SINKS, E, BE)
            s = tl.dot(phi, tl.trans(y), input_precision=EXACT)
            dw = tl.dot(g, tl.trans(u), input_precision=EXACT) - dot[:, None]
            w = s * (scale[:, None] * s)
            share += tl.sum(w, 1)
            gain += tl.sum(w * dw, 1)
            ds = 2 * s * (scale[:, None] * dw)
            direct = tl.dot(ds.to(y.dtype), y, direct, input_precision=EXACT)
    ROUND: tl.constexpr = BR // SIDE
    which = tl.arange(0, ROUND)
    grad = tl.zeros((BM, ROUND, SIDE), tl.float32)
    if chunk > 0:
        slot = (base + chunk) * H + h
        far, live = _far_mass(_load(phi_q, row, real, R, BR), z + slot * F, R, SLICES, BR)
        live = live & real
        f = tl.arange(0, PAIR)
        scale = tl.where(live, scale, 0.0)
        share += far * scale
        for p in range(PAIRS):
            a, b, _weight = _pair(p, SLICES)
            state = _load(S, slot * F + p * PAIR + f, f >= 0, E, BE)
            ones = tl.load(z + slot * F + p * PAIR + f)
            df = tl.dot(g, tl.trans(state), input_precision=EXACT) - far_dot[:, None] * ones[None, :]
            df = tl.reshape(df * scale[:, None], (BM, SIDE, SIDE))
            right = _slice(phi_q, row, live, b, R)
            left = _slice(phi_q, row, live, a, R)
            dleft = tl.sum(df * right[:, None, :], 2)
            dright = tl.sum(df * left[:, :, None], 1)
            grad += tl.where((which == a)[None, :, None], dleft[:, None, :], 0.0)
            grad += tl.where((which == b)[None, :, None], dright[:, None, :], 0.0)
    total = tl.reshape(grad, (BM, BR))
    if SOFT or OFFSET:  # a far weight is a square of phi_q
        gain += tl.sum(total * _load(phi_q, row, real, R, BR).to(tl.float32), 1) / 2
        none = normaliser * near
        if SOFT:
            none = normaliser * tl.exp(tl.minimum(-near, 80.0))
        lack, inverse = _settle(whole + share, even + gain, dot, none)
        if OFFSET:
            tl.store(doffset + row, (climb - lack * slope) * inverse, mask=real)
        if SOFT:
            tl.store(dlift + row, (gain - lack * share) * inverse, mask=real)
        dot += lack
        far_dot += lack
    tl.store(delta + row, dot, mask=real)
    tl.store(far_delta + row, far_dot, mask=real)
    if CHUNK > C or W > C:
        total += direct
    _save(dphi_q, row, real, total, R, BR)


@triton.jit
def _queries_near(
    gk, gv, y, u, x, g, near, dot, shift, allowed, DEGREE: tl.constexpr, SOFT: tl.constexpr
):  # fmt: skip
    """Adds to the gradients of keys y and values u what a tile of queries x with output gradients g asks."""
    s = tl.dot(y, tl.trans(x), input_precision=EXACT)
    dw = tl.dot(u, tl.trans(g), input_precision=EXACT) - dot[None, :]
    if SOFT:
        w = tl.where(allowed, tl.exp(s - near[None, :]), 0.0)
        ds = w * dw
    else:
        s += shift[None, :]
        power = tl.where(allowed, _odd_power(s, DEGREE) * near[None, :], 0.0)
        w = power * s
        ds = DEGREE * power * dw
    gv = tl.dot(w.to(g.dtype), g, gv, input_precision=EXACT)
    return tl.dot(ds.to(x.dtype), x, gk, input_precision=EXACT), gv


@triton.jit(do_not_specialize=["T"])
def _sinks(
    q, k, v, offset, near_row, delta, do, dk, dv, table, places, T,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    SINKS: tl.constexpr, SOFT: tl.constexpr, DEGREE: tl.constexpr, STACK: tl.constexpr, SPAN: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What queries whose window has left the sinks behind ask of them: dk, dv [B, spans, SINKS, H, D or E].

    Grid (spans of SPAN tokens, H, B). Sums of each span, in float32; _keys adds them up.
    """
    TOKENS: tl.constexpr = BM // STACK
    TURNS: tl.constexpr = HQ // H // STACK
    batch = tl.program_id(2).to(tl.int64)
    _doc, origin, T, _base, _n, place = _document(table, places, tl.program_id(0), batch, T, 0)
    begin = place * SPAN
    if table is not None:  # noqa: SIM102
        if begin >= T:
            return
    h = tl.program_id(1)
    j = tl.arange(0, 16)
    here = (j < SINKS) & (j < T)
    key = (origin + j) * H + h
    y, u = _load(k, key, here, D, BD), _load(v, key, here, E, BE)
    gk = tl.zeros((16, BD), tl.float32)
    gv = tl.zeros((16, BE), tl.float32)
    m = tl.arange(0, BM)
    turns = tl.cdiv(tl.maximum(tl.minimum(begin + SPAN, T) - begin, 0), TOKENS) * TURNS
    for i in range(turns):
        token = begin + i // TURNS * TOKENS + m // STACK
        head = (h * TURNS + i % TURNS) * STACK + m % STACK
        row = (origin + token) * HQ + head
        real = token < T
        x, g = _load(q, row, real, D, BD), _load(do, row, real, E, BE)
        near = tl.load(near_row + row, mask=real, other=0.0)
        dot = tl.load(delta + row, mask=real, other=0.0)
        shift = tl.zeros((BM,), tl.float32)
        if offset is not None:
            shift = tl.load(offset + head)
        start = token // C * C - (W - C)
        allowed = here[:, None] & (j[:, None] < start[None, :]) & real[None, :]
        gk, gv = _queries_near(gk, gv, y, u, x, g, near, dot, shift, allowed, DEGREE, SOFT)
    slot = ((batch * tl.num_programs(0) + tl.program_id(0)) * SINKS + j) * H + h
    _save(dk, slot, j < SINKS, gk, D, BD)
    _save(dv, slot, j < SINKS, gv, E, BE)


@triton.jit
def _apart(token, j, C: tl.constexpr, W: tl.constexpr):
    """Which keys j the window of tokens has passed, [keys, tokens]."""
    return (token // C)[None, :] - (j // C)[:, None] >= W // C


@triton.jit(do_not_specialize=["T", "n", "spans"])
def _keys(
    q, k, v, far_v, phi_q, phi_k, offset, S, z, near_row, far_row, delta, do, sink_dk, sink_dv, first_span,
    dk, dv, dphi_k, table, places, T, n, spans,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr, SOFT: tl.constexpr,
    DEGREE: tl.constexpr, SLICES: tl.constexpr, PAIRS: tl.constexpr, STACK: tl.constexpr, SPAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dk, dv, dphi_k. S and z are R and its ones column, far_v is v less its center.

    Grid (tiles of BN keys, H, B). First the far part; then, BM / STACK tokens of STACK heads at a time, the
    queries of the chunk whose window has passed and those whose window holds the tile. sink_dk and sink_dv
    are what _sinks found; first_span [N] has where a document's spans start, None for `spans` a row. A tile
    lies in one chunk, and may touch several blocks.
    """
    F: tl.constexpr = PAIRS * PAIR
    TOKENS: tl.constexpr = BM // STACK
    TURNS: tl.constexpr = HQ // H // STACK
    batch = tl.program_id(2).to(tl.int64)
    doc, origin, T, base, _n, place = _document(table, places, tl.program_id(0), batch, T, n)
    j0 = place * BN
    if table is not None:  # noqa: SIM102
        if j0 >= T:
            return
    passed = (j0 // C + W // C) * C  # the first token that sees keys of the tile as far
    gone = ((j0 + BN - 1) // C + W // C) * C  # the first that sees none of them as near
    away = (j0 // CHUNK + 1) * CHUNK + W - C  # the first that sees it through a state
    h = tl.program_id(1)
    j = j0 + tl.arange(0, BN)
    real = j < T
    sketched = real & (j >= SINKS)
    key = (origin + j) * H + h
    gv = tl.zeros((BN, BE), tl.float32)
    ROUND: tl.constexpr = BR // SIDE
    which = tl.arange(0, ROUND)
    grad = tl.zeros((BN, ROUND, SIDE), tl.float32)
    if away < T:
        u = _load(far_v, key, real, E, BE)
        slot = (base + j0 // CHUNK) * H + h
        f = tl.arange(0, PAIR)
        for p in range(PAIRS):
            a, b, weight = _pair(p, SLICES)
            state = _load(S, slot * F + p * PAIR + f, f >= 0, E, BE)
            ones = tl.load(z + slot * F + p * PAIR + f)
            right = _slice(phi_k, key, sketched, b, R) * weight
            left = _slice(phi_k, key, sketched, a, R)
            gv = tl.dot(_outer(left, right, BN).to(state.dtype), state, gv, input_precision=EXACT)
            df = tl.dot(u, tl.trans(state), input_precision=EXACT) + ones[None, :]
            df = tl.reshape(df, (BN, SIDE, SIDE))
            dleft = tl.sum(df * right[:, None, :], 2)
            dright = tl.sum(df * left[:, :, None], 1) * weight
            grad += tl.where((which == a)[None, :, None], dleft[:, None, :], 0.0)
            grad += tl.where((which == b)[None, :, None], dright[:, None, :], 0.0)
    total = tl.reshape(grad, (BN, BR))
    u = _load(v, key, real, E, BE)
    m = tl.arange(0, BM)
    if CHUNK > C or W > C:
        phi = _load(phi_k, key, sketched, R, BR)
        turns = tl.cdiv(tl.maximum(tl.minimum(away, T) - passed, 0), TOKENS) * TURNS
        for i in range(turns):
            token = passed + i // TURNS * TOKENS + m // STACK
            head = (h * TURNS + i % TURNS) * STACK + m % STACK
            row = (origin + token) * HQ + head
            here = token < T
            x, g = _load(phi_q, row, here, R, BR), _load(do, row, here, E, BE)
            scale = tl.load(far_row + row, mask=here, other=0.0)
            dot = tl.load(delta + row, mask=here, other=0.0)
            s = tl.dot(phi, tl.trans(x), input_precision=EXACT)
            if C % BN:
                s = tl.where(_apart(token, j, C, W), s, 0.0)
            dw = tl.dot(u, tl.trans(g), input_precision=EXACT) - dot[None, :]
            s_scaled = s * scale[None, :]
            gv = tl.dot((s * s_scaled).to(g.dtype), g, gv, input_precision=EXACT)
            total = tl.dot((2 * s_scaled * dw).to(x.dtype), x, total, input_precision=EXACT)
    total = tl.where(sketched[:, None], total, 0.0)
    _save(dphi_k, key, real, total, R, BR)
    y = _load(k, key, real, D, BD)
    gk = tl.zeros((BN, BD), tl.float32)
    if SINKS > 0:
        span = batch * spans
        if first_span is not None:
            span = tl.load(first_span + doc).to(tl.int64)
        for i in range(tl.where(j0 < SINKS, tl.cdiv(T, SPAN), 0)):
            sink = ((span + i) * SINKS + j) * H + h
            gk += _load(sink_dk, sink, j < SINKS, D, BD)
            gv += _load(sink_dv, sink, j < SINKS, E, BE)
    start = j0 // TOKENS * TOKENS
    turns = tl.cdiv(tl.minimum(gone, T) - start, TOKENS) * TURNS
    for i in range(turns):
        token = start + i // TURNS * TOKENS + m // STACK
        head = (h * TURNS + i % TURNS) * STACK + m % STACK
        row = (origin + token) * HQ + head
        here = token < T
        x, g = _load(q, row, here, D, BD), _load(do, row, here, E, BE)
        near = tl.load(near_row + row, mask=here, other=0.0)
        dot = tl.load(delta + row, mask=here, other=0.0)
        shift = tl.zeros((BM,), tl.float32)
        if offset is not None:
            shift = tl.load(offset + head)
        allowed = (j[:, None] <= token[None, :]) & here[None, :]
        if C % BN:
            allowed = allowed & ~_apart(token, j, C, W)
        gk, gv = _queries_near(gk, gv, y, u, x, g, near, dot, shift, allowed, DEGREE, SOFT)
    _save(dk, key, real, gk, D, BD)
    _save(dv, key, real, gv, E, BE)


class Tiles(NamedTuple):
    """How one kernel is cut: rows of queries (_states: features), keys a step, warps, loads in flight."""

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
    sinks: Tiles


def plan(dtype: torch.dtype, widest: int) -> Plan:
    """The tiles for operands of dtype and heads of at most `widest` numbers."""
    if dtype == torch.float32:
        size = 32 if widest <= 128 else 16
        small, sums = Tiles(size, size, 8, 1), Tiles(64, 32, 4, 1)
        return Plan(small, small, small, sums, sums, small)
    if widest > 128:
        return Plan(
            Tiles(64, 64, 8, 1),
            Tiles(64, 32, 8, 1),
            Tiles(32, 64, 8, 1),
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 2),
            Tiles(32, 16, 4, 2),
        )
    queries = Tiles(64, 32, 4, 3)
    return Plan(
        queries,
        queries,
        Tiles(64, 64, 4, 2),
        Tiles(128, 64, 4, 3),
        Tiles(64, 128, 4, 2),
        Tiles(32, 16, 4, 2),
    )


def unsupported(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, *,
    degree: int, block: int, soft: bool = False, sinks: int = 0,
) -> str | None:  # fmt: skip
    """What in such inputs these kernels cannot take, or None."""
    D, E, r = q.shape[-1], v.shape[-1], phi_q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {q.dtype}"  # in float16 a power of a score soon passes 65,504
    if degree not in (2, 4, 8) and not soft:
        return f"degree {degree}"
    if r % TILE or not TILE <= r <= 64:
        return f"sketch size {r}"
    if block < 16 or block % 16:
        return f"block {block}"
    if not 0 <= sinks <= 16:
        return f"{sinks} sinks"
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
    W: int
    sinks: int
    soft: bool
    degree: int

    @property
    def chunk(self) -> int:
        """Tokens between two states: whole blocks."""
        return self.C * max(1, CHUNK // self.C)

    @property
    def last(self) -> int:
        """The last state's chunk: where the open block's window starts."""
        return max(self.T // self.C * self.C - (self.W - self.C), 0) // self.chunk

    @property
    def segments(self) -> int:
        return triton.cdiv(self.last + 1, SEGMENT.value)

    @property
    def pairs(self) -> int:
        return num_features(self.R) // TILE**2

    def stacked(self, tiles: Tiles) -> tuple[int, int]:
        return _stack(self.HQ // self.H, tiles.rows, self.C)

    def query_tiles(self, tiles: Tiles) -> dict:
        stack, rows = self.stacked(tiles)
        return {
            **self.exact_tiles(tiles), "R": self.R, "CHUNK": self.chunk, "SLICES": self.R // TILE,
            "PAIRS": self.pairs, "STACK": stack, "BM": rows, "BN": min(tiles.keys, self.C & -self.C),
            "BR": _power_of_two(self.R),
        }  # fmt: skip

    def key_tiles(self, tiles: Tiles) -> dict:
        return {**self.query_tiles(tiles), "BN": min(tiles.keys, self.chunk & -self.chunk)}

    def chunk_tiles(self, heads: int, reverse: bool) -> dict:
        return {
            "HEADS": heads, "GROUP": heads // self.H, "R": self.R, "CHUNK": self.chunk, "C": self.C,
            "W": self.W, "FIRST": self.sinks, "SLICES": self.R // TILE, "PAIRS": self.pairs,
            "REVERSE": reverse,
        }  # fmt: skip

    def sum_tiles(self, heads: int, reverse: bool, tiles: Tiles) -> dict:
        return {
            **self.chunk_tiles(heads, reverse), "E": self.E, "BE": min(128, _power_of_two(self.E)),
            "TWO": tiles.rows > TILE**2 and self.pairs % 2 == 0,
            "BC": min(tiles.keys, self.chunk & -self.chunk), "num_warps": tiles.warps,
            "num_stages": tiles.stages, "maxnreg": registers(),
        }  # fmt: skip

    def mass_tiles(self, heads: int, reverse: bool, tiles: Tiles) -> dict:
        return {
            **self.chunk_tiles(heads, reverse), "BR": _power_of_two(self.R),
            "BC": min(tiles.keys, self.chunk & -self.chunk), "num_warps": 4, "num_stages": tiles.stages,
        }  # fmt: skip

    def exact_tiles(self, tiles: Tiles) -> dict:
        return {
            "HQ": self.HQ, "H": self.H, "D": self.D, "E": self.E, "C": self.C, "W": self.W,
            "SINKS": self.sinks, "SOFT": self.soft, "DEGREE": self.degree, "BD": _power_of_two(self.D),
            "BE": _power_of_two(self.E), "num_warps": tiles.warps, "num_stages": tiles.stages,
        }  # fmt: skip


def _shape(q, k, v, phi_q, rule: list[int]) -> _Shape:
    """rule: block, window, sinks, whether near weights are softmax, degree."""
    B, T, HQ, D = q.shape
    block, window, sinks, soft, degree = rule
    return _Shape(
        B, T, HQ, k.shape[2], D, v.shape[-1], phi_q.shape[-1], block, window, sinks, bool(soft), degree
    )


class _Packed(NamedTuple):
    """Where documents packed in a row lie; without reading cu_seqlens on the host."""

    table: torch.Tensor  # [2, N + 1] int32, where documents and their states start
    states: int  # no fewer than there are
    T: int

    @property
    def documents(self) -> int:
        return self.table.shape[1] - 1

    @classmethod
    def of(cls, cu: torch.Tensor | None, s: _Shape) -> "_Packed | None":
        if cu is None:
            return None
        N = len(cu) - 1
        table = torch.empty(2, N + 1, dtype=torch.int32, device=cu.device)
        _starts[(1,)](cu, table, N, CHUNK=s.chunk, C=s.C, W=s.W, BN=_power_of_two(N + 1))
        return cls(table, s.T // s.chunk + N, s.T)

    def places(self, size: int, states: bool = False) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Programs of `size` tokens or states each: N, then document and place of each; firsts; how many."""
        N, ends = self.documents, self.table[int(states)]
        count = (self.states if states else self.T) // size + N
        places, firsts = (ends.new_empty(n) for n in (1 + 2 * count, N))
        _programs[(N,)](ends, places, firsts, N, size, count, BN=_power_of_two(N), BP=256)
        return places, firsts, count


def _spread(packed: _Packed | None, s: _Shape, size: int) -> tuple[tuple, int]:
    """The arguments (table, places) of a kernel whose programs take `size` tokens each, and their number."""
    if packed is None:
        return (None, None), triton.cdiv(s.T, size)
    places, _, count = packed.places(size)
    return (packed.table, places), count


def _sum_states(
    phi, x, scale, delta, packed, s: _Shape, tiles: Tiles, final=None, center=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """S [B, n, H, F, E] and z [B, n, H, F], before each chunk; R, after it, with scale.

    final [B, H, F, E + 1], with the center of x, gets the sums over all chunks.
    """
    reverse, F, n, segments = scale is not None, s.pairs * TILE**2, s.last + 1, s.segments
    if n == 1 and packed is None and final is None:  # nobody looks that far
        return x, x
    table, places, documents = None, None, s.B
    if packed is not None:
        n, table, documents = packed.states, packed.table, packed.documents
        places, _, segments = packed.places(SEGMENT.value, states=True)
    S = x.new_empty(s.B, n, s.H, F, s.E)
    z, own = x.new_empty(2, s.B, n, s.H, F, dtype=torch.float32)
    totals = x.new_empty(s.B, segments, s.H, F, s.E, dtype=torch.float32)
    options, heads = s.mass_tiles(phi.shape[2], reverse, tiles), s.B * s.H
    _masses[(segments * SEGMENT.value, heads)](phi, scale, delta, own, table, places, s.T, n, **options)
    _prefix[(triton.cdiv(F, 64), documents, s.H)](
        own, z, final, table, n, s.H, F, s.E, REVERSE=reverse, BN=32, BF=64, num_warps=4
    )
    options = s.sum_tiles(phi.shape[2], reverse, tiles)
    programs = s.pairs // (1 + options["TWO"]) * triton.cdiv(s.E, options["BE"])
    _states[(programs, segments, heads)](phi, x, scale, S, totals, table, places, s.T, n, **options)
    if segments > 1 or final is not None:
        _join[(triton.cdiv(F * s.E, 2048), segments, heads)](
            S, totals, final, center, table, places, n, segments, s.H, F * s.E, s.E,
            REVERSE=reverse, BS=2048, num_warps=8,
        )  # fmt: skip
    return S, z


SPAN = 256  # tokens that one program centers, or whose gradients of sinks it sums


def _centered(v: torch.Tensor, packed: _Packed | None, s: _Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The center [N, H, E] of a document's values, and v less it."""
    documents = s.B if packed is None else packed.documents
    center, far_v = v.new_empty(documents, s.H, s.E), torch.empty_like(v)
    where, spans = _spread(packed, s, SPAN)
    _center[(spans, s.H, s.B)](
        v, center, far_v, *where, s.T,
        H=s.H, E=s.E, SPAN=SPAN, EARLY=EARLY, BT=32, BE=_power_of_two(s.E), num_warps=4,
    )  # fmt: skip
    return center, far_v


def _sink_gradients(q, k, v, offset, near, delta, do, packed, s: _Shape, tiles: Tiles):
    """dk and dv [B, spans, sinks, H, D or E] float32 of the sinks, and where each document's spans start."""
    stack, rows = s.stacked(tiles)
    first, spans, where = None, triton.cdiv(s.T, SPAN), (None, None)
    if packed is not None:
        places, first, spans = packed.places(SPAN)
        where = packed.table, places
    dk, dv = (q.new_empty(s.B, spans, s.sinks, s.H, size, dtype=torch.float32) for size in (s.D, s.E))
    _sinks[(spans, s.H, s.B)](
        q, k, v, offset, near, delta, do, dk, dv, *where, s.T,
        STACK=stack, SPAN=SPAN, BM=rows, **s.exact_tiles(tiles),
    )  # fmt: skip
    return dk, dv, first


@torch.library.custom_op(f"{OPS}::forward", mutates_args=())
def _forward_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor,
    offset: torch.Tensor | None, lift: torch.Tensor | None, cu: torch.Tensor | None,
    rule: list[int], normaliser: float, keep_state: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    s, cut = _shape(q, k, v, phi_q, rule), plan(q.dtype, max(q.shape[-1], v.shape[-1]))
    packed = _Packed.of(cu, s)
    center, far_v = _centered(v, packed, s)
    final = _final_of(q, k, v, phi_q, keep_state)
    S, z = _sum_states(phi_k, far_v, None, None, packed, s, cut.states, final if keep_state else None, center)
    o, near = torch.empty(s.B, s.T, s.HQ, s.E, dtype=v.dtype, device=v.device), _rows_of(q)
    far = _rows_of(q) if s.soft else q.new_empty(0, dtype=torch.float32)
    options = s.query_tiles(cut.forward)
    where, tiles = _spread(packed, s, options["BM"] // options["STACK"])
    _forward[(tiles, s.HQ // options["STACK"], s.B)](
        q, k, v, phi_q, phi_k, offset, lift, S, z, center, o, near, far, *where, s.T, s.last + 1, normaliser,
        **options,
    )  # fmt: skip
    return o, near, far, final


def _final_of(q, k, v, phi_q, keep_state: bool) -> torch.Tensor:
    shape = q.shape[0], k.shape[2], num_features(phi_q.shape[-1]), v.shape[-1] + 1
    return q.new_empty(shape if keep_state else 0, dtype=torch.float32)


@_forward_op.register_fake
def _(q, k, v, phi_q, phi_k, offset, lift, cu, rule, normaliser, keep_state):
    far = _rows_of(q) if rule[3] else q.new_empty(0, dtype=torch.float32)
    o = v.new_empty(*q.shape[:3], v.shape[-1])
    return o, _rows_of(q), far, _final_of(q, k, v, phi_q, keep_state)


@torch.library.custom_op(f"{OPS}::backward", mutates_args=())
def _backward_op(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor,
    phi_k: torch.Tensor, offset: torch.Tensor | None, cu: torch.Tensor | None, o: torch.Tensor,
    near: torch.Tensor, far: torch.Tensor, rule: list[int], normaliser: float,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    s, cut = _shape(q, k, v, phi_q, rule), plan(q.dtype, max(q.shape[-1], v.shape[-1]))
    n, packed = s.last + 1, _Packed.of(cu, s)
    far = far if s.soft else near
    center, far_v = _centered(v, packed, s)
    S, z = _sum_states(phi_k, far_v, None, None, packed, s, cut.states)
    dq, dphi_q = torch.empty_like(q), torch.empty_like(phi_q)
    delta, far_delta = torch.empty_like(near), torch.empty_like(near)
    doffset = torch.empty_like(near) if offset is not None else None
    dlift = torch.empty_like(near) if s.soft else None
    options = s.query_tiles(cut.queries)
    where, tiles = _spread(packed, s, options["BM"] // options["STACK"])
    _queries[(tiles, s.HQ // options["STACK"], s.B)](
        q, k, v, phi_q, phi_k, offset, S, z, center, o, near, far, do,
        dq, dphi_q, doffset, dlift, delta, far_delta, *where, s.T, n, normaliser, **options,
    )  # fmt: skip
    del S, z
    S, z = _sum_states(phi_q, do, far, far_delta, packed, s, cut.gradients)
    sinks = (None, None, None)
    if s.sinks:
        sinks = _sink_gradients(q, k, v, offset, near, delta, do, packed, s, cut.sinks)
    dk, dv, dphi_k = torch.empty_like(k), torch.empty_like(v), torch.empty_like(phi_k)
    options = s.key_tiles(cut.keys)
    where, tiles = _spread(packed, s, options["BN"])
    _keys[(tiles, s.H, s.B)](
        q, k, v, far_v, phi_q, phi_k, offset, S, z, near, far, delta, do, *sinks,
        dk, dv, dphi_k, *where, s.T, n, triton.cdiv(s.T, SPAN), SPAN=SPAN, **options,
    )  # fmt: skip
    none = q.new_zeros(0)
    doffset = none if doffset is None else doffset.sum((0, 1))
    return dq, dk, dv, dphi_q, dphi_k, doffset, none.clone() if dlift is None else dlift


@_backward_op.register_fake
def _(do, q, k, v, phi_q, phi_k, offset, cu, o, near, far, rule, normaliser):
    doffset = q.new_empty(0) if offset is None else q.new_empty(q.shape[2], dtype=torch.float32)
    dlift = torch.empty_like(near) if rule[3] else q.new_empty(0)
    return *(torch.empty_like(x) for x in (q, k, v, phi_q, phi_k)), doffset, dlift


def _rows_of(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _keep(ctx, inputs, output):
    q, k, v, phi_q, phi_k, offset, _, cu, ctx.rule, ctx.normaliser, _ = inputs
    o, near, far, S = output
    ctx.mark_non_differentiable(near, far, S)
    ctx.save_for_backward(q, k, v, phi_q, phi_k, offset, cu, o, near, far)


def _gradients(ctx, do, _near, _far, _S):
    q, k, v, phi_q, phi_k, offset, cu, o, near, far = ctx.saved_tensors
    *grads, doffset, dlift = _backward_op(
        do.contiguous(), q, k, v, phi_q, phi_k, offset, cu, o, near, far, ctx.rule, ctx.normaliser
    )
    return *grads, None if offset is None else doffset, dlift if ctx.rule[3] else None, None, None, None, None


_forward_op.register_autograd(_gradients, setup_context=_keep)


def polysketch_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor, *,
    degree: int, block: int, window: int | None = None, sinks: int = 0, soft: bool = False,
    offset: torch.Tensor | None = None, far_scale: torch.Tensor | None = None, normaliser: float = 0.0,
    cu_seqlens: torch.Tensor | None = None, keep_state: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """chunked.polysketch without gates, for whole rows.

    Args:
        q, k, v, phi_q, phi_k: as there, all of one dtype, bfloat16 or float32 (full precision, slow).
        degree: 2, 4 or 8. block: a multiple of 16, best of 64. window, sinks: at most 16.
        soft: local="softmax". offset: [HQ] or None, for powers. far_scale: [HQ] or [B, T, HQ] or None.
        cu_seqlens: [N + 1] or None, documents packed in one row. keep_state: whether S is wanted.

    Returns:
        o [B, T, HQ, E] in v's dtype, and S [B, H, F, E + 1] float32 of the keys older than the open block's
        window, without gradient; None for packed documents or when not asked for.
    """
    q, k, v, phi_q, phi_k = (x.contiguous() for x in (q, k, v, phi_q, phi_k))
    rule = [block, window or block, sinks, int(soft), degree]
    lift = None
    if soft:
        lift = q.new_zeros(q.shape[2]) if far_scale is None else far_scale
        lift = lift.float().expand(q.shape[:3]).contiguous()
    elif far_scale is not None:  # a factor on (phi_q . phi_k) ** 2 is its root on phi_q
        phi_q = phi_q * (far_scale.float() / 2).exp().to(phi_q.dtype).unsqueeze(-1)
    if offset is not None:
        offset = offset.float().contiguous()
    cu = None if cu_seqlens is None else cu_seqlens.to(q.device, torch.int64)
    keep_state = keep_state and cu is None
    o, _, _, S = _forward_op(q, k, v, phi_q, phi_k, offset, lift, cu, rule, float(normaliser), keep_state)
    return o, S if keep_state else None
