"""Gated slot attention in bfloat16 on the GPU: the kernels that are timed. Imported only where they run.

Maths and names as in triton_chunk.py, cut otherwise: slots exist before each chunk of CHUNK tokens, a chunk
is read in blocks of 16 tokens x GR query heads (the rows of a product), and a block meets all of its chunk
up to itself in one product. For tokens i of the block at `first`, j of the chunk up to i:

    e^{G_i - G_j} = e^{G_i - N} e^{N - G_j}, N = G near the middle of the block

with gates of pairs no lower than -9: both factors stay below 2^112, and the second is at most 2^8 for j
before the block, where it is dropped once it is below 2^-28 at the block's first token (a rule that later
tokens do not touch). e^N is a power of two: it depends on later tokens, but moves no bit of any product of
the two factors. What a lower gate should have removed stays, e^-9 or 1.2e-4 of it, below bfloat16's rounding;
h_t is put right by e^{log_gate + 9}. What pairs give to h_t is summed over rows less summed over columns of
the same rounded products, which cancel to float32 rounding. Products with the factors are in tf32: bfloat16
would double the error of o.

    _gates      a chunk: sums of log_gate from its start, which everything else reads.
    _project    a chunk: x^T W, the slots that it writes, or what its reads ask of the slots before it.
    _forward    a block: o. No loop over tokens, neither here nor in _rows_grad.
    _rows_grad  a block: P and dU of its reads, dq, what the reads say of the gates.
    _dx         a chunk: dk from q and dU, or dv from do and P.
    _dgate      a chunk: the same side's part of dlog_gate.
"""

import torch

try:  # so that Transformers does not ask for triton where a bundle of these files is loaded without it
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels of gated slot attention need triton") from error

from unsoftmax.kernels.chip import registers
from unsoftmax.kernels.gsa.triton_chunk import (
    _load_gate,
    _one_token,
    _pad,
    _place,
    _plain,
    _Plan,
    _read_grad,
    _run_scan,
    _tile,
    one_token,
)

CHUNK = 64
HEADS = {"forward": 4, "rows": 4, "dx": 4, "dgate": 4}  # query heads in the rows of a product: 64 rows
WARPS = {"project": 4, "forward": 4, "rows": 4, "dx": 4, "dgate": 4}  # of up to 64 slots; else twice as many
STAGES = {"project": 2, "forward": 1, "rows": 1, "dx": 1, "dgate": 1}  # of loops that load ahead


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, DT: tl.constexpr):
    return tl.dot(a.to(DT), b.to(DT), input_precision="ieee")


@triton.jit
def _fine_dot(a, b, dtype: tl.constexpr):
    """A product of pairs, in tf32 where the large ones are bfloat16: it is small, and roundings add up."""
    return tl.dot(a, b, input_precision="ieee" if dtype == tl.float32 else "tf32")


@triton.jit
def _rows(x, GR: tl.constexpr, M: tl.constexpr):
    """[16, M] of tokens, repeated for each head of the group: [GR * 16, M]."""
    return tl.reshape(tl.broadcast_to(x[None, :, :], (GR, 16, M)), (GR * 16, M))


@triton.jit
def _tokens(x, GR: tl.constexpr, M: tl.constexpr):
    """[GR * 16, M] summed over the group: [16, M]."""
    return tl.sum(tl.reshape(x, (GR, 16, M)), 0)


