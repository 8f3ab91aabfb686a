"""Gated slot attention in bfloat16 on the GPU: the kernels that are timed. Imported only where they run.

Maths and names as in triton_chunk.py, cut otherwise: slots exist before each chunk of CHUNK tokens, a chunk
is read in blocks of 16 tokens x GR query heads (the rows of a product), and a block meets all of its chunk
up to itself in one product. For tokens i of the block at `first`, j of the chunk up to i:

    e^{G_i - G_j} = e^{G_i - N} e^{N - G_j}, N = G at the middle of the block

with gates of pairs no lower than -9: both factors stay below 2^112, and the second is at most 2^8 for j
before the block, where it is dropped once it is below 2^-28 at the block's first token (a rule that later
tokens do not touch). Backward is cut so that each kernel fits in registers:

    _rows_grad  a block: P and dU of its reads, dq, what the reads say of the gates. No loop over tokens.
    _project    a chunk: x^T W, the slots that it writes, or what its reads ask of the slots before it.
    _columns    a chunk: dk (or dv) and its part of dlog_gate; one kernel for (k, q, dU) and (v, do, P).
"""

import torch

try:  # so that Transformers does not ask for triton where a bundle of these files is loaded without it
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels of gated slot attention need triton") from error

from unsoftmax.kernels.gsa.triton_chunk import (
    _dot,
    _expm1,
    _fine,
    _fine_dot,
    _left,
    _load_gate,
    _mass,
    _one_token,
    _pad,
    _place,
    _plain,
    _Plan,
    _power,
    _read,
    _read_grad,
    _rows,
    _run_scan,
    _tokens,
)

CHUNK = 64
HEADS = {"forward": 2, "rows": 2, "columns": 2}  # query heads in the rows of a product
WARPS = {"project": 2, "forward": 4, "rows": 4, "columns": 4}


@triton.jit
def _block_gates(g_ptr, first, b, step, m, m_ok, CH: tl.constexpr, DT: tl.constexpr):
    """col = s e^{N - G_j} and e^{N - G_j} [CH, M], e^{G_i - N} and exact sums G_i [16, M] of a block."""
    t, i = tl.arange(0, CH), first + tl.arange(0, 16)
    g = _load_gate(g_ptr, t, tl.minimum(b, first + 16), step, m, m_ok)
    own = _load_gate(g_ptr, i, b, step, m, m_ok)
    old = (t < first)[:, None]
    c = tl.maximum(g, -9.0)
    L = tl.cumsum(c, 0) * 1.4426950408889634
    start = tl.sum(tl.where(old, c, 0.0), 0)[None, :]
    L_own = start * 1.4426950408889634 + tl.cumsum(tl.maximum(own, -9.0), 0) * 1.4426950408889634
    # e^N is a power of two: it depends on later tokens, but moves no bit of any product of the two factors
    n = tl.floor(tl.sum(tl.where((t < first + 8)[:, None], c, 0.0), 0)[None, :] * 1.4426950408889634) + 8.0
    low, high = tl.floor(L_own), tl.floor(-L)
    near = tl.exp2(L_own - low) * _power(low - n)
    live = (t < first + 16)[:, None] & ((t >= first)[:, None] | (start * 1.4426950408889634 - L > -28.0))
    anti = tl.exp2(-L - high) * _power(tl.minimum(tl.maximum(high + n, -126.0), 127.0))
    anti = tl.where(live, anti, 0.0)
    col = _fine(-_expm1(g) * anti, DT)
    sums = tl.sum(tl.where(old, g, 0.0), 0)[None, :] + tl.cumsum(own, 0)
    return col, anti, near, sums


@triton.jit
def _tile(ptr, row, end, step, x, X):
    """Rows [n] of X numbers, `step` apart; 0 from row `end` on."""
    return tl.load(
        ptr + row[:, None] * step + x[None, :], mask=(row < end)[:, None] & (x < X)[None, :], other=0.0
    )


