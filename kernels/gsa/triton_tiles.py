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

    _gates          a chunk: sums of log_gate and the factors of pairs, which everything else reads.
    _write          a chunk: k^T W and v^T W, the slots that it writes.
    _ask            a chunk: what its reads ask of the slots before it, of K or of V.
    _forward        a block: o and the read weights P. No loop over tokens, neither here nor in the next two.
    _weights_grad   a block: dU from P and do, and what the reads of V say of the gates.
    _queries_grad   a block: dq, and what the reads of K say of the gates.
    _pairs_grad     a chunk: dlog_gate but for what later chunks read.
    _dx             a chunk: dk from q and dU, or dv from do and P, and that rest of dlog_gate.

A block's factors of columns are those that each token has for its own block, times a power of two: so
_pairs_grad sums over blocks before it applies them.
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
    _run_scan,
    _tile,
    one_token,
)

CHUNK = 64
BLOCKS = {"forward": 1}  # blocks of 16 tokens that a program reads one after another
HEADS = {"forward": 4, "weights": 4, "queries": 4, "pairs": 4, "dx": 4}  # heads in a product: 64 rows
# above 64 slots twice
WARPS = {"write": 4, "ask": 4, "forward": 4, "weights": 4, "queries": 4, "pairs": 4, "dx": 4}
# of loads in loops
STAGES = {"write": 1, "ask": 3, "forward": 1, "weights": 1, "queries": 1, "pairs": 1, "dx": 2}
# from Hopper on, whether keys and slots are loaded before the factors of columns are made; 2: values too
EARLY = {"forward": 2, "weights": 1, "queries": 1}
REGISTERS: dict[str, int | None] = {"ask": 168, "weights": 168}  # of a thread, so that three programs fit
# Smaller calls are padded: _dx of 16 slots and one head died of an illegal access on an H200 (Triton 3.6),
# though no address in its PTX lies outside its tensors.
LEAST_SLOTS = 64
LEAST_HEADS = {"dx": 4}  # elsewhere 2


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
    """[16, M] of tokens, repeated for each head of the group: [16 * GR, M]."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], (16, GR, M)), (16 * GR, M))


@triton.jit
def _tokens(x, GR: tl.constexpr, M: tl.constexpr):
    """[16 * GR, M] summed over the group: [16, M]."""
    return tl.sum(tl.reshape(x, (16, GR, M)), 1)


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
def _inverse(x, dtype: tl.constexpr):
    """1 / x in one instruction, to 2^-23; `1 / x` takes nine."""
    if dtype == tl.float32:
        y = 1.0 / tl.where(x > 0, x, 1.0)
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def _written(x, DT: tl.constexpr):
    """1 - 2^x of x <= 0, to 1e-6 of it."""
    near = -x * (0.69314718 + x * (0.24022651 + x * (0.055504109 + x * 0.0096181291)))
    return tl.where(x > -0.14, near, 1.0 - _exp2(x, DT))


@triton.jit
def _mass(gamma, DT: tl.constexpr):
    """z and 1 / z of Gamma in powers of two; 1 / z is 0 for an empty slot."""
    z = _written(gamma, DT)
    return z, tl.where(z > 1e-37, _inverse(z, DT), 0.0)


@triton.jit
def _read(u, z, iz, m_ok, MASS: tl.constexpr, DT: tl.constexpr):
    """Read weights of u [rows, M] in powers of two: 2^u over its sum, or 2^{u/z} over the sum of z 2^{u/z}
    over slots with any mass."""
    if MASS:
        w = tl.where(iz > 0, u * iz, -float("inf"))
    else:
        w = tl.where(m_ok[None, :], u, -float("inf"))
    top = tl.max(w, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    e = _exp2(w - top[:, None], DT)
    total = tl.sum(z * e, 1) if MASS else tl.sum(e, 1)
    return e * (1.0 / tl.where(total > 0, total, 1.0))[:, None]


@triton.jit
def _mean(P, z, dP):
    """Sum of P dP over slots [rows, 1]. P is rounded: its sum is put right, or peaked reads lose dU."""
    total = tl.sum(P * z, 1)
    return (tl.sum(P * dP, 1) / tl.where(total > 0, total, 1.0))[:, None]


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
def _fours(a, b, c, d, N: tl.constexpr, M: tl.constexpr):
    """[N, M] whose row 4 n + x is row n of the x-th of four [N / 4, M].

    A thread then holds four rows of a column, and stores them side by side, as a product wants its right
    operand of float32; one by one they meet in the same banks (16 at a time, a fifth of a kernel's time).
    """
    x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(tl.reshape(x, (N // 4, M, 4)), (0, 2, 1)), (N, M))


@triton.jit
def _powers(mark_ptr, first, b, slots, m, m_ok, SEG: tl.constexpr, DT: tl.constexpr):
    """What `near` of a token must stay below, or its column is 0, as it is after the block at `first` and
    where it would be below 2^-28 at that block's first token; and 2^(n of that block - n of the token's), at
    most 1. All [blocks, 1, M].

    The power in two factors: closed gates in both blocks put 2^-208 between two anchors, and 2^208 into what
    it multiplies. Tokens from b on are not looked at.
    """
    c = tl.arange(0, SEG // 16)[:, None, None]
    own = first // 16
    mark_ptr += m[None, None, :]
    ok = m_ok[None, None, :]
    n = tl.load(mark_ptr + c * (2 * slots), mask=ok & (c * 16 < b), other=0.0)
    here = tl.load(mark_ptr + own * (2 * slots), mask=ok, other=0.0)
    start = tl.load(mark_ptr + (own * 2 + 1) * slots, mask=ok, other=0.0)
    shift = tl.minimum(here - n, 0.0)
    half = tl.floor(shift * 0.5)
    past = _exp2(28.0 + start - n, DT)
    most = tl.where(c < own, past, tl.where(c == own, float("inf"), 0.0))
    return most, _exp2(half, DT), _exp2(shift - half, DT)


@triton.jit
def _columns(
    col_ptr, near_ptr, mark_ptr, first, b, step, slots, m, m_ok,
    SEG: tl.constexpr, M: tl.constexpr, DT: tl.constexpr, FOURS: tl.constexpr = True,
):  # fmt: skip
    """Factors of columns [SEG, M] for the block at `first`. FOURS: to be the right operand of a product that
    sums over tokens."""
    most, some, rest = _powers(mark_ptr, first, b, slots, m, m_ok, SEG, DT)
    if FOURS:
        fours = tl.arange(0, SEG // 16)[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4
        parts = ()
        for x in tl.static_range(4):
            spot = (fours + x) * step + m[None, None, :]
            ok = m_ok[None, None, :] & (fours + x < b)
            col = tl.load(col_ptr + spot, mask=ok, other=0.0)
            near = tl.load(near_ptr + spot, mask=ok, other=0.0)
            parts += (tl.reshape(col * tl.where(near < most, some, 0.0) * rest, (SEG // 4, M)),)
        factors = _fours(parts[0], parts[1], parts[2], parts[3], SEG, M)
    else:
        t = tl.arange(0, SEG // 16)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
        spot = t * step + m[None, None, :]
        ok = m_ok[None, None, :] & (t < b)
        col = tl.load(col_ptr + spot, mask=ok, other=0.0)
        near = tl.load(near_ptr + spot, mask=ok, other=0.0)
        factors = tl.reshape(col * tl.where(near < most, some, 0.0) * rest, (SEG, M))
    return factors


@triton.jit
def _query_rows(head, i, b, G: tl.constexpr, H):
    """Rows of tokens i in q, [tokens * H * G] from the first head of the group; b's where no such head is."""
    return tl.where(head < G, i * (H * G) + head, b * (H * G))


