"""One more token of each row on a GPU: what chunked._step does, without looking at a number.

A row's window lies in the state's buffers; the new key joins it in the open block, and o is a sum over the
sinks, the window and S, as in triton_block.py. When the token is its block's last, the oldest block of the
window goes into S and the window moves on. All that is decided inside the kernels, row by row, so that a step
can be captured in a CUDA graph.

The work of a key/value head is cut into parts, so that one row too has programs for a whole chip. S is met
once, by plain multiplications: a group of queries is too small for tensor cores. The state given stays as it
is, and a new one is written; or, for a caller who owns it, it is changed in place: then a step reads S and
the window, and writes one key, but for block ends.

Kernels   _parts    rows H x parts             parts [N, H, P, G, E], stats [N, H, P, G, 2], begun [N], S
                    the first parts share the window (and the first has the sinks), the others S
          _finish   rows x (HQ and buffers)    o, and all of the state but S
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
from unsoftmax.kernels.polysketch.triton_block import EXACT, PAIR, SIDE, _load, _odd_power, _pair

OPS = re.sub(r"\W", "_", __name__)  # a copy in a checkpoint's folder registers its own
PROGRAMS = 264  # at least so many where there is work for them: two a multiprocessor of the largest chips
KEYS = 32  # of the window in a tile
ALIGNED = 4  # numbers: rows of S that start at a multiple are read 16 bytes at a time


class Cut(NamedTuple):
    """How the work is cut; results do not depend on it but for rounding."""

    features: int  # of S in a part
    columns: int  # of values in a part of S
    tiles: int  # of KEYS keys in a part of the window
    warps: int
    finish_warps: int = 4


def cut(heads: int, features: int, columns: int, window: int) -> Cut:
    """What is shipped for so many rows x key/value heads. More registers than 128 a thread cost programs."""
    f, e = min(128, triton.next_power_of_2(features)), min(64, max(16, triton.next_power_of_2(columns)))
    while heads * triton.cdiv(features, f) * triton.cdiv(columns, e) < PROGRAMS and max(f, e) > 32:
        f, e = (f // 2, e) if f > e else (f, e // 2)
    tiles = 1 if heads * triton.cdiv(window, 2 * KEYS) < PROGRAMS else 2
    return Cut(f, e, tiles, warps=4)


@triton.jit
def _kept(
    old, new, n, h, p, slot, live, first, H: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows p of document n's buffer old [N, ROWS, H, SIZE], row slot from new [N, H, SIZE]; WIDE columns."""
    i = first + tl.arange(0, WIDE)
    inside = (i < SIZE)[None, :]
    at = (p * H + h)[:, None] * SIZE + i[None, :]
    before = tl.load(old + n * ROWS * H * SIZE + at, mask=(live & (p != slot))[:, None] & inside, other=0.0)
    fresh = tl.load(new + (n * H + h) * SIZE + i, mask=i < SIZE, other=0.0)
    return tl.where((live & (p == slot))[:, None], fresh[None, :], before)