@triton.jit(do_not_specialize=["T", "H"])
def _project(
    x_ptr, w_ptr, g_ptr, out_ptr, total_ptr, seg_start, seg_end, T, H, X, slots,
    G: tl.constexpr, SEG: tl.constexpr, BX: tl.constexpr, M: tl.constexpr, DT: tl.constexpr,
    PREC: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H, tiles of X). out [X, M] = sum over the segment's tokens of x^T W.

    WRITE: W = s e^{T - G}, what a segment writes into empty slots, and its total log_gate [M]. Else W of each
    query head from memory, times e^G: what the segment's reads ask of the slots before it.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, x = tl.arange(0, SEG), tl.arange(0, M), tl.program_id(1) * BX + tl.arange(0, BX)
    m_ok = m < slots
    g_ptr += (a * H + h) * slots
    g = _load_gate(g_ptr, t, b, H * slots, m, m_ok)
    x_ptr += (a * H + h) * G * X
    if WRITE:
        w = -_expm1(g) * _left(g_ptr, t, SEG - 1, b, H * slots, m, m_ok)
        S = _dot(tl.trans(_tile(x_ptr, t, b, H * X, x, X)), w, DT, PREC)
        tl.store(total_ptr + pid * slots + m, tl.sum(g, 0), mask=m_ok)
    else:
        decay = tl.exp(tl.cumsum(g, 0))
        w_ptr += (a * H + h) * G * slots
        S = tl.zeros((BX, M), tl.float32)
        for head in range(0, G):
            y = _tile(x_ptr + head * X, t, b, H * G * X, x, X)
            w = _tile(w_ptr + head * slots, t, b, H * G * slots, m, slots).to(tl.float32) * decay
            S += _dot(tl.trans(y), w, DT, PREC)
    spot = pid * X * slots + x[:, None] * slots + m[None, :]
    tl.store(out_ptr + spot, S, mask=(x < X)[:, None] & m_ok[None, :])