@triton.jit
def _left(sums_ptr, sums, b, step, m, m_ok, DT: tl.constexpr):
    """What of each token is left at the end of its chunk, from sums [n, M] of _gates."""
    last = _log_rows(sums_ptr, b - 1 + tl.arange(0, 1), b, step, m, m_ok)
    return _exp2(tl.minimum(last - sums, 0.0), DT)


@triton.jit(do_not_specialize=["T", "H"])
def _gates(
    g_ptr, sums_ptr, near_ptr, col_ptr, mark_ptr, total_ptr, seg_start, seg_end, T, H, slots,
    SEG: tl.constexpr, M: tl.constexpr, DT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). Of log_gate, float32: sums [tokens, H, M] from the segment's first token to each,
    in powers of two, gates held at -104 (e^-104 is 0, and a sum keeps its digits); total [segments, H, M];
    and of gates held at -9: near = e^{G_i - N} and col = s e^{N - G_i} [tokens, H, M], N of the token's own
    block, and mark [segments, H, blocks, 2, M], log2 of e^N and of e^G before the block.

    A thread keeps to its slot; the loads of a block come before its first sum.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    m = tl.arange(0, M)
    m_ok = m < slots
    at, step = (a * H + h) * slots + m, H * slots
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M,), tl.float32)
    log = tl.zeros((M,), tl.float32)
    mark_ptr += pid * (SEG // 16 * 2) * slots + m
    for first in range(0, b, 16):
        gates = ()
        middle = log
        for t in tl.static_range(16):
            gates += (
                tl.load(g_ptr + at + (first + t) * step, mask=m_ok & (first + t + m * 0 < b), other=0.0),
            )
        for t in tl.static_range(8):
            middle += tl.maximum(gates[t], -9.0) * LOG2E
        n = tl.floor(middle) + 8.0
        tl.store(mark_ptr, n, mask=m_ok)
        tl.store(mark_ptr + slots, log, mask=m_ok)
        mark_ptr += 2 * slots
        for t in tl.static_range(16):
            total += tl.maximum(gates[t], -1e4)
            sums += tl.maximum(gates[t], -104.0) * LOG2E
            log += tl.maximum(gates[t], -9.0) * LOG2E
            whole = n.to(tl.int32)
            ok = m_ok & (first + t + m * 0 < b)
            spot = at + (first + t) * step
            tl.store(sums_ptr + spot, sums, mask=ok)
            tl.store(near_ptr + spot, _scaled(log, -whole, DT), mask=ok)
            tl.store(
                col_ptr + spot, _cut(_written(gates[t] * LOG2E, DT) * _scaled(-log, whole, DT), DT), mask=ok
            )
    tl.store(total_ptr + pid * slots + m, total, mask=m_ok)


@triton.jit
def _outer(x_ptr, w, out_ptr, row, b, step, x, X, slots, m, m_ok, DT: tl.constexpr):
    """Stores x^T w [X, M] of tokens' x and w [tokens, M]."""
    S = _dot(tl.trans(_tile(x_ptr, row, b, step, x, X)), w, DT)
    tl.store(out_ptr + x[:, None] * slots + m[None, :], S, mask=(x < X)[:, None] & m_ok[None, :])


@triton.jit(do_not_specialize=["T", "H"])
def _write(
    k_ptr, v_ptr, g_ptr, sums_ptr, own_k_ptr, own_v_ptr, seg_start, seg_end, T, H, D, E, slots,
    SEG: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, DT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H, tiles of D or E). What a segment writes into empty slots: k^T W [D, M] and v^T W
    [E, M], W = s e^{T - G}."""
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m = tl.arange(0, SEG), tl.arange(0, M)
    m_ok = m < slots
    g = _log_rows(g_ptr + (a * H + h) * slots, t, b, H * slots, m, m_ok)
    sums_ptr += (a * H + h) * slots
    sums = _log_rows(sums_ptr, t, b, H * slots, m, m_ok)
    w = _written(g * LOG2E, DT) * _left(sums_ptr, sums, b, H * slots, m, m_ok, DT)
    d, e = tl.program_id(1) * BD + tl.arange(0, BD), tl.program_id(1) * BE + tl.arange(0, BE)
    own_k_ptr += pid * D * slots
    own_v_ptr += pid * E * slots
    _outer(k_ptr + (a * H + h) * D, w, own_k_ptr, t, b, H * D, d, D, slots, m, m_ok, DT)
    _outer(v_ptr + (a * H + h) * E, w, own_v_ptr, t, b, H * E, e, E, slots, m, m_ok, DT)


@triton.jit(do_not_specialize=["T", "H"])
def _ask(
    y_ptr, w_ptr, sums_ptr, out_ptr, seg_start, seg_end, T, H, X, slots,
    G: tl.constexpr, SEG: tl.constexpr, BX: tl.constexpr, M: tl.constexpr, DT: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H, tiles of X). What a segment's reads ask of the slots before it: out [X, M], the sum
    over its tokens and heads of y^T (w e^G), of y = q and w = scale dU, or of do and P."""
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, x = tl.arange(0, SEG), tl.arange(0, M), tl.program_id(1) * BX + tl.arange(0, BX)
    m_ok = m < slots
    y_ptr += (a * H + h) * G * X
    w_ptr += (a * H + h) * G * slots
    decay = _exp2(_log_rows(sums_ptr + (a * H + h) * slots, t, b, H * slots, m, m_ok), DT)
    S = tl.zeros((BX, M), tl.float32)
    for head in range(0, G):
        y = _tile(y_ptr + head * X, t, b, H * G * X, x, X)
        w = _tile(w_ptr + head * slots, t, b, H * G * slots, m, slots).to(tl.float32) * decay
        high = _high(w, DT)  # w was rounded already: once more would be the largest error of dK0
        S += _dot(tl.trans(y), high, DT)
        if not DT.is_fp32():
            S += _dot(tl.trans(y), w - high, DT)
    spot = pid * X * slots + x[:, None] * slots + m[None, :]
    tl.store(out_ptr + spot, S, mask=(x < X)[:, None] & m_ok[None, :])


@triton.jit(do_not_specialize=["T", "H"])
def _forward(
    q_ptr, k_ptr, v_ptr, g_ptr, sums_ptr, near_ptr, col_ptr, mark_ptr, o_ptr, p_ptr, k0_ptr, v0_ptr,
    gamma_ptr, seg_start, seg_end, scale, T, H, D, E, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, MASS: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr, BLOCKS: tl.constexpr,
    PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H * blocks / BLOCKS). Reads q, k, v, log_gate and the slots before the segment; writes
    o (OUT) and the read weights P [tokens, HQ, M] for a backward pass (KEEP)."""
    cuts: tl.constexpr = SEG // (16 * BLOCKS)
    begin = (tl.program_id(0) % cuts) * (16 * BLOCKS)
    pid = (tl.program_id(0) // cuts).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    if begin >= b:
        return
    t, m, d, e = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, DP), tl.arange(0, EP)
    r = tl.arange(0, GR * 16)
    m_ok = m < slots
    at_g, step = (a * H + h) * slots, H * slots
    mark_ptr += pid * (SEG // 16 * 2) * slots
    kept = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0) * LOG2E
    stop = tl.minimum(b, begin + 16 * BLOCKS)
    q_ptr += (a * H + h) * G * D
    o_ptr += (a * H + h) * G * E
    p_ptr += (a * H + h) * G * slots
    k_ptr += (a * H + h) * D
    v_ptr += (a * H + h) * E
    k0_ptr += pid * D * slots
    v0_ptr += pid * E * slots
    if EARLY > 0:
        k = _tile(k_ptr, t, stop, H * D, d, D)
        K0 = _tile(k0_ptr, d, D, slots, m, slots)
        if OUT and EARLY > 1:
            V0 = _tile(v0_ptr, e, E, slots, m, slots)
            v = _tile(v_ptr, t, stop, H * E, e, E)
    for first in range(begin, stop, 16):
        i = first + r // GR
        end = tl.minimum(b, first + 16)
        causal = i[:, None] >= t[None, :]
        col = _columns(
            col_ptr + at_g, near_ptr + at_g, mark_ptr, first, end, step, slots, m, m_ok, SEG, M, DT
        )
        sums = _log_rows(sums_ptr + at_g, first + tl.arange(0, 16), b, step, m, m_ok)
        z1, iz1 = _mass(kept[None, :] + sums, DT)
        near = _rows(_log_rows(near_ptr + at_g, first + tl.arange(0, 16), b, step, m, m_ok), GR, M)
        decay = _rows(_exp2(sums, DT), GR, M)
        z, iz = _rows(z1, GR, M), _rows(iz1, GR, M)
        for some in range(0, G, GR):
            row = _query_rows(some + r % GR, i, b, G, H)
            r_ok = (row < b * (H * G))[:, None]
            q = _tile(q_ptr, row, b * (H * G), D, d, D)
            if EARLY == 0:
                k = _tile(k_ptr, t, stop, H * D, d, D)
            A = tl.where(causal, _dot(q, tl.trans(k), DT), 0.0)
            inner = _fine_dot(A, col, DT)
            if EARLY == 0:
                K0 = _tile(k0_ptr, d, D, slots, m, slots)
            U = scale * LOG2E * (decay * _dot(q, K0, DT) + near * inner)
            P = _read(U, z, iz, m_ok, MASS, DT)
            if KEEP:
                spots = p_ptr + row[:, None] * slots + m[None, :]
                tl.store(spots, _rounded(P, DT), mask=r_ok & m_ok[None, :])
            if OUT:
                Bm = tl.where(causal, _fine_dot(P * near, tl.trans(col), DT), 0.0)
                if EARLY < 2:
                    V0 = _tile(v0_ptr, e, E, slots, m, slots)
                    v = _tile(v_ptr, t, stop, H * E, e, E)
                O = _dot(P * decay, tl.trans(V0), DT)
                O += _dot(Bm, v, DT)
                tl.store(o_ptr + row[:, None] * E + e[None, :], O, mask=r_ok & (e < E)[None, :])


@triton.jit(do_not_specialize=["T", "H"])
def _weights_grad(
    v_ptr, g_ptr, sums_ptr, near_ptr, col_ptr, mark_ptr, do_ptr, v0_ptr, gamma_ptr, p_ptr, du_ptr,
    walk_ptr, paired_ptr, drift_ptr, seg_start, seg_end, scale, T, H, E, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H * blocks). From P: scale dU [tokens, HQ, M]; of the gates, before they are summed
    over later reads, what goes by V: walk and paired [tokens, H, M]; with mass also drift [segments, blocks,
    H, M], the sum of -dz e^Gamma. paired holds what _pairs_grad subtracts its columns from: the same rounded
    numbers make both."""
    blocks: tl.constexpr = SEG // 16
    block = tl.program_id(0) % blocks
    first = block * 16
    pid = (tl.program_id(0) // blocks).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    if first >= b:
        return
    t, m, e = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, EP)
    r = tl.arange(0, GR * 16)
    i = first + r // GR
    m_ok = m < slots
    own = first + tl.arange(0, 16)
    at_g, step = (a * H + h) * slots, H * slots
    mark_ptr += pid * (SEG // 16 * 2) * slots
    end = tl.minimum(b, first + 16)
    v_ptr += (a * H + h) * E
    v0_ptr += pid * E * slots
    do_ptr += (a * H + h) * G * E
    p_ptr += (a * H + h) * G * slots
    du_ptr += (a * H + h) * G * slots
    causal = i[:, None] >= t[None, :]
    walk = tl.zeros((16, M), tl.float32)
    paired = tl.zeros((16, M), tl.float32)
    drift = tl.zeros((16, M), tl.float32)
    if EARLY > 0:
        v = _tile(v_ptr, t, end, H * E, e, E)
        V0 = _tile(v0_ptr, e, E, slots, m, slots)
    col = _columns(col_ptr + at_g, near_ptr + at_g, mark_ptr, first, end, step, slots, m, m_ok, SEG, M, DT)
    near = _rows(_log_rows(near_ptr + at_g, own, b, step, m, m_ok), GR, M)
    for some in range(0, G, GR):
        row = _query_rows(some + r % GR, i, b, G, H)
        r_ok = (row < b * (H * G))[:, None]
        do = _tile(do_ptr, row, b * (H * G), E, e, E)
        if EARLY == 0:
            v = _tile(v_ptr, t, end, H * E, e, E)
        dB = tl.where(causal, _dot(do, tl.trans(v), DT), 0.0)
        dinner = _fine_dot(dB, col, DT)
        P = _tile(p_ptr, row, b * (H * G), slots, m, slots).to(tl.float32)
        paired += _tokens(_cut(P * near, DT) * dinner, GR, M)
        if EARLY == 0:
            V0 = _tile(v0_ptr, e, E, slots, m, slots)
        sums = _log_rows(sums_ptr + at_g, own, b, step, m, m_ok)
        read = _rows(_exp2(sums, DT), GR, M) * _dot(do, V0, DT)
        walk += _tokens(P * read, GR, M)
        dP = read + near * dinner
        if MASS:
            gamma = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)[None, :] * LOG2E + sums
            z1, iz1 = _mass(gamma, DT)
            z = _rows(z1, GR, M)
            S = _mean(P, z, dP)
            drift += _tokens(P * S, GR, M)
            dU = P * (dP - z * S) * _rows(iz1 * scale, GR, M)
        else:
            dU = P * (dP - _mean(P, 1.0, dP)) * scale
        spots = row[:, None] * slots + m[None, :]
        tl.store(du_ptr + spots, _rounded(dU, DT), mask=r_ok & m_ok[None, :])
    if MASS:
        sums = _log_rows(sums_ptr + at_g, own, b, step, m, m_ok)
        gamma = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)[None, :] * LOG2E + sums
        drift = drift * _exp2(gamma, DT)
        walk += drift
        spot = ((seg * blocks + block) * H + h) * slots
        tl.store(drift_ptr + spot + m, tl.sum(drift, 0), mask=m_ok)
    where = at_g + own[:, None] * step + m[None, :]
    ok = (own < b)[:, None] & m_ok[None, :]
    tl.store(walk_ptr + where, walk, mask=ok)
    tl.store(paired_ptr + where, paired, mask=ok)