@triton.jit
def _sketched(old, new, n, h, p, slot, live, i, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """Numbers i of the sketches at positions p, as _kept."""
    at = (p * H + h)[:, None] * R + i[None, :]
    before = tl.load(old + n * W * H * R + at, mask=(live & (p != slot))[:, None], other=0.0)
    fresh = tl.load(new + (n * H + h) * R + i)
    return tl.where((live & (p == slot))[:, None], fresh[None, :], before).to(tl.float32)


@triton.jit
def _meet(acc, mass, top, x, y, u, allowed, shift, DEGREE: tl.constexpr, SOFT: tl.constexpr):
    """Adds a tile of exact weights, keys y and values u; a tile may allow no key."""
    s = tl.dot(x, tl.trans(y), input_precision=EXACT)
    if SOFT:
        s = tl.where(allowed, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new > float("-inf"), new, 0.0)
        keep = tl.exp(top - base)
        acc, mass, top = acc * keep[:, None], mass * keep, new
        w = tl.exp(s - base[:, None])
    else:
        s += shift[:, None]
        w = tl.where(allowed, _odd_power(s, DEGREE) * s, 0.0)
    w = w.to(u.dtype)
    return tl.dot(w, u, acc, input_precision=EXACT), mass + tl.sum(w.to(tl.float32), 1), top


@triton.jit
def _near_part(
    q, k, v, offset, old_k, old_v, sink_k, sink_v, parts, stats, n, h, part, t, begin, slot,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, W: tl.constexpr,
    SINKS: tl.constexpr, SOFT: tl.constexpr, DEGREE: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """TILES tiles of the window; the first part has the sinks."""
    GROUP: tl.constexpr = HQ // H
    m = tl.arange(0, BG)
    real = m < GROUP
    x = _load(q, n * HQ + h * GROUP + m, real, D, BD)
    acc = tl.zeros((BG, BE), tl.float32)
    mass = tl.zeros((BG,), tl.float32)
    top = tl.full((BG,), float("-inf"), tl.float32)
    shift = tl.zeros((BG,), tl.float32)
    if offset is not None:
        shift = tl.load(offset + h * GROUP + m, mask=real, other=0.0)
    if SINKS > 0:  # noqa: SIM102
        if part == 0:
            j = tl.arange(0, 16)
            seated = (j < SINKS) & (j <= t)
            y = _kept(sink_k, k, n, h, j, t, seated, 0, H, SINKS, D, BD)
            u = _kept(sink_v, v, n, h, j, t, seated, 0, H, SINKS, E, BE)
            acc, mass, top = _meet(acc, mass, top, x, y, u, seated[None, :], shift, DEGREE, SOFT)
    least = tl.maximum(SINKS - begin, 0)  # the first position that counts
    start = tl.maximum(part * TILES, least // BN)
    for tile in range(start, tl.minimum((part + 1) * TILES, slot // BN + 1)):
        p = tile * BN + tl.arange(0, BN)
        here = (p <= slot) & (p >= least)
        y = _kept(old_k, k, n, h, p, slot, here, 0, H, W, D, BD)
        u = _kept(old_v, v, n, h, p, slot, here, 0, H, W, E, BE)
        acc, mass, top = _meet(acc, mass, top, x, y, u, here[None, :], shift, DEGREE, SOFT)
    row = ((n * H + h) * PARTS + part) * GROUP + m
    e = tl.arange(0, BE)
    tl.store(parts + row[:, None] * E + e[None, :], acc, mask=real[:, None] & (e < E)[None, :])
    tl.store(stats + row * 2, mass, mask=real)
    tl.store(stats + row * 2 + 1, top, mask=real)


@triton.jit
def _places(f, SLICES: tl.constexpr):
    """The two numbers of a sketch whose product is feature f, and the keys' weight."""
    a, b, weight = _pair(f // PAIR, SLICES)
    return a * SIDE + f % PAIR // SIDE, b * SIDE + f % SIDE, weight


@triton.jit
def _fold(
    v, phi_k, S, old_v, old_phi, S_after, n, h, f0, first, begin, slot,
    H: tl.constexpr, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr,
    SLICES: tl.constexpr, WIDE: tl.constexpr, WIDE_AFTER: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """BS features from f0 on of a head's S and BE columns, with the window's oldest block in them."""
    f, e = f0 + tl.arange(0, BS), first + tl.arange(0, BE)
    i, j, weight = _places(f, SLICES)
    added = tl.zeros((BS, BE), tl.float32)
    mass = tl.zeros((BS,), tl.float32)
    for p0 in range(tl.maximum(SINKS - begin, 0) // BC * BC, C, BC):
        p = p0 + tl.arange(0, BC)
        old = begin + p >= SINKS
        rows = _sketched(old_phi, phi_k, n, h, p, slot, old, i, H, W, R) * weight[None, :]
        rows *= _sketched(old_phi, phi_k, n, h, p, slot, old, j, H, W, R)
        values = _kept(old_v, v, n, h, p, slot, old, first, H, W, E, BE).to(tl.float32)
        added = tl.dot(tl.trans(rows), values, added, input_precision=EXACT)
        mass += tl.sum(rows, 0)
    inside = (e < E)[None, :]
    sums = tl.load(S + f[:, None] * WIDE + e[None, :], mask=inside, other=0.0)
    tl.store(S_after + f[:, None] * WIDE_AFTER + e[None, :], sums + added, mask=inside)
    if first == 0:
        tl.store(S_after + f * WIDE_AFTER + E, tl.load(S + f * WIDE + E) + mass)


@triton.jit
def _far_part(
    v, phi_q, phi_k, S, old_v, old_phi, S_after, parts, stats, n, h, part, tile, begin, slot, ends,
    HQ: tl.constexpr, H: tl.constexpr, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    SINKS: tl.constexpr, SLICES: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr, WIDE_AFTER: tl.constexpr,
    COPY: tl.constexpr, PARTS: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """BF features of S and BE columns of values; what they sum to is without the factor of far weights."""
    GROUP: tl.constexpr = HQ // H
    COLUMNS: tl.constexpr = (E + BE - 1) // BE
    first = tile % COLUMNS * BE
    f = tile // COLUMNS * BF + tl.arange(0, BF)
    e = first + tl.arange(0, BE)
    inside, column = f < F, e < E
    i, j, _ = _places(f, SLICES)
    head = n * H + h
    at = f[:, None] * WIDE + e[None, :]
    lives = inside[:, None] & column[None, :]
    S += head * F * WIDE
    sums = tl.load(S + at, mask=lives, other=0.0)
    ones = tl.load(S + f * WIDE + E, mask=f < tl.where(first == 0, F, 0), other=0.0)
    norms = tl.sum(tl.where(i == j, ones, 0.0))
    to = (head * PARTS + part) * GROUP
    for g in tl.static_range(GROUP):
        y = phi_q + (head * GROUP + g) * R
        feature = tl.load(y + i, mask=inside, other=0.0).to(tl.float32)
        feature *= tl.load(y + j, mask=inside, other=0.0).to(tl.float32)
        tl.store(parts + (to + g) * E + e, tl.sum(feature[:, None] * sums, 0), mask=column)
        if first == 0:
            tl.store(stats + (to + g) * 2, tl.sum(feature * ones))
            tl.store(stats + (to + g) * 2 + 1, norms)
    S_after += head * F * WIDE_AFTER
    if ends:
        tl.debug_barrier()  # all have read what is written now
        for f0 in range(tile // COLUMNS * BF, tl.minimum(tile // COLUMNS * BF + BF, F), BS):
            _fold(
                v, phi_k, S, old_v, old_phi, S_after, n, h, f0, first, begin, slot,
                H, E, R, C, W, SINKS, SLICES, WIDE, WIDE_AFTER, BS, BE, BC,
            )  # fmt: skip
    else:
        if COPY:
            tl.store(S_after + f[:, None] * WIDE_AFTER + e[None, :], sums, mask=lives)
            if first == 0:
                tl.store(S_after + f * WIDE_AFTER + E, ones, mask=inside)


@triton.jit
def _parts(
    q, k, v, phi_q, phi_k, offset, real, S, old_k, old_v, old_phi, sink_k, sink_v, seen,
    S_after, parts, stats, begun,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr, SOFT: tl.constexpr, DEGREE: tl.constexpr,
    SLICES: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr, WIDE_AFTER: tl.constexpr, COPY: tl.constexpr,
    PARTS: tl.constexpr, NEAR: tl.constexpr, TILES: tl.constexpr, BF: tl.constexpr, BX: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Sums over the parts of the past.

    Grid     (N x H; parts of the window, which take longest, then those of S times columns)
    Writes   parts and stats: of a window part what the weights were divided by, as a log, and their sum; of
             a part of S the sum of features and of squared norms. begun: the tokens before, or -1 - that of
             a row that is not real.
    """
    n = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    part = tl.program_id(1)
    t = tl.load(seen + n)
    here = t >= 0
    if real is not None:
        here = tl.load(real + n) != 0
    if (part == 0) & (h == 0):
        tl.store(begun + n, tl.where(here, t, -1 - t))
    before = t // C * C - (W - C)  # the token at the buffer's first row, negative at first
    begin = tl.minimum(before, SINKS).to(tl.int32)  # only its distance to the sinks matters
    slot = (t - before).to(tl.int32)
    if part < NEAR:
        _near_part(
            q, k, v, offset, old_k, old_v, sink_k, sink_v, parts, stats, n, h, part, t, begin, slot,
            HQ, H, D, E, W, SINKS, SOFT, DEGREE, PARTS, TILES, BG, BN, BD, BE,
        )  # fmt: skip
    else:
        ends = here & ((t + 1) % C == 0)
        tile = part - NEAR
        COLUMNS: tl.constexpr = (E + BX - 1) // BX
        _far_part(
            v, phi_q, phi_k, S, old_v, old_phi, S_after, parts, stats, n, h, NEAR + tile // COLUMNS, tile,
            begin, slot, ends,
            HQ, H, E, R, C, W, SINKS, SLICES, F, WIDE, WIDE_AFTER, COPY, PARTS, BF, BX, BS, BC,
        )  # fmt: skip


@triton.jit
def _join(
    parts, stats, begun, phi_q, lift, o, normaliser, n, head,
    HQ: tl.constexpr, H: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SOFT: tl.constexpr,
    PARTS: tl.constexpr, NEAR: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr, BE: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """o of one query head; BP parts at a time, of BQ, which holds all."""
    GROUP: tl.constexpr = HQ // H
    first = (n * H + head // GROUP) * PARTS * GROUP + head % GROUP
    p = tl.arange(0, BQ)
    near, far = p < NEAR, (p >= NEAR) & (p < PARTS)
    one = tl.load(stats + (first + p * GROUP) * 2, mask=p < PARTS, other=0.0)
    other = tl.load(stats + (first + p * GROUP) * 2 + 1, mask=p < PARTS, other=0.0)
    r = tl.arange(0, BR)
    x = tl.load(phi_q + (n * HQ + head) * R + r, mask=r < R, other=0.0).to(tl.float32)
    beyond = tl.sum(tl.where(far, one, 0.0))
    least = 1.9073486e-06 * tl.sum(tl.where(far, other, 0.0)) * tl.sum(x * x)  # 16 eps
    beyond = tl.where(beyond > least, beyond, 0.0)  # below is rounding, as in chunked._far
    rise = beyond * 0.0
    if lift is not None:
        rise = tl.load(lift + n * HQ + head)
    top = beyond * 0.0
    factor = tl.exp(rise)
    if SOFT:
        log = tl.where(beyond > 0, rise + tl.log(tl.where(beyond > 0, beyond, 1.0)), float("-inf"))
        top = tl.maximum(log, tl.max(tl.where(near, other, float("-inf"))))
        top = tl.where(top > float("-inf"), top, 0.0)
        factor = tl.exp(tl.minimum(rise - top, 80.0))
        one = one * tl.exp(tl.where(near, other, float("-inf")) - top)
        normaliser *= tl.exp(tl.minimum(-top, 80.0))
    mass = tl.sum(tl.where(near, one, 0.0)) + normaliser
    factor = tl.where(beyond > 0, factor, 0.0)
    mass += beyond * factor
    e = tl.arange(0, BE)
    acc = tl.zeros((BE,), tl.float32)
    for p0 in tl.static_range(0, PARTS, BP):
        p = p0 + tl.arange(0, BP)
        scale = tl.where(p < NEAR, 1.0, factor)
        if SOFT:
            other = tl.load(stats + (first + p * GROUP) * 2 + 1, mask=p < NEAR, other=0.0)
            scale = tl.where(p < NEAR, tl.exp(other - top), factor)
        at = (first + p * GROUP)[:, None] * E + e[None, :]
        sums = tl.load(parts + at, mask=(p < PARTS)[:, None] & (e < E)[None, :], other=0.0)
        acc += tl.sum(sums * scale[:, None], 0)
    acc *= tl.where(mass > 0, 1 / mass, 0.0)
    if tl.load(begun + n) < 0:
        acc = tl.zeros((BE,), tl.float32)
    tl.store(o + (n * HQ + head) * E + e, acc.to(o.dtype.element_ty), mask=e < E)


@triton.jit
def _move(
    old, new, after, n, h, p, by, slot, H: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows p of a buffer after the step: rows p + by of before, or zeros past the end."""
    rows = _kept(old, new, n, h, p + by, slot, p + by < ROWS, 0, H, ROWS, SIZE, WIDE)
    i = tl.arange(0, WIDE)
    at = (p * H + h)[:, None] * SIZE + i[None, :]
    tl.store(after + n * ROWS * H * SIZE + at, rows, mask=(p < ROWS)[:, None] & (i < SIZE)[None, :])


@triton.jit
def _put(new, after, n, h, p, H: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Row p of a buffer."""
    i = tl.arange(0, WIDE)
    x = tl.load(new + (n * H + h) * SIZE + i, mask=i < SIZE, other=0.0)
    tl.store(after + ((n * ROWS + p) * H + h) * SIZE + i, x, mask=i < SIZE)


@triton.jit(do_not_specialize=["normaliser"])
def _finish(
    k, v, phi_q, phi_k, lift, old_k, old_v, old_phi, sink_k, sink_v, parts, stats, begun,
    o, k_after, v_after, phi_after, sink_k_after, sink_v_after, seen_after, normaliser,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr, SOFT: tl.constexpr, COPY: tl.constexpr,
    PARTS: tl.constexpr, NEAR: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """o [N, HQ, E] from the parts, and the buffers.

    Grid     (HQ, then H, times tiles of BN positions for COPY; N)
    """
    n = tl.program_id(1).to(tl.int64)
    x = tl.program_id(0)
    if x < HQ:
        _join(
            parts, stats, begun, phi_q, lift, o, normaliser, n, x,
            HQ, H, E, R, SOFT, PARTS, NEAR, BP, BQ, BE, BR,
        )  # fmt: skip
    else:
        h = (x - HQ) % H
        code = tl.load(begun + n)
        real = code >= 0
        t = tl.where(real, code, -1 - code)
        ends = real & ((t + 1) % C == 0)
        slot = tl.where(real, t % C + (W - C), W).to(tl.int32)  # W: nowhere
        by = tl.where(ends, C, 0)
        if COPY:
            tile = (x - HQ) // H
            p = tile * BN + tl.arange(0, BN)
            _move(old_k, k, k_after, n, h, p, by, slot, H, W, D, BD)
            _move(old_v, v, v_after, n, h, p, by, slot, H, W, E, BE)
            _move(old_phi, phi_k, phi_after, n, h, p, by, slot, H, W, R, BR)
            if SINKS > 0:  # noqa: SIM102
                if tile == 0:
                    seat = tl.where(real & (t < SINKS), t, SINKS).to(tl.int32)
                    j = tl.arange(0, 16)
                    _move(sink_k, k, sink_k_after, n, h, j, 0, seat, H, SINKS, D, BD)
                    _move(sink_v, v, sink_v_after, n, h, j, 0, seat, H, SINKS, E, BE)
        else:
            if ends:
                for p0 in range(0, W, BN):  # upwards, so that a row is read before it is written
                    p = p0 + tl.arange(0, BN)
                    _move(old_k, k, k_after, n, h, p, by, slot, H, W, D, BD)
                    _move(old_v, v, v_after, n, h, p, by, slot, H, W, E, BE)
                    _move(old_phi, phi_k, phi_after, n, h, p, by, slot, H, W, R, BR)
                    tl.debug_barrier()
            else:
                if real:
                    _put(k, k_after, n, h, slot, H, W, D, BD)
                    _put(v, v_after, n, h, slot, H, W, E, BE)
                    _put(phi_k, phi_after, n, h, slot, H, W, R, BR)
            if SINKS > 0:  # noqa: SIM102
                if real & (t < SINKS):
                    _put(k, sink_k_after, n, h, t, H, SINKS, D, BD)
                    _put(v, sink_v_after, n, h, t, H, SINKS, E, BE)
        if x == HQ:
            tl.store(seen_after + n, tl.where(real, t + 1, t))


class _Launches(NamedTuple):
    """Grids and constants of both kernels, and how many parts there are."""

    parts: dict
    finish: dict
    grids: tuple[tuple[int, int], tuple[int, int]]
    count: int


def launches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, rule: list[int], wide: int,
    copy: bool, chosen: Cut | None = None,
) -> _Launches:  # fmt: skip
    """rule: block, window, sinks, whether near weights are softmax, degree. wide: numbers a row of S has."""
    (N, HQ, D), H, E, R = q.shape, k.shape[1], v.shape[-1], phi_q.shape[-1]
    C, W, sinks, soft, degree = rule
    F = num_features(R)
    by = chosen or cut(N * H, F, E, W)
    BN = min(KEYS, C & -C)
    near = triton.cdiv(W, BN * by.tiles)
    far, columns = triton.cdiv(F, by.features), triton.cdiv(E, by.columns)
    count = near + far
    shared = {"HQ": HQ, "H": H, "D": D, "E": E, "R": R, "C": C, "W": W, "SINKS": sinks, "SOFT": bool(soft)}
    shared |= {"COPY": copy, "PARTS": count, "NEAR": near, "BN": BN}
    shared |= {"BD": _power(D), "BE": _power(E)}
    parts = shared | {
        "DEGREE": degree, "SLICES": R // TILE, "F": F,
        "WIDE": wide, "WIDE_AFTER": _wide(E + 1) if copy else wide,
        "TILES": by.tiles, "BF": by.features, "BX": by.columns, "BG": _power(HQ // H), "BS": 16, "BC": BN,
        "num_warps": by.warps, "num_stages": 1,
    }  # fmt: skip
    most = 32 if shared["BE"] <= 128 else 16
    finish = shared | {
        "BP": min(most, triton.next_power_of_2(count)), "BQ": triton.next_power_of_2(count), "BR": _power(R),
        "num_warps": by.finish_warps, "num_stages": 2,
    }  # fmt: skip
    buffers = H * triton.cdiv(W, BN) if copy else H
    return _Launches(parts, finish, ((N * H, near + far * columns), (HQ + buffers, N)), count)


def _power(x: int) -> int:
    return max(16, triton.next_power_of_2(x))


def _launch(q, k, v, phi_q, phi_k, offset, lift, real, state, after, rule, normaliser) -> torch.Tensor:
    """Both kernels; `after` is `state` itself where it is changed in place."""
    S, old_k, old_v, old_phi, sink_k, sink_v, seen = state
    S_after, *rest = after
    (N, HQ, _), H, E = q.shape, k.shape[1], v.shape[-1]
    plan = launches(q, k, v, phi_q, rule, S.stride(2), S_after is not S)
    parts = q.new_empty((N, H, plan.count, HQ // H, E), dtype=torch.float32)
    stats, begun = parts.new_empty((*parts.shape[:-1], 2)), torch.empty_like(seen)
    o = v.new_empty((N, HQ, E))
    _parts[plan.grids[0]](
        q, k, v, phi_q, phi_k, offset, real, S, old_k, old_v, old_phi, sink_k, sink_v, seen,
        S_after, parts, stats, begun, **plan.parts,
    )  # fmt: skip
    _finish[plan.grids[1]](
        k, v, phi_q, phi_k, lift, old_k, old_v, old_phi, sink_k, sink_v, parts, stats, begun,
        o, *rest, normaliser, **plan.finish,
    )  # fmt: skip
    return o


@torch.library.custom_op(f"{OPS}::step", mutates_args=())
def _step_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor,
    offset: torch.Tensor | None, lift: torch.Tensor | None, real: torch.Tensor | None,
    state: list[torch.Tensor], rule: list[int], normaliser: float,
) -> list[torch.Tensor]:  # fmt: skip
    _, *after = found = _like(q, v, state)
    found[0] = _launch(q, k, v, phi_q, phi_k, offset, lift, real, state, after, rule, normaliser)
    return found


def _like(q, v, state) -> list[torch.Tensor]:
    S, *rest = state
    return [v.new_empty(*q.shape[:2], v.shape[-1]), _roomy(S), *(x.new_empty(x.shape) for x in rest)]


@_step_op.register_fake
def _(q, k, v, phi_q, phi_k, offset, lift, real, state, rule, normaliser):
    return _like(q, v, state)


@torch.library.custom_op(f"{OPS}::step_in_place", mutates_args=("state",))
def _step_in_place_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor,
    offset: torch.Tensor | None, lift: torch.Tensor | None, real: torch.Tensor | None,
    state: list[torch.Tensor], rule: list[int], normaliser: float,
) -> torch.Tensor:  # fmt: skip
    return _launch(q, k, v, phi_q, phi_k, offset, lift, real, state, state, rule, normaliser)


@_step_in_place_op.register_fake
def _(q, k, v, phi_q, phi_k, offset, lift, real, state, rule, normaliser):
    return v.new_empty(*q.shape[:2], v.shape[-1])


def _rows_apart(S: torch.Tensor) -> bool:
    """Whether S [N, H, F, E + 1] is as the kernels read it: rows one after another, room between them."""
    wide = S.stride(2)
    return S.stride() == (S.shape[1] * S.shape[2] * wide, S.shape[2] * wide, wide, 1)


def _wide(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


def _roomy(S: torch.Tensor) -> torch.Tensor:
    """Empty, as S [N, H, F, E + 1], with rows that start aligned: what a step reads fastest."""
    return S.new_empty(*S.shape[:3], _wide(S.shape[3]))[..., : S.shape[3]]


def own(S: torch.Tensor) -> torch.Tensor:
    """A copy of S [N, H, F, E + 1] to be changed in place."""
    return _roomy(S).copy_(S)


def step_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor,
    state: list[torch.Tensor], *,
    degree: int, block: int, window: int, sinks: int, soft: bool,
    offset: torch.Tensor | None, far_scale: torch.Tensor | None, normaliser: float,
    real: torch.Tensor | None = None, in_place: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """chunked._step without gates and gradients.

    Args:
        q, k, v, phi_q, phi_k: [N, 1, heads, size], of one dtype, as are the state's buffers.
        state: S, k, v, phi_k, sink_k, sink_v, seen of PolySketchState.
        far_scale: [HQ] or [N, 1, HQ] or None.
        real: [N] bool or int, 0 where a row has no token: its state stays, and its o is 0. None: all have.
        in_place: change the tensors of `state` themselves, where they are dense (S may be as `own` has it).

    Returns:
        o [N, 1, HQ, E] and the same parts of the state after the token: those of `state` if changed in place.
    """
    tokens = [x[:, 0].contiguous() for x in (q, k, v, phi_q, phi_k)]
    offset = None if offset is None else offset.float().contiguous()
    lift = None if far_scale is None else far_scale.float().expand(q.shape[:3]).contiguous()
    real = None if real is None else real.to(q.device, torch.int32).contiguous()
    rule, c = [block, window, sinks, int(soft), degree], float(normaliser)
    if in_place and _rows_apart(state[0]) and all(x.is_contiguous() for x in state[1:]):
        o = _step_in_place_op(*tokens, offset, lift, real, state, rule, c)
        return o.unsqueeze(1), state
    given = [x if x is state[0] and _rows_apart(x) else x.contiguous() for x in state]
    o, *after = _step_op(*tokens, offset, lift, real, given, rule, c)
    return o.unsqueeze(1), after