@triton.jit
def _exp2(x, dtype: tl.constexpr):
    """2^x in one instruction on a GPU, results below 2^-126 are 0; tl.exp2 takes four."""
    if dtype == tl.float32:  # in the interpreter, which has no assembly
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def _scaled(x, n, DT: tl.constexpr):
    """2^(x + n), n whole, int32: it moves nothing but the exponent. Any number where that is out of range."""
    near = x + 12582912.0  # 1.5 * 2^23: what is left of x is its nearest whole number, in the low bits
    y = _exp2(x - (near - 12582912.0), DT).to(tl.int32, bitcast=True)
    return (y + ((near.to(tl.int32, bitcast=True) + n) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _written(g, DT: tl.constexpr):
    """1 - e^g of g <= 0, to 1e-6 of it."""
    near = -g * (1.0 + g * (0.5 + g * (1.0 / 6 + g * (1.0 / 24))))
    return tl.where(g > -0.1, near, 1.0 - _exp2(g * LOG2E, DT))


@triton.jit
def _mass(gamma, DT: tl.constexpr):
    """z and 1 / z of Gamma; both 0 for an empty slot."""
    z = _written(gamma, DT)
    live = z > 1e-37
    return tl.where(live, z, 0.0), tl.where(live, 1.0 / tl.where(live, z, 1.0), 0.0)


@triton.jit
def _read(u, z, iz, m_ok, MASS: tl.constexpr, DT: tl.constexpr):
    """Read weights of u [rows, M]: softmax, or e^{u/z} / sum of z e^{u/z} over slots with any mass."""
    if MASS:
        w = tl.where(iz > 0, u * iz, -float("inf"))
    else:
        w = tl.where(m_ok[None, :], u, -float("inf"))
    top = tl.max(w, 1)
    top = tl.where(top == -float("inf"), 0.0, top) * LOG2E
    e = _exp2(w * LOG2E - top[:, None], DT)
    total = tl.sum(z * e, 1) if MASS else tl.sum(e, 1)
    return e * (1.0 / tl.where(total > 0, total, 1.0))[:, None]


@triton.jit
def _cut(x, dtype: tl.constexpr):
    """x as a product in tf32 reads it, so that what else is made of x sees the same number."""
    if dtype != tl.float32:
        x = (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _high(x, dtype: tl.constexpr):
    """The bits of float32 x that bfloat16 holds, as float32; a conversion and back takes longer."""
    if dtype != tl.float32:
        x = (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """x as bfloat16 rounds it, as float32; of numbers far from the largest."""
    if dtype != tl.float32:
        x = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _summed_by(which, x, dtype: tl.constexpr):
    """which @ x of zeros and ones and float32 x, to float32 rounding: x in three pieces of 8 bits."""
    which = which.to(dtype)
    big = _high(x, dtype)
    y = tl.dot(which, big.to(dtype), input_precision="ieee")
    if dtype != tl.float32:
        middle = _high(x - big, dtype)
        y = tl.dot(which, middle.to(dtype), y)
        y = tl.dot(which, (x - big - middle).to(dtype), y)
    return y


@triton.jit
def _log_rows(log_ptr, row, end, step, m, m_ok):
    """Tokens row [n] of what _gates left; 0 from `end` on and before the chunk."""
    ok = ((row >= 0) & (row < end))[:, None] & m_ok[None, :]
    return tl.load(log_ptr + row[:, None] * step + m[None, :], mask=ok, other=0.0)


@triton.jit
def _anchors(log_ptr, first, b, step, m, m_ok):
    """The sum before the block at `first`, and the power of two for its middle; [1, M] each."""
    row = first + tl.arange(0, 1)
    start = _log_rows(log_ptr, row - 1, b, step, m, m_ok)
    middle = tl.floor(_log_rows(log_ptr, tl.minimum(row + 7, b - 1), b, step, m, m_ok))
    return start, middle.to(tl.int32) + 8


@triton.jit
def _column_factors(g_ptr, log_ptr, t, first, start, n, b, step, m, m_ok, DT: tl.constexpr):
    """s e^{N - G_j} and e^{N - G_j} of tokens t, for the block at `first`; 0 after it."""
    end = tl.minimum(b, first + 16)
    g = _log_rows(g_ptr, t, end, step, m, m_ok)
    L = _log_rows(log_ptr, t, end, step, m, m_ok)
    low = tl.where(t < first, -28.0, tl.where(t < first + 16, -float("inf"), float("inf")))
    live = start - L > low[:, None]
    anti = _scaled(-L, n, DT)
    return _cut(tl.where(live, _written(g, DT) * anti, 0.0), DT), tl.where(live, anti, 0.0)


@triton.jit
def _row_factors(log_ptr, i, n, b, step, m, m_ok, DT: tl.constexpr):
    """e^{G_i - N} of tokens i; past the end, that of the last."""
    return _scaled(_log_rows(log_ptr, tl.minimum(i, b - 1), b, step, m, m_ok), -n, DT)


@triton.jit
def _pair_factors(g_ptr, log_ptr, t, first, b, step, m, m_ok, DT: tl.constexpr):
    """s e^{N - G_j} of the chunk's tokens t, and e^{G_i - N} of the 16 of the block at `first`."""
    start, n = _anchors(log_ptr, first, b, step, m, m_ok)
    col, _ = _column_factors(g_ptr, log_ptr, t, first, start, n, b, step, m, m_ok, DT)
    return col, _row_factors(log_ptr, first + tl.arange(0, 16), n, b, step, m, m_ok, DT)


@triton.jit
def _query_rows(head, i, b, G: tl.constexpr, H):
    """Rows of tokens i in q, [tokens * H * G] from the first head of the group; b's where no such head is."""
    return tl.where(head < G, i * (H * G) + head, b * (H * G))


@triton.jit
def _left(sums_ptr, sums, b, step, m, m_ok, DT: tl.constexpr):
    """What of each token is left at the end of its chunk, from sums [n, M] of log_gate."""
    last = _log_rows(sums_ptr, b - 1 + tl.arange(0, 1), b, step, m, m_ok)
    return _exp2(tl.minimum(last - sums, 0.0) * LOG2E, DT)


@triton.jit(do_not_specialize=["T", "H"])
def _gates(
    g_ptr, sums_ptr, log_ptr, total_ptr, seg_start, seg_end, T, H, slots,
    SEG: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). Of log_gate, summed from the segment's first token to each, float32:

    sums [tokens, H, M], gates held at -104 (e^-104 is 0, and a sum keeps its digits); log, base 2, gates held
    at -9; and total [segments, H, M]. A thread keeps to its slot; all loads come before the first sum.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    m = tl.arange(0, M)
    m_ok = m < slots
    at, step = (a * H + h) * slots + m, H * slots
    gates = ()
    for t in tl.static_range(SEG):
        gates += (tl.load(g_ptr + at + t * step, mask=m_ok & (t + m * 0 < b), other=0.0),)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M,), tl.float32)
    log = tl.zeros((M,), tl.float32)
    for t in tl.static_range(SEG):
        total += tl.maximum(gates[t], -1e4)
        sums += tl.maximum(gates[t], -104.0)
        log += tl.maximum(gates[t], -9.0) * LOG2E
        ok = m_ok & (t + m * 0 < b)
        tl.store(sums_ptr + at + t * step, sums, mask=ok)
        tl.store(log_ptr + at + t * step, log, mask=ok)
    tl.store(total_ptr + pid * slots + m, total, mask=m_ok)


@triton.jit(do_not_specialize=["T", "H"])
def _project(
    x_ptr, w_ptr, g_ptr, sums_ptr, out_ptr, seg_start, seg_end, T, H, X, slots,
    G: tl.constexpr, SEG: tl.constexpr, BX: tl.constexpr, M: tl.constexpr, DT: tl.constexpr,
    WRITE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H, tiles of X). out [X, M] = sum over the segment's tokens of x^T W.

    WRITE: W = s e^{T - G}, what a segment writes into empty slots. Else W of each query head from memory,
    times e^G: what the segment's reads ask of the slots before it.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, x = tl.arange(0, SEG), tl.arange(0, M), tl.program_id(1) * BX + tl.arange(0, BX)
    m_ok = m < slots
    sums_ptr += (a * H + h) * slots
    x_ptr += (a * H + h) * G * X
    if WRITE:
        y = _tile(x_ptr, t, b, H * X, x, X)
        g = _log_rows(g_ptr + (a * H + h) * slots, t, b, H * slots, m, m_ok)
        sums = _log_rows(sums_ptr, t, b, H * slots, m, m_ok)
        w = _written(g, DT) * _left(sums_ptr, sums, b, H * slots, m, m_ok, DT)
        S = _dot(tl.trans(y), w, DT)
    else:
        decay = _exp2(_log_rows(sums_ptr, t, b, H * slots, m, m_ok) * LOG2E, DT)
        w_ptr += (a * H + h) * G * slots
        S = tl.zeros((BX, M), tl.float32)
        for head in range(0, G):
            y = _tile(x_ptr + head * X, t, b, H * G * X, x, X)
            w = _tile(w_ptr + head * slots, t, b, H * G * slots, m, slots).to(tl.float32) * decay
            S += _dot(tl.trans(y), w, DT)
    spot = pid * X * slots + x[:, None] * slots + m[None, :]
    tl.store(out_ptr + spot, S, mask=(x < X)[:, None] & m_ok[None, :])


@triton.jit(do_not_specialize=["T", "H"])
def _forward(
    q_ptr, k_ptr, v_ptr, g_ptr, sums_ptr, log_ptr, o_ptr, k0_ptr, v0_ptr, gamma_ptr,
    seg_start, seg_end, scale, T, H, D, E, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr,
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
    at_g, step = (a * H + h) * slots, H * slots
    col, near1 = _pair_factors(g_ptr + at_g, log_ptr + at_g, t, first, b, step, m, m_ok, DT)
    sums = _log_rows(sums_ptr + at_g, first + tl.arange(0, 16), b, step, m, m_ok)
    kept = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)
    z1, iz1 = _mass(kept[None, :] + sums, DT)
    end = tl.minimum(b, first + 16)
    k_ptr += (a * H + h) * D
    v_ptr += (a * H + h) * E
    k0_ptr += pid * D * slots
    v0_ptr += pid * E * slots
    q_ptr += (a * H + h) * G * D
    o_ptr += (a * H + h) * G * E
    near, decay = _rows(near1, GR, M), _rows(_exp2(sums * LOG2E, DT), GR, M)
    z, iz = _rows(z1, GR, M), _rows(iz1, GR, M)
    causal = i[:, None] >= t[None, :]
    for some in range(0, G, GR):
        row = _query_rows(some + r // 16, i, b, G, H)
        q = _tile(q_ptr, row, b * (H * G), D, d, D)
        k = _tile(k_ptr, t, end, H * D, d, D)
        A = tl.where(causal, _dot(q, tl.trans(k), DT), 0.0)
        inner = _fine_dot(A, col, DT)
        K0 = _tile(k0_ptr, d, D, slots, m, slots)
        U = scale * (decay * _dot(q, K0, DT) + near * inner)
        P = _read(U, z, iz, m_ok, MASS, DT)
        Bm = tl.where(causal, _fine_dot(P * near, tl.trans(col), DT), 0.0)
        V0 = _tile(v0_ptr, e, E, slots, m, slots)
        O = _dot(P * decay, tl.trans(V0), DT)
        O += _dot(Bm, _tile(v_ptr, t, end, H * E, e, E), DT)
        ok = (row < b * (H * G))[:, None] & (e < E)[None, :]
        tl.store(o_ptr + row[:, None] * E + e[None, :], O, mask=ok)


@triton.jit(do_not_specialize=["T", "H"])
def _rows_grad(
    q_ptr, k_ptr, v_ptr, g_ptr, sums_ptr, log_ptr, do_ptr, k0_ptr, v0_ptr, gamma_ptr,
    dq_ptr, p_ptr, du_ptr, walk_ptr, paired_ptr, drift_ptr,
    seg_start, seg_end, scale, T, H, D, E, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H * blocks). dq; P and scale dU [tokens, HQ, M]; of the gates, before they are summed
    over later reads, walk and paired [tokens, H, M]; with mass also drift [segments, blocks, H, M], its sum
    of dz. paired holds what _dgate subtracts its columns from: the same rounded numbers make both."""
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
    own = first + tl.arange(0, 16)
    at_g, step = (a * H + h) * slots, H * slots
    col, near1 = _pair_factors(g_ptr + at_g, log_ptr + at_g, t, first, b, step, m, m_ok, DT)
    sums = _log_rows(sums_ptr + at_g, own, b, step, m, m_ok)
    gamma = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)[None, :] + sums
    z1, iz1 = _mass(gamma, DT)
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
    near, decay = _rows(near1, GR, M), _rows(_exp2(sums * LOG2E, DT), GR, M)
    z, iz = _rows(z1, GR, M), _rows(iz1, GR, M)
    causal = i[:, None] >= t[None, :]
    walk = tl.zeros((16, M), tl.float32)
    paired = tl.zeros((16, M), tl.float32)
    drift = tl.zeros((16, M), tl.float32)
    for some in range(0, G, GR):
        row = _query_rows(some + r // 16, i, b, G, H)
        r_ok = (row < b * (H * G))[:, None]
        q = _tile(q_ptr, row, b * (H * G), D, d, D)
        k = _tile(k_ptr, t, end, H * D, d, D)
        K0 = _tile(k0_ptr, d, D, slots, m, slots)
        A = tl.where(causal, _dot(q, tl.trans(k), DT), 0.0)
        read_k = decay * _dot(q, K0, DT)
        do = _tile(do_ptr, row, b * (H * G), E, e, E)
        v = _tile(v_ptr, t, end, H * E, e, E)
        inner = _fine_dot(A, col, DT)
        U = scale * (read_k + near * inner)
        P = _read(U, z, iz, m_ok, MASS, DT)
        dB = tl.where(causal, _dot(do, tl.trans(v), DT), 0.0)
        V0 = _tile(v0_ptr, e, E, slots, m, slots)  # not before: v's shared memory is free again
        read_v = decay * _dot(do, V0, DT)
        dinner = _fine_dot(dB, col, DT)
        dU, dz = _read_grad(P, U, z, iz, read_v + near * dinner, MASS)
        dU = dU * scale
        walk += _tokens(P * read_v + dU * read_k, GR, M)
        if MASS:
            drift += _tokens(dz, GR, M)
        ok = r_ok & m_ok[None, :]
        spots = row[:, None] * slots + m[None, :]
        P, dU = _rounded(P, DT), _rounded(dU, DT)
        tl.store(p_ptr + spots, P, mask=ok)
        tl.store(du_ptr + spots, dU, mask=ok)
        Pn = _cut(P * near, DT)
        dUn = _cut(dU * near, DT)
        paired += _tokens(Pn * dinner + dUn * inner, GR, M)
        dA = tl.where(causal, _fine_dot(dUn, tl.trans(col), DT), 0.0)
        sums = _log_rows(sums_ptr + at_g, own, b, step, m, m_ok)  # again, so that no register waits for it
        decay_again = _rows(_exp2(sums * LOG2E, DT), GR, M)
        dq = _dot(dU * decay_again, tl.trans(K0), DT) + _dot(dA, k, DT)
        tl.store(dq_ptr + row[:, None] * D + d[None, :], dq, mask=r_ok & (d < D)[None, :])
    if MASS:
        drift = drift * _exp2(gamma * LOG2E, DT)
        walk -= drift
        spot = ((seg * blocks + block) * H + h) * slots
        tl.store(drift_ptr + spot + m, -tl.sum(drift, 0), mask=m_ok)
    where = at_g + own[:, None] * step + m[None, :]
    tl.store(walk_ptr + where, walk, mask=(own < b)[:, None] & m_ok[None, :])
    tl.store(paired_ptr + where, paired, mask=(own < b)[:, None] & m_ok[None, :])


@triton.jit(do_not_specialize=["T", "H"])
def _dx(
    y_ptr, w_ptr, g_ptr, sums_ptr, log_ptr, ds1_ptr, dx_ptr, seg_start, seg_end, T, H, X, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, XP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). dx = B^T y + W dS^T: of k from y = q, W = scale dU, or of v from do and P.

    ds1: gradients of the slots after the segment.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, f = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, XP)
    r = tl.arange(0, GR * 16)
    m_ok, step = m < slots, H * slots
    g_ptr += (a * H + h) * slots
    sums_ptr += (a * H + h) * slots
    log_ptr += (a * H + h) * slots
    y_ptr += (a * H + h) * G * X
    w_ptr += (a * H + h) * G * slots
    dS = _tile(ds1_ptr + pid * X * slots, f, X, slots, m, slots)
    sums = _log_rows(sums_ptr, t, b, step, m, m_ok)
    w = _written(_log_rows(g_ptr, t, b, step, m, m_ok), DT) * _left(sums_ptr, sums, b, step, m, m_ok, DT)
    dx = _dot(w, tl.trans(dS), DT)
    for first in range(0, b, 16):
        start, n = _anchors(log_ptr, first, b, step, m, m_ok)
        col, _ = _column_factors(g_ptr, log_ptr, t, first, start, n, b, step, m, m_ok, DT)
        i = first + r % 16
        near = _row_factors(log_ptr, i, n, b, step, m, m_ok, DT)
        for some in range(0, G, GR):
            row = _query_rows(some + r // 16, i, b, G, H)
            y = _tile(y_ptr, row, b * (H * G), X, f, X)
            Wn = _tile(w_ptr, row, b * (H * G), slots, m, slots).to(tl.float32) * near
            B = tl.where(t[:, None] <= i[None, :], _fine_dot(col, tl.trans(Wn), DT), 0.0)
            dx += _dot(B, y, DT)
    spot = (a * H + h) * X + t[:, None] * (H * X) + f[None, :]
    tl.store(dx_ptr + spot, dx, mask=(t < b)[:, None] & (f < X)[None, :])


@triton.jit(do_not_specialize=["T", "H"])
def _dgate(
    x_ptr, y_ptr, w_ptr, g_ptr, sums_ptr, log_ptr, s0_ptr, ds1_ptr, dgamma_ptr, paired_ptr, dg_ptr,
    seg_start, seg_end, T, H, X, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, XP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, WALK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). What goes by x of dlog_gate; x = k, y = q, W = scale dU, or v, do, P.

    Slots s0 before the segment and gradients ds1 of those after it. dg holds what _rows_grad left (WALK:
    still to be summed over later reads, with paired), and is added to.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, f = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, XP)
    r = tl.arange(0, GR * 16)
    m_ok, step = m < slots, H * slots
    g_ptr += (a * H + h) * slots
    sums_ptr += (a * H + h) * slots
    log_ptr += (a * H + h) * slots
    y_ptr += (a * H + h) * G * X
    w_ptr += (a * H + h) * G * slots
    x = _tile(x_ptr + (a * H + h) * X, t, b, H * X, f, X)
    ds = tl.zeros((SEG, M), tl.float32)
    pairs = tl.zeros((SEG, M), tl.float32)
    for first in range(0, b, 16):
        start, n = _anchors(log_ptr, first, b, step, m, m_ok)
        i = first + r % 16
        near = _row_factors(log_ptr, i, n, b, step, m, m_ok, DT)
        dcol = tl.zeros((SEG, M), tl.float32)
        for some in range(0, G, GR):
            row = _query_rows(some + r // 16, i, b, G, H)
            y = _tile(y_ptr, row, b * (H * G), X, f, X)
            Wn = _cut(_tile(w_ptr, row, b * (H * G), slots, m, slots).to(tl.float32) * near, DT)
            A = tl.where(t[:, None] <= i[None, :], _dot(x, tl.trans(y), DT), 0.0)
            dcol += _fine_dot(A, Wn, DT)
        col, anti = _column_factors(g_ptr, log_ptr, t, first, start, n, b, step, m, m_ok, DT)
        ds += dcol * anti
        pairs -= dcol * col

    # what reaches the slots after the segment
    dS = _tile(ds1_ptr + pid * X * slots, f, X, slots, m, slots)
    S0 = _tile(s0_ptr + pid * X * slots, f, X, slots, m, slots)
    last = _log_rows(sums_ptr, b - 1 + tl.arange(0, 1), b, step, m, m_ok)
    kept_on = tl.sum(S0.to(tl.float32) * dS.to(tl.float32), 0)[None, :] * tl.exp(last)
    left = _left(sums_ptr, _log_rows(sums_ptr, t, b, step, m, m_ok), b, step, m, m_ok, DT)
    g = _load_gate(g_ptr, t, b, step, m, m_ok)
    reach = left * _dot(x, dS, DT)
    ds += reach
    earlier, later = t[:, None] > t[None, :], t[:, None] <= t[None, :]
    paths = _summed_by(earlier, _written(g, DT) * reach, DT) + kept_on
    spot = (a * H + h) * slots + t[:, None] * step + m[None, :]
    ok = (t < b)[:, None] & m_ok[None, :]
    had = tl.load(dg_ptr + spot, mask=ok, other=0.0)
    if WALK:
        pairs += tl.load(paired_ptr + spot, mask=ok, other=0.0)
        had = _summed_by(later, had, DT)
        had += tl.load(dgamma_ptr + pid * slots + m, mask=m_ok, other=0.0)[None, :]
    paths += tl.exp(tl.minimum(g + 9.0, 0.0)) * _summed_by(later, pairs, DT)
    tl.debug_barrier()  # a thread may store what another loads
    tl.store(dg_ptr + spot, had + paths - tl.exp(g) * ds, mask=ok)


def _kind(plan: _Plan) -> dict:
    """Constants of every kernel that makes products; DT is that of their operands."""
    operands = tl.bfloat16 if plan.dot == torch.bfloat16 else tl.float32
    return plan.kind() | {"G": plan.group, "DT": operands}


def _options(plan: _Plan, kernel: str) -> dict:
    warps = WARPS[kernel] * (2 if plan.M > 64 else 1)
    return {"num_warps": warps, "num_stages": STAGES[kernel], "maxnreg": registers()}


def _tiles(plan: _Plan, kernel: str) -> dict:
    fit = (256 if kernel == "rows" else 512) // _pad(plan.M)  # more slots, fewer rows, or registers run out
    heads = max(1, min(HEADS[kernel], fit, triton.next_power_of_2(plan.group)))
    return {"GR": heads, **_options(plan, kernel)}


def _projected(plan: _Plan, x, w, g, sums) -> torch.Tensor:
    """_project of keys or values [B, T, H, X] (then w is None), or of queries and W."""
    X = x.shape[-1]
    out, width = plan.buffer(x, X), min(128, _pad(X))
    kind = _kind(plan) | {"G": 1 if w is None else plan.group}
    _project[(plan.segments * plan.H, triton.cdiv(X, width))](
        x, w, g, sums, out, plan.starts, plan.stops, plan.T, plan.H, X, plan.M,
        BX=width, WRITE=w is None, **kind, **_options(plan, "project"),
    )  # fmt: skip
    return out


def _summed(plan: _Plan, g):
    """What _gates leaves: sums and log [B, T, H, M], total [segments, H, 1, M]."""
    sums, log = torch.empty_like(g), torch.empty_like(g)
    total, M = g.new_empty(plan.segments, plan.H, 1, plan.M), _pad(plan.M)
    _gates[(plan.segments * plan.H,)](
        g, sums, log, total, plan.starts, plan.stops, plan.T, plan.H, plan.M,
        SEG=plan.segment, M=M, PACKED=plan.packed, num_warps=max(1, M // 32),
    )  # fmt: skip
    return sums, log, total


def _states(plan: _Plan, k, v, g, sums, total, k0, v0, kept0):
    """(Slots K, V and Gamma before each segment), (the final K, V, Gamma)."""
    out = [_projected(plan, x, None, g, sums) for x in (k, v)]
    final = [
        _run_scan(plan, own, total, init, own.shape[2], reverse=False, decay=True)
        for own, init in zip(out, (k0, v0))
    ]
    gamma = total.clone()
    kept = _run_scan(plan, gamma, total, kept0, 1, reverse=False, decay=False)
    return (*out, gamma), (*final, kept[..., 0])


def _grid(plan: _Plan) -> tuple[int]:
    return (plan.segments * plan.H * (plan.segment // 16),)


def forward(q, k, v, log_gate, scale: float, mass: bool, k0, v0, kept0, cu_seqlens):
    """As triton_chunk.forward."""
    q, k, v, g, k0, v0, kept0 = _plain(q, k, v, log_gate, k0, v0, kept0)
    plan = _Plan(q, k, v, g, cu_seqlens, CHUNK)
    o = v.new_empty(*q.shape[:3], plan.E)
    if one_token(q, k0):
        return o, *_one_token(plan, q, k, v, g, o, scale, mass, k0, v0, kept0)
    sums, log, total = _summed(plan, g)
    (K0, V0, gamma), final = _states(plan, k, v, g, sums, total, k0, v0, kept0)
    sizes = {"DP": _pad(plan.D), "EP": _pad(plan.E), "MASS": mass}
    _forward[_grid(plan)](
        q, k, v, g, sums, log, o, K0, V0, gamma, plan.starts, plan.stops, scale,
        plan.T, plan.H, plan.D, plan.E, plan.M, **sizes, **_kind(plan), **_tiles(plan, "forward"),
    )  # fmt: skip
    return o, *final


def backward(q, k, v, log_gate, scale: float, mass: bool, k0, v0, kept0, cu_seqlens, do, dK1, dV1, dkept1):
    """As triton_chunk.backward."""
    q, k, v, g, k0, v0, kept0 = _plain(q, k, v, log_gate, k0, v0, kept0)
    do, dK1, dV1, dkept1 = _plain(do, dK1, dV1, dkept1)
    plan = _Plan(q, k, v, g, cu_seqlens, CHUNK)
    sums, log, total = _summed(plan, g)
    (K0, V0, gamma), _ = _states(plan, k, v, g, sums, total, k0, v0, kept0)
    dq, dg, paired = torch.empty_like(q), torch.empty_like(g), torch.empty_like(g)
    P, dU = (q.new_empty(*q.shape[:3], plan.M) for _ in range(2))
    drift = g.new_zeros(plan.segments, plan.segment // 16, plan.H, 1, plan.M)
    sizes = {"DP": _pad(plan.D), "EP": _pad(plan.E), "MASS": mass}
    _rows_grad[_grid(plan)](
        q, k, v, g, sums, log, do, K0, V0, gamma, dq, P, dU, dg, paired, drift, plan.starts, plan.stops,
        scale, plan.T, plan.H, plan.D, plan.E, plan.M, **sizes, **_kind(plan), **_tiles(plan, "rows"),
    )  # fmt: skip
    dgamma = drift.sum(1)
    dkept0 = _run_scan(plan, dgamma, total, dkept1, 1, reverse=True, decay=False)

    def half(x, y, W, S0, after, paired=None):
        """dx and the gradient of the initial slots."""
        X = x.shape[-1]
        dS, dx = _projected(plan, y, W, g, sums), torch.empty_like(x)
        first = _run_scan(plan, dS, total, after, X, reverse=True, decay=True)
        grid, sizes = (plan.segments * plan.H,), (plan.starts, plan.stops, plan.T, plan.H, X, plan.M)
        _dx[grid](y, W, g, sums, log, dS, dx, *sizes, XP=_pad(X), **_kind(plan), **_tiles(plan, "dx"))
        _dgate[grid](
            x, y, W, g, sums, log, S0, dS, dgamma, paired, dg, *sizes,
            XP=_pad(X), WALK=paired is not None, **_kind(plan), **_tiles(plan, "dgate"),
        )  # fmt: skip
        return dx, first

    dv, dv0 = half(v, do, P, V0, dV1, paired)
    del P, V0, paired  # their memory is taken by the other half
    dk, dk0 = half(k, q, dU, K0, dK1)
    return dq, dk, dv, dg, dk0, dv0, dkept0[..., 0]