@triton.jit(do_not_specialize=["T", "H"])
def _forward(
    q_ptr, k_ptr, v_ptr, g_ptr, o_ptr, k0_ptr, v0_ptr, gamma_ptr,
    seg_start, seg_end, scale, T, H, D, E, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H * blocks). Reads q, k, v, log_gate and the slots before the segment; writes o."""
    blocks: tl.constexpr = SEG // 16
    first = (tl.program_id(0) % blocks) * 16
    pid = (tl.program_id(0) // blocks).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    if first >= b:
        return
    t, m, d, e = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, DP), tl.arange(0, EP)
    r = tl.arange(0, GR * 16)
    i = first + r % 16
    m_ok = m < slots
    col, _, near1, sums = _block_gates(g_ptr + (a * H + h) * slots, first, b, H * slots, m, m_ok, SEG, DT)
    kept = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)
    z1, iz1 = _mass(kept[None, :] + sums)
    end = tl.minimum(b, first + 16)
    k_ptr += (a * H + h) * D
    v_ptr += (a * H + h) * E
    k0_ptr += pid * D * slots
    v0_ptr += pid * E * slots
    q_ptr += (a * H + h) * G * D
    o_ptr += (a * H + h) * G * E
    near, decay = _rows(near1, GR, M), _rows(tl.exp(sums), GR, M)
    z, iz = _rows(z1, GR, M), _rows(iz1, GR, M)
    causal = i[:, None] >= t[None, :]
    for some in range(0, G, GR):
        head = some + r // 16
        row = tl.where(head < G, i * (H * G) + head, b * (H * G))
        q = _tile(q_ptr, row, b * (H * G), D, d, D)
        k = _tile(k_ptr, t, end, H * D, d, D)
        A = tl.where(causal, _dot(q, tl.trans(k), DT, PREC), 0.0)
        inner = _fine_dot(_fine(A, DT), col, DT)
        K0 = _tile(k0_ptr, d, D, slots, m, slots)
        U = scale * (decay * _dot(q, K0, DT, PREC) + near * inner)
        P = _read(U, z, iz, m_ok, MASS)
        Bm = tl.where(causal, _fine_dot(_fine(P * near, DT), tl.trans(col), DT), 0.0)
        V0 = _tile(v0_ptr, e, E, slots, m, slots)
        O = _dot(P * decay, tl.trans(V0), DT, PREC)
        O += _dot(Bm, _tile(v_ptr, t, end, H * E, e, E), DT, PREC)
        ok = (row < b * (H * G))[:, None] & (e < E)[None, :]
        tl.store(o_ptr + row[:, None] * E + e[None, :], O, mask=ok)


@triton.jit(do_not_specialize=["T", "H"])
def _rows_grad(
    q_ptr, k_ptr, v_ptr, g_ptr, do_ptr, k0_ptr, v0_ptr, gamma_ptr,
    dq_ptr, p_ptr, du_ptr, walk_ptr, drift_ptr,
    seg_start, seg_end, scale, T, H, D, E, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H * blocks). dq; P and scale dU [tokens, HQ, M]; of the gates, before they are summed
    over later reads, walk [tokens, H, M]; with mass also drift [segments, blocks, H, M], its sum of dz."""
    blocks: tl.constexpr = SEG // 16
    block = tl.program_id(0) % blocks
    first = block * 16
    pid = (tl.program_id(0) // blocks).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    if first >= b:
        return
    t, m, d, e = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, DP), tl.arange(0, EP)
    r = tl.arange(0, GR * 16)
    i = first + r % 16
    m_ok = m < slots
    col, _, near1, sums = _block_gates(g_ptr + (a * H + h) * slots, first, b, H * slots, m, m_ok, SEG, DT)
    gamma = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)[None, :] + sums
    z1, iz1 = _mass(gamma)
    end = tl.minimum(b, first + 16)
    k_ptr += (a * H + h) * D
    v_ptr += (a * H + h) * E
    k0_ptr += pid * D * slots
    v0_ptr += pid * E * slots
    q_ptr += (a * H + h) * G * D
    dq_ptr += (a * H + h) * G * D
    do_ptr += (a * H + h) * G * E
    p_ptr += (a * H + h) * G * slots
    du_ptr += (a * H + h) * G * slots
    near, decay = _rows(near1, GR, M), _rows(tl.exp(sums), GR, M)
    z, iz = _rows(z1, GR, M), _rows(iz1, GR, M)
    causal = i[:, None] >= t[None, :]
    walk = tl.zeros((16, M), tl.float32)
    drift = tl.zeros((16, M), tl.float32)
    for some in range(0, G, GR):
        head = some + r // 16
        row = tl.where(head < G, i * (H * G) + head, b * (H * G))
        r_ok = (row < b * (H * G))[:, None]
        q = _tile(q_ptr, row, b * (H * G), D, d, D)
        k = _tile(k_ptr, t, end, H * D, d, D)
        A = _fine(tl.where(causal, _dot(q, tl.trans(k), DT, PREC), 0.0), DT)
        K0 = _tile(k0_ptr, d, D, slots, m, slots)
        read_k = decay * _dot(q, K0, DT, PREC)
        U = scale * (read_k + near * _fine_dot(A, col, DT))
        do = _tile(do_ptr, row, b * (H * G), E, e, E)
        v = _tile(v_ptr, t, end, H * E, e, E)
        dB = _fine(tl.where(causal, _dot(do, tl.trans(v), DT, PREC), 0.0), DT)
        V0 = _tile(v0_ptr, e, E, slots, m, slots)
        read_v = decay * _dot(do, V0, DT, PREC)
        dP = read_v + near * _fine_dot(dB, col, DT)
        P = _read(U, z, iz, m_ok, MASS)
        dU, dz = _read_grad(P, U, z, iz, dP, MASS)
        dU = dU * scale
        walk += _tokens(P * read_v + dU * read_k, GR, M)
        if MASS:
            drift += _tokens(dz, GR, M)
        ok = r_ok & m_ok[None, :]
        tl.store(p_ptr + row[:, None] * slots + m[None, :], P, mask=ok)
        tl.store(du_ptr + row[:, None] * slots + m[None, :], dU, mask=ok)
        dA = tl.where(causal, _fine_dot(_fine(dU * near, DT), tl.trans(col), DT), 0.0)
        dq = _dot(dU * decay, tl.trans(K0), DT, PREC) + _dot(dA, k, DT, PREC)
        tl.store(dq_ptr + row[:, None] * D + d[None, :], dq, mask=r_ok & (d < D)[None, :])
    if MASS:
        drift = drift * tl.exp(gamma)
        walk -= drift
        spot = ((seg * blocks + block) * H + h) * slots
        tl.store(drift_ptr + spot + m, -tl.sum(drift, 0), mask=m_ok)
    own = first + tl.arange(0, 16)
    where = (a * H + h) * slots + own[:, None] * (H * slots) + m[None, :]
    tl.store(walk_ptr + where, walk, mask=(own < b)[:, None] & m_ok[None, :])