@triton.jit(do_not_specialize=["T", "H"])
def _queries_grad(
    q_ptr, k_ptr, g_ptr, sums_ptr, near_ptr, col_ptr, mark_ptr, k0_ptr, gamma_ptr, du_ptr, dq_ptr,
    walk_ptr, paired_ptr, drift_ptr, seg_start, seg_end, T, H, D, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, MASS: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H * blocks). dq; to walk, paired and drift of _weights_grad it adds what goes by K."""
    blocks: tl.constexpr = SEG // 16
    block = tl.program_id(0) % blocks
    first = block * 16
    pid = (tl.program_id(0) // blocks).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    if first >= b:
        return
    t, m, d = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, DP)
    r = tl.arange(0, GR * 16)
    i = first + r // GR
    m_ok = m < slots
    own = first + tl.arange(0, 16)
    at_g, step = (a * H + h) * slots, H * slots
    mark_ptr += pid * (SEG // 16 * 2) * slots
    end = tl.minimum(b, first + 16)
    k_ptr += (a * H + h) * D
    k0_ptr += pid * D * slots
    q_ptr += (a * H + h) * G * D
    dq_ptr += (a * H + h) * G * D
    du_ptr += (a * H + h) * G * slots
    causal = i[:, None] >= t[None, :]
    walk = tl.zeros((16, M), tl.float32)
    paired = tl.zeros((16, M), tl.float32)
    if EARLY > 0:
        k = _tile(k_ptr, t, end, H * D, d, D)
        K0 = _tile(k0_ptr, d, D, slots, m, slots)
    col = _columns(col_ptr + at_g, near_ptr + at_g, mark_ptr, first, end, step, slots, m, m_ok, SEG, M, DT)
    near = _rows(_log_rows(near_ptr + at_g, own, b, step, m, m_ok), GR, M)
    for some in range(0, G, GR):
        row = _query_rows(some + r % GR, i, b, G, H)
        r_ok = (row < b * (H * G))[:, None]
        q = _tile(q_ptr, row, b * (H * G), D, d, D)
        if EARLY == 0:
            k = _tile(k_ptr, t, end, H * D, d, D)
        dU = _tile(du_ptr, row, b * (H * G), slots, m, slots).to(tl.float32)
        dUn = _cut(dU * near, DT)
        A = tl.where(causal, _dot(q, tl.trans(k), DT), 0.0)
        paired += _tokens(dUn * _fine_dot(A, col, DT), GR, M)
        dA = tl.where(causal, _fine_dot(dUn, tl.trans(col), DT), 0.0)
        if EARLY == 0:
            K0 = _tile(k0_ptr, d, D, slots, m, slots)
        sums = _log_rows(sums_ptr + at_g, own, b, step, m, m_ok)
        dU = dU * _rows(_exp2(sums, DT), GR, M)
        walk += _tokens(dU * _dot(q, K0, DT), GR, M)
        dq = _dot(dU, tl.trans(K0), DT) + _dot(dA, k, DT)
        tl.store(dq_ptr + row[:, None] * D + d[None, :], dq, mask=r_ok & (d < D)[None, :])
    where = at_g + own[:, None] * step + m[None, :]
    ok = (own < b)[:, None] & m_ok[None, :]
    if MASS:
        sums = _log_rows(sums_ptr + at_g, own, b, step, m, m_ok)
        gamma = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)[None, :] * LOG2E + sums
        _, iz1 = _mass(gamma, DT)
        drift = (walk + paired) * iz1 * _exp2(gamma, DT)
        walk += drift
        spot = ((seg * blocks + block) * H + h) * slots
        had = tl.load(drift_ptr + spot + m, mask=m_ok, other=0.0)
        tl.debug_barrier()  # a thread may store what another loads
        tl.store(drift_ptr + spot + m, had + tl.sum(drift, 0), mask=m_ok)
    walk += tl.load(walk_ptr + where, mask=ok, other=0.0)
    paired += tl.load(paired_ptr + where, mask=ok, other=0.0)
    tl.debug_barrier()
    tl.store(walk_ptr + where, walk, mask=ok)
    tl.store(paired_ptr + where, paired, mask=ok)


@triton.jit(do_not_specialize=["T", "H"])
def _pairs_grad(
    q_ptr, k_ptr, v_ptr, do_ptr, p_ptr, du_ptr, g_ptr, near_ptr, col_ptr, mark_ptr, dgamma_ptr, paired_ptr,
    dg_ptr, seg_start, seg_end, T, H, D, E, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). dlog_gate but for what reaches the slots after the segment; dg holds walk."""
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, d, e = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, DP), tl.arange(0, EP)
    r = tl.arange(0, GR * 16)
    m_ok, step = m < slots, H * slots
    g_ptr += (a * H + h) * slots
    near_ptr += (a * H + h) * slots
    col_ptr += (a * H + h) * slots
    mark_ptr += pid * (SEG // 16 * 2) * slots
    q_ptr += (a * H + h) * G * D
    do_ptr += (a * H + h) * G * E
    p_ptr += (a * H + h) * G * slots
    du_ptr += (a * H + h) * G * slots
    k = _tile(k_ptr + (a * H + h) * D, t, b, H * D, d, D)
    v = _tile(v_ptr + (a * H + h) * E, t, b, H * E, e, E)
    sums = tl.zeros((SEG, M), tl.float32)
    for first in range(0, b, 16):
        i = first + r // GR
        near = _log_rows(near_ptr, i, b, step, m, m_ok)
        reads = t[:, None] <= i[None, :]
        dcol = tl.zeros((SEG, M), tl.float32)
        for some in range(0, G, GR):
            row = _query_rows(some + r % GR, i, b, G, H)
            q = _tile(q_ptr, row, b * (H * G), D, d, D)
            dU = _cut(_tile(du_ptr, row, b * (H * G), slots, m, slots).to(tl.float32) * near, DT)
            A = tl.where(reads, _dot(k, tl.trans(q), DT), 0.0)
            dcol += _fine_dot(A, dU, DT)
            do = _tile(do_ptr, row, b * (H * G), E, e, E)
            P = _cut(_tile(p_ptr, row, b * (H * G), slots, m, slots).to(tl.float32) * near, DT)
            dB = tl.where(reads, _dot(v, tl.trans(do), DT), 0.0)
            dcol += _fine_dot(dB, P, DT)
        end = tl.minimum(b, first + 16)
        most, shift, rest = _powers(mark_ptr, first, end, slots, m, m_ok, SEG, DT)
        at = tl.arange(0, SEG // 16)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
        mask = m_ok[None, None, :] & (at < end)
        near = tl.load(near_ptr + at * step + m[None, None, :], mask=mask, other=0.0)
        dcol = tl.reshape(dcol, (SEG // 16, 16, M)) * tl.where(near < most, shift, 0.0)
        sums += tl.reshape(dcol * rest, (SEG, M))
    later = t[:, None] <= t[None, :]
    spot = (a * H + h) * slots + t[:, None] * step + m[None, :]
    ok = (t < b)[:, None] & m_ok[None, :]
    g = _load_gate(g_ptr, t, b, step, m, m_ok)
    pairs = tl.load(paired_ptr + spot, mask=ok, other=0.0)
    pairs -= sums * _log_rows(col_ptr, t, b, step, m, m_ok)
    ds = sums * _inverse(tl.load(near_ptr + t[:, None] * step + m[None, :], mask=ok, other=1.0), DT)
    dg = _exp2(tl.minimum(g + 9.0, 0.0) * LOG2E, DT) * _summed_by(later, pairs, DT)
    dg -= _exp2(g * LOG2E, DT) * ds
    dg += _summed_by(later, tl.load(dg_ptr + spot, mask=ok, other=0.0), DT)
    dg += tl.load(dgamma_ptr + pid * slots + m, mask=m_ok, other=0.0)[None, :]
    tl.debug_barrier()  # a thread may store what another loads
    tl.store(dg_ptr + spot, dg, mask=ok)


@triton.jit(do_not_specialize=["T", "H"])
def _dx(
    x_ptr, y_ptr, w_ptr, g_ptr, sums_ptr, near_ptr, col_ptr, mark_ptr, s0_ptr, ds1_ptr, dx_ptr, dg_ptr,
    seg_start, seg_end, T, H, X, slots,
    G: tl.constexpr, GR: tl.constexpr, SEG: tl.constexpr, XP: tl.constexpr, M: tl.constexpr,
    DT: tl.constexpr, PACKED: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). dx = B^T y + W dS^T: of x = k from y = q, W = scale dU, or of v from do and P; and
    what of dlog_gate goes by x to the slots after the segment, added to dg.

    Slots s0 before the segment and gradients ds1 of those after it. HOLD: col and near stay in registers;
    else a block loads what it needs, which would lie in shared memory twice where loads run ahead.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, f = tl.arange(0, SEG), tl.arange(0, M), tl.arange(0, XP)
    r = tl.arange(0, GR * 16)
    m_ok, step = m < slots, H * slots
    g_ptr += (a * H + h) * slots
    sums_ptr += (a * H + h) * slots
    near_ptr += (a * H + h) * slots
    col_ptr += (a * H + h) * slots
    mark_ptr += pid * (SEG // 16 * 2) * slots
    y_ptr += (a * H + h) * G * X
    w_ptr += (a * H + h) * G * slots
    dS = _tile(ds1_ptr + pid * X * slots, f, X, slots, m, slots)
    S0 = _tile(s0_ptr + pid * X * slots, f, X, slots, m, slots)
    last = _log_rows(sums_ptr, b - 1 + tl.arange(0, 1), b, step, m, m_ok)
    kept_on = tl.sum(S0.to(tl.float32) * dS.to(tl.float32), 0)[None, :] * _exp2(last, DT)
    x = _tile(x_ptr + (a * H + h) * X, t, b, H * X, f, X)
    reach = _dot(x, dS, DT)
    sums = _log_rows(sums_ptr, t, b, step, m, m_ok)
    g = _log_rows(g_ptr, t, b, step, m, m_ok)
    left = _exp2(tl.minimum(last - sums, 0.0), DT)
    w = _written(g * LOG2E, DT) * left
    dg = kept_on - _exp2(g * LOG2E, DT) * left * reach
    dg += _summed_by(t[:, None] > t[None, :], w * reach, DT)
    spot = (a * H + h) * slots + t[:, None] * step + m[None, :]
    ok = (t < b)[:, None] & m_ok[None, :]
    dg += tl.load(dg_ptr + spot, mask=ok, other=0.0)
    tl.debug_barrier()  # a thread may store what another loads
    tl.store(dg_ptr + spot, dg, mask=ok)
    dx = _dot(w, tl.trans(dS), DT)
    for first in range(0, b, 16):
        end = b if HOLD else tl.minimum(b, first + 16)
        col = _columns(col_ptr, near_ptr, mark_ptr, first, end, step, slots, m, m_ok, SEG, M, DT, False)
        i = first + r // GR
        near = _log_rows(near_ptr, i, b, step, m, m_ok)
        for some in range(0, G, GR):
            row = _query_rows(some + r % GR, i, b, G, H)
            y = _tile(y_ptr, row, b * (H * G), X, f, X)
            Wn = _tile(w_ptr, row, b * (H * G), slots, m, slots).to(tl.float32) * near
            B = tl.where(t[:, None] <= i[None, :], _fine_dot(col, tl.trans(Wn), DT), 0.0)
            dx += _dot(B, y, DT)
    spot = (a * H + h) * X + t[:, None] * (H * X) + f[None, :]
    tl.store(dx_ptr + spot, dx, mask=(t < b)[:, None] & (f < X)[None, :])


def _kind(plan: _Plan) -> dict:
    """Constants of every kernel that makes products; DT is that of their operands."""
    operands = tl.bfloat16 if plan.dot == torch.bfloat16 else tl.float32
    return plan.kind() | {"M": _width(plan), "G": plan.group, "DT": operands}


def _width(plan: _Plan) -> int:
    """Slots in a product."""
    return max(LEAST_SLOTS, _pad(plan.M))


def _options(plan: _Plan, kernel: str) -> dict:
    large = plan.M > 64 or max(plan.D, plan.E) > 128  # then one tile takes all that there is
    return {
        "num_warps": WARPS[kernel] * (2 if plan.M > 64 else 1),
        "num_stages": min(STAGES[kernel], 2 if kernel == "ask" else 1) if large else STAGES[kernel],
        "maxnreg": registers() or (None if large else REGISTERS.get(kernel)),
    }


def _tiles(plan: _Plan, kernel: str) -> dict:
    fit = 512 // _width(plan)  # more slots, fewer rows, or registers run out
    group = max(LEAST_HEADS.get(kernel, 2), triton.next_power_of_2(plan.group))
    heads = max(1, min(HEADS[kernel], fit, group))
    fits = registers() is None and max(plan.D, plan.E, plan.M) <= 128  # in shared memory
    early = {"EARLY": EARLY[kernel] if fits else 0} if kernel in EARLY else {}
    return {"GR": heads, **early, **_options(plan, kernel)}


def _asked(plan: _Plan, y, w, sums) -> torch.Tensor:
    X = y.shape[-1]
    out, width = plan.buffer(y, X), min(128, _pad(X))
    _ask[(plan.segments * plan.H, triton.cdiv(X, width))](
        y, w, sums, out, plan.starts, plan.stops, plan.T, plan.H, X, plan.M,
        BX=width, **_kind(plan), **_options(plan, "ask"),
    )  # fmt: skip
    return out


def _summed(plan: _Plan, g):
    """What _gates leaves: sums [B, T, H, M]; near, col and mark; total [segments, H, 1, M]."""
    sums, near, col = (torch.empty_like(g) for _ in range(3))
    mark = g.new_empty(plan.segments, plan.H, plan.segment // 16, 2, plan.M)
    total, M = g.new_empty(plan.segments, plan.H, 1, plan.M), _width(plan)
    _gates[(plan.segments * plan.H,)](
        g, sums, near, col, mark, total, plan.starts, plan.stops, plan.T, plan.H, plan.M,
        SEG=plan.segment, M=M, DT=_kind(plan)["DT"], PACKED=plan.packed, num_warps=max(1, M // 32),
    )  # fmt: skip
    return sums, (near, col, mark), total


def _states(plan: _Plan, k, v, g, sums, total, k0, v0, kept0):
    """(Slots K, V and Gamma before each segment), (the final K, V, Gamma)."""
    own = plan.buffer(k, plan.D), plan.buffer(v, plan.E)
    widths = [min(128, _pad(X)) for X in (plan.D, plan.E)]
    tiles = max(triton.cdiv(plan.D, widths[0]), triton.cdiv(plan.E, widths[1]))
    kind = {n: x for n, x in _kind(plan).items() if n != "G"}
    _write[(plan.segments * plan.H, tiles)](
        k, v, g, sums, *own, plan.starts, plan.stops, plan.T, plan.H, plan.D, plan.E, plan.M,
        BD=widths[0], BE=widths[1], **kind, **_options(plan, "write"),
    )  # fmt: skip
    final = _run_scan(plan, own, total, (k0, v0), reverse=False, decay=True)
    gamma = total.clone()
    (kept,) = _run_scan(plan, [gamma], total, (kept0,), reverse=False, decay=False)
    return (*own, gamma), (*final, kept[..., 0])


def _read_slots(plan: _Plan, q, k, v, g, sums, factors, scale, mass, slots, o, P) -> None:
    """Fills o and P, either of which may be None."""
    K0, V0, gamma = slots
    blocks = BLOCKS["forward"] if plan.segment % (16 * BLOCKS["forward"]) == 0 else 1
    _forward[(plan.segments * plan.H * (plan.segment // (16 * blocks)),)](
        q, k, v, g, sums, *factors, q if o is None else o, q if P is None else P, K0, V0, gamma,
        plan.starts, plan.stops, scale, plan.T, plan.H, plan.D, plan.E, plan.M,
        DP=_pad(plan.D), EP=_pad(plan.E), MASS=mass,
        OUT=o is not None, KEEP=P is not None, BLOCKS=blocks, **_kind(plan), **_tiles(plan, "forward"),
    )  # fmt: skip


def forward(q, k, v, log_gate, scale: float, mass: bool, k0, v0, kept0, cu_seqlens, weights=None):
    """As triton_chunk.forward; fills weights [B, T, HQ, M] for backward, unless it is one token."""
    q, k, v, g, k0, v0, kept0 = _plain(q, k, v, log_gate, k0, v0, kept0)
    plan = _Plan(q, k, v, g, cu_seqlens, CHUNK)
    o = v.new_empty(*q.shape[:3], plan.E)
    if one_token(q, k0):
        return o, *_one_token(plan, q, k, v, g, o, scale, mass, k0, v0, kept0)
    sums, factors, total = _summed(plan, g)
    slots, final = _states(plan, k, v, g, sums, total, k0, v0, kept0)
    _read_slots(plan, q, k, v, g, sums, factors, scale, mass, slots, o, weights)
    return o, *final


def backward(
    q, k, v, log_gate, scale: float, mass: bool, k0, v0, kept0, cu_seqlens, do, dK1, dV1, dkept1, P=None
):
    """As triton_chunk.backward; P: the weights that forward left, None: to be made again."""
    q, k, v, g, k0, v0, kept0 = _plain(q, k, v, log_gate, k0, v0, kept0)
    do, dK1, dV1, dkept1 = _plain(do, dK1, dV1, dkept1)
    plan = _Plan(q, k, v, g, cu_seqlens, CHUNK)
    sums, factors, total = _summed(plan, g)
    slots, _ = _states(plan, k, v, g, sums, total, k0, v0, kept0)
    K0, V0, gamma = slots
    if P is None:
        P = q.new_empty(*q.shape[:3], plan.M)
        _read_slots(plan, q, k, v, g, sums, factors, scale, mass, slots, None, P)
    dq, dg, paired, dU = torch.empty_like(q), torch.empty_like(g), torch.empty_like(g), torch.empty_like(P)
    drift = g.new_zeros(plan.segments, plan.segment // 16, plan.H, 1, plan.M)
    grid, kind = (plan.segments * plan.H,), _kind(plan)
    rows = (grid[0] * (plan.segment // 16),)
    where, sizes = (plan.starts, plan.stops), (plan.T, plan.H)
    _weights_grad[rows](
        v, g, sums, *factors, do, V0, gamma, P, dU, dg, paired, drift, *where, scale, *sizes, plan.E, plan.M,
        EP=_pad(plan.E), MASS=mass, **kind, **_tiles(plan, "weights"),
    )  # fmt: skip
    _queries_grad[rows](
        q, k, g, sums, *factors, K0, gamma, dU, dq, dg, paired, drift, *where, *sizes, plan.D, plan.M,
        DP=_pad(plan.D), MASS=mass, **kind, **_tiles(plan, "queries"),
    )  # fmt: skip
    dgamma = drift.sum(1)
    (dkept0,) = _run_scan(plan, [dgamma], total, (dkept1,), reverse=True, decay=False)
    _pairs_grad[grid](
        q, k, v, do, P, dU, g, *factors, dgamma, paired, dg, *where, *sizes, plan.D, plan.E, plan.M,
        DP=_pad(plan.D), EP=_pad(plan.E), **kind, **_tiles(plan, "pairs"),
    )  # fmt: skip
    del paired, drift

    def half(x, y, W, S0, after):
        """dx and the gradient of the initial slots."""
        X = x.shape[-1]
        dS, dx = _asked(plan, y, W, sums), torch.empty_like(x)
        (first,) = _run_scan(plan, [dS], total, (after,), reverse=True, decay=True)
        _dx[grid](
            x, y, W, g, sums, *factors, S0, dS, dx, dg, *where, *sizes, X, plan.M,
            XP=_pad(X), HOLD=_options(plan, "dx")["num_stages"] > 1, **kind, **_tiles(plan, "dx"),
        )  # fmt: skip
        return dx, first

    dv, dv0 = half(v, do, P, V0, dV1)
    del P, V0, slots  # their memory is taken by the other half
    dk, dk0 = half(k, q, dU, K0, dK1)
    return dq, dk, dv, dg, dk0, dv0, dkept0[..., 0]