@triton.jit
def _tile_gates(g_ptr, at, first, b, step, m, m_ok, N: tl.constexpr, DT: tl.constexpr):
    """As _block_gates of tokens at.. [N] of a segment of 2 N alone, met by the block at `first`; no sums."""
    t, i = at + tl.arange(0, N), first + tl.arange(0, 16)
    end = tl.minimum(b, first + 16)
    g = _load_gate(g_ptr, t, end, step, m, m_ok)
    c = tl.maximum(g, -9.0)
    beyond = tl.maximum(_load_gate(g_ptr, t + N, end, step, m, m_ok), -9.0)
    old, old_beyond = (t < first)[:, None], (t + N < first)[:, None]
    start = tl.sum(tl.where(old, c, 0.0), 0) + tl.sum(tl.where(old_beyond, beyond, 0.0), 0)
    old, old_beyond = (t < first + 8)[:, None], (t + N < first + 8)[:, None]
    middle = tl.sum(tl.where(old, c, 0.0), 0) + tl.sum(tl.where(old_beyond, beyond, 0.0), 0)
    start = start[None, :] * 1.4426950408889634
    n = tl.floor(middle[None, :] * 1.4426950408889634) + 8.0
    L = tl.cumsum(c, 0) * 1.4426950408889634
    own = tl.maximum(_load_gate(g_ptr, i, b, step, m, m_ok), -9.0)
    L_own = start + tl.cumsum(own, 0) * 1.4426950408889634
    low, high = tl.floor(L_own), tl.floor(-L)
    near = tl.exp2(L_own - low) * _power(low - n)
    live = (t < first + 16)[:, None] & ((t >= first)[:, None] | (start - L > -28.0))
    anti = tl.exp2(-L - high) * _power(tl.minimum(tl.maximum(high + n, -126.0), 127.0))
    anti = tl.where(live, anti, 0.0)
    return _fine(-_expm1(g) * anti, DT), anti, near


@triton.jit(do_not_specialize=["T", "H"])
def _columns(
    x_ptr, y_ptr, w_ptr, g_ptr, s0_ptr, ds1_ptr, dgamma_ptr, dx_ptr, dg_ptr,
    seg_start, seg_end, T, H, X, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, XP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, WALK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). dx and what goes by x of dlog_gate; x = k, y = q, W = scale dU, or v, do, P.

    Slots s0 before the segment and gradients ds1 of those after it. dg holds what _rows_grad left (WALK:
    still to be summed over later reads), and is added to. Half a segment's columns at a time, all rows from
    there on.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    N: tl.constexpr = SEG // 2
    u, m, f = tl.arange(0, N), tl.arange(0, M), tl.arange(0, XP)
    r = tl.arange(0, GR * 16)
    m_ok, f_ok = m < slots, f < X
    step = H * slots
    g_ptr += (a * H + h) * slots
    dg_ptr += (a * H + h) * slots
    x_ptr += (a * H + h) * X
    dx_ptr += (a * H + h) * X
    y_ptr += (a * H + h) * G * X
    w_ptr += (a * H + h) * G * slots
    spot = pid * X * slots + f[:, None] * slots + m[None, :]
    S_ok = f_ok[:, None] & m_ok[None, :]
    carried = tl.zeros((M,), tl.float32)  # what tokens so far wrote, as far as ds1 asks for it
    crossing = tl.zeros((N, M), tl.float32)  # pairs of a row in this half and a column in the last
    for at in range(0, tl.minimum(b, SEG), N):
        t = at + u
        x = _tile(x_ptr, t, b, H * X, f, X)
        dx = tl.zeros((N, XP), tl.float32)
        ds = tl.zeros((N, M), tl.float32)
        pairs = crossing
        crossing = tl.zeros((N, M), tl.float32)
        for first in range(at, b, 16):
            col, anti, near1 = _tile_gates(g_ptr, at, first, b, step, m, m_ok, N, DT)
            near = _rows(near1, GR, M)
            i = first + r % 16
            causal = i[:, None] >= t[None, :]
            paired = tl.zeros((16, M), tl.float32)
            dcol = tl.zeros((N, M), tl.float32)
            for some in range(0, G, GR):
                head = some + r // 16
                row = tl.where(head < G, i * (H * G) + head, b * (H * G))
                y = _tile(y_ptr, row, b * (H * G), X, f, X)
                W = _tile(w_ptr, row, b * (H * G), slots, m, slots).to(tl.float32)
                A = _fine(tl.where(causal, _dot(y, tl.trans(x), DT, PREC), 0.0), DT)
                Wn = _fine(W * near, DT)
                paired += _tokens(Wn * _fine_dot(A, col, DT), GR, M)
                dcol += _fine_dot(tl.trans(A), Wn, DT)
                Bm = tl.where(causal, _fine_dot(Wn, tl.trans(col), DT), 0.0)
                dx += _dot(tl.trans(Bm.to(DT)), y, DT, PREC)
            ds += dcol * anti
            pairs -= dcol * col
            place = _rows(paired, N // 16, M)
            pairs += tl.where((t // 16 == first // 16)[:, None], place, 0.0)
            crossing += tl.where((t // 16 + N // 16 == first // 16)[:, None], place, 0.0)

        # what reaches the slots after the segment
        g = _load_gate(g_ptr, t, b, step, m, m_ok)
        rest = tl.sum(_load_gate(g_ptr, t + N, b, step, m, m_ok), 0)
        left = _left(g_ptr, t, at + N - 1, b, step, m, m_ok) * tl.exp(rest)[None, :]
        w = -_expm1(g) * left
        dS = tl.load(ds1_ptr + spot, mask=S_ok, other=0.0)
        asked = _dot(x, dS, DT, PREC)
        dx += _dot(w, tl.trans(dS), DT, PREC)
        tl.store(dx_ptr + t[:, None] * (H * X) + f[None, :], dx, mask=(t < b)[:, None] & f_ok[None, :])
        ds += left * asked
        written = w * asked
        before = (u[:, None] > u[None, :]).to(tl.float32)
        big = _fine(written, DT)
        paths = _fine_dot(before, big, DT) + _fine_dot(before, _fine(written - big, DT), DT)
        if at == 0:
            S0 = tl.load(s0_ptr + spot, mask=S_ok, other=0.0)
            kept_on = tl.sum(S0.to(tl.float32) * dS.to(tl.float32), 0) * tl.exp(tl.sum(g, 0) + rest)
            carried = kept_on
        paths += carried[None, :]
        carried += tl.sum(written, 0)
        pairs = tl.cumsum(pairs, 0, reverse=True) + tl.sum(crossing, 0)[None, :]
        paths += tl.exp(g - tl.maximum(g, -9.0)) * pairs
        dg = paths - tl.exp(g) * ds
        spot_g = t[:, None] * step + m[None, :]
        g_ok = (t < b)[:, None] & m_ok[None, :]
        had = tl.load(dg_ptr + spot_g, mask=g_ok, other=0.0)
        if WALK:
            later = (t + N < b)[:, None] & m_ok[None, :]
            beyond = tl.load(dg_ptr + spot_g + N * step, mask=later, other=0.0)
            had = tl.cumsum(had, 0, reverse=True) + tl.sum(beyond, 0)[None, :]
            had += tl.load(dgamma_ptr + pid * slots + m, mask=m_ok, other=0.0)[None, :]
        tl.debug_barrier()  # a thread may store what another loads
        tl.store(dg_ptr + spot_g, had + dg, mask=g_ok)


def _kind(plan: _Plan) -> dict:
    more = plan.kind()
    del more["EXACT"]
    return more | {"G": plan.group, "SEG": plan.segment}


def _tiles(plan: _Plan, kernel: str) -> dict:
    heads = min(HEADS[kernel], triton.next_power_of_2(plan.group))
    return {"GR": heads, "num_warps": WARPS[kernel], "num_stages": 1}


def _projected(plan: _Plan, x, w, g, total=None) -> torch.Tensor:
    """_project of keys or values [B, T, H, X] (then w is None), or of queries and W."""
    X = x.shape[-1]
    out, width = plan.buffer(x, X), min(64, _pad(X))
    kind = _kind(plan) | {"G": 1 if w is None else plan.group}
    _project[(plan.segments * plan.H, triton.cdiv(X, width))](
        x, w, g, out, total, plan.starts, plan.stops, plan.T, plan.H, X, plan.M,
        BX=width, WRITE=w is None, **kind, num_warps=WARPS["project"], num_stages=1,
    )  # fmt: skip
    return out


def _states(plan: _Plan, k, v, g, k0, v0, kept0):
    """(Slots K, V and Gamma before each segment, its own log_gate), (the final K, V, Gamma)."""
    total = g.new_empty(plan.segments, plan.H, 1, plan.M)
    out = [_projected(plan, x, None, g, total) for x in (k, v)]
    final = [
        _run_scan(plan, own, total, init, own.shape[2], reverse=False, decay=True)
        for own, init in zip(out, (k0, v0))
    ]
    gamma = total.clone()
    kept = _run_scan(plan, gamma, total, kept0, 1, reverse=False, decay=False)
    return (*out, gamma, total), (*final, kept[..., 0])


def _grid(plan: _Plan) -> tuple[int]:
    return (plan.segments * plan.H * (plan.segment // 16),)


def forward(q, k, v, log_gate, scale: float, mass: bool, k0, v0, kept0, cu_seqlens):
    """As triton_chunk.forward."""
    q, k, v, g, k0, v0, kept0 = _plain(q, k, v, log_gate, k0, v0, kept0)
    plan = _Plan(q, k, v, g, cu_seqlens, CHUNK)
    o = v.new_empty(*q.shape[:3], plan.E)
    if plan.T == 1 and k0 is not None:
        return o, *_one_token(plan, q, k, v, g, o, scale, mass, k0, v0, kept0)
    (K0, V0, gamma, _), final = _states(plan, k, v, g, k0, v0, kept0)
    sizes = {"DP": _pad(plan.D), "EP": _pad(plan.E), "MASS": mass}
    _forward[_grid(plan)](
        q, k, v, g, o, K0, V0, gamma, plan.starts, plan.stops, scale,
        plan.T, plan.H, plan.D, plan.E, plan.M, **sizes, **_kind(plan), **_tiles(plan, "forward"),
    )  # fmt: skip
    return o, *final


def backward(q, k, v, log_gate, scale: float, mass: bool, k0, v0, kept0, cu_seqlens, do, dK1, dV1, dkept1):
    """As triton_chunk.backward."""
    q, k, v, g, k0, v0, kept0 = _plain(q, k, v, log_gate, k0, v0, kept0)
    do, dK1, dV1, dkept1 = _plain(do, dK1, dV1, dkept1)
    plan = _Plan(q, k, v, g, cu_seqlens, CHUNK)
    (K0, V0, gamma, total), _ = _states(plan, k, v, g, k0, v0, kept0)
    dq, dg = torch.empty_like(q), torch.empty_like(g)
    P, dU = (q.new_empty(*q.shape[:3], plan.M) for _ in range(2))
    drift = g.new_zeros(plan.segments, plan.segment // 16, plan.H, 1, plan.M)
    sizes = {"DP": _pad(plan.D), "EP": _pad(plan.E), "MASS": mass}
    _rows_grad[_grid(plan)](
        q, k, v, g, do, K0, V0, gamma, dq, P, dU, dg, drift, plan.starts, plan.stops, scale,
        plan.T, plan.H, plan.D, plan.E, plan.M, **sizes, **_kind(plan), **_tiles(plan, "rows"),
    )  # fmt: skip
    dgamma = drift.sum(1)
    dkept0 = _run_scan(plan, dgamma, total, dkept1, 1, reverse=True, decay=False)

    def half(x, y, W, S0, after, walk: bool):
        """dx and the gradient of the initial slots."""
        dS, dx = _projected(plan, y, W, g), torch.empty_like(x)
        first = _run_scan(plan, dS, total, after, x.shape[-1], reverse=True, decay=True)
        _columns[(plan.segments * plan.H,)](
            x, y, W, g, S0, dS, dgamma, dx, dg, plan.starts, plan.stops,
            plan.T, plan.H, x.shape[-1], plan.M,
            XP=_pad(x.shape[-1]), WALK=walk, **_kind(plan), **_tiles(plan, "columns"),
        )  # fmt: skip
        return dx, first

    dv, dv0 = half(v, do, P, V0, dV1, True)
    del P, V0  # their memory is taken by the other half
    dk, dk0 = half(k, q, dU, K0, dK1, False)
    return dq, dk, dv, dg, dk0, dv0, dkept0[..., 0]
