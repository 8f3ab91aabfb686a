"""Gated slot attention in float32 and float16 on the GPU, and what triton_tiles.py (bfloat16) shares of it:
cutting into segments, the scan of slots over them, and decoding. Imported only where they run.

A document is cut into segments of SEGMENT tokens, a segment into blocks of C = 16. With K, V the slots before
a block, G_i the sum of the block's log_gate up to token i, T its total, W_ij = s_j e^{G_i - G_j} for j <= i
(else 0), per slot:

    A_ij = q_i . k_j                U_i = scale (e^{G_i} K q_i + sum_j A_ij W_ij)
    P    = read weights of U        B_ij = P_i . W_ij
    O_i  = (P_i e^{G_i}) V + sum_j B_ij v_j
    K'   = e^T K + sum_j s_j e^{T - G_j} k_j, V' likewise

and backwards, from the gradient dK', dV' of the slots after the block (sums over the query group implied):

    dB_ij = dO_i . v_j              dP_i = e^{G_i} V dO_i + sum_j dB_ij W_ij;  dU of the read
    dA_ij = scale dU_i . W_ij
    dQ   = scale (dU e^G) K + dA k  dk = dA^T Q + (s e^{T - G}) dK'      dv = B^T dO + (s e^{T - G}) dV'
    dK   = e^T dK' + scale Q^T (dU e^G)             dV = e^T dV' + (P e^G)^T dO
    ds_j = sum_i e^{G_i - G_j} (dB_ij P_i + A_ij scale dU_i) + e^{T - G_j} (dK' k_j + dV' v_j)
    dlog_gate_t = h_t - e^{log_gate_t} ds_t

where h_t sums every path over token t: reads i >= t of K and V, writes j < t that reach K' and V', K and V
that reach K' and V', and pairs j < t <= i. Each of these carries the factor e^{log_gate_t}, so h_t is
relatively exact where a gate is saturated.

e^{G_i - G_j} of pairs is made token by token, as products of gates: exact for any gate, and slow. Products
are of float32 operands, for one query head at a time. State buffers are [segments, H, size, M].
Nothing of a later token enters an earlier result; segments and blocks start with the document.
"""

import itertools

import torch

try:  # so that Transformers does not ask for triton where a bundle of these files is loaded without it
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels of gated slot attention need triton") from error

C = 16  # tokens of a block, everywhere below
SEGMENT = 128
SCAN = {"AHEAD": 16, "BLOCK": 256}  # segments loaded at once, elements of a program
SCRATCH_BYTES = 128 << 20  # slots of each block while backward runs: launches are cut to fit


@triton.jit
def _expm1(x):
    """exp(x) - 1 of x <= 0: Taylor near 0, where the difference would cancel."""
    y = 1.0 / 40320 + x * (1.0 / 362880)
    y = 1.0 / 720 + x * (1.0 / 5040 + x * y)
    y = 0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * y)))
    return tl.where(x > -0.4, x * (1.0 + x * y), tl.exp(x) - 1.0)


@triton.jit
def _dot(a, b):
    return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


@triton.jit
def _outer(x, w, X: tl.constexpr, M: tl.constexpr):
    """x^T w of x [16, X], w [16, M], as [X / 16, 16, M]: the form in which slots are held."""
    return tl.reshape(_dot(tl.trans(x), w), (X // 16, 16, M))


@triton.jit
def _tile(ptr, row, end, step, x, X):
    """Rows [n] of X numbers, `step` apart; 0 from row `end` on."""
    return tl.load(
        ptr + row[:, None] * step + x[None, :], mask=(row < end)[:, None] & (x < X)[None, :], other=0.0
    )


@triton.jit
def _put(ptr, row, end, step, x, X, values):
    """The converse of _tile."""
    tl.store(ptr + row[:, None] * step + x[None, :], values, mask=(row < end)[:, None] & (x < X)[None, :])


@triton.jit
def _load_gate(g_ptr, row, end, step, m, m_ok):
    """log_gate of tokens row [n], 0 from `end` on; g_ptr points at the head, step from token to token."""
    ok = (row < end)[:, None] & m_ok[None, :]
    return tl.maximum(tl.load(g_ptr + row[:, None] * step + m[None, :], mask=ok, other=0.0), -1e4)


@triton.jit
def _gate(g_ptr, row, end, step, m, m_ok):
    """log_gate of one token, [M]."""
    ok = (row + m * 0 < end) & m_ok
    return tl.maximum(tl.load(g_ptr + row * step + m, mask=ok, other=0.0), -1e4)


@triton.jit
def _left(g_ptr, row, last, end, step, m, m_ok):
    """What of token row is left at the end of its block: exp of the gates after it, [16, M]."""
    nxt = tl.where(row < last, row + 1, end)
    return tl.exp(tl.cumsum(_load_gate(g_ptr, nxt, end, step, m, m_ok), 0, reverse=True))


@triton.jit
def _place(seg, seg_start, seg_end, T, SEG: tl.constexpr, PACKED: tl.constexpr):
    """First row of a segment, int64, and its tokens. Offsets from there on are 32 bits wide."""
    if PACKED:
        a = tl.load(seg_start + seg).to(tl.int64)
        b = tl.load(seg_end + seg).to(tl.int64)
    else:
        n = (T + SEG - 1) // SEG
        doc = (seg // n).to(tl.int64)
        a = doc * T + (seg % n) * SEG
        b = tl.minimum(a + SEG, (doc + 1) * T)
    return a, (b - a).to(tl.int32)


@triton.jit
def _earlier(F, i, t, g_ptr, row, end, step, m, m_ok):
    """e^{G_i - G_t} of tokens i from that of t + 1, [16, M], 0 for i < t; and s_t, [M]."""
    after = _gate(g_ptr, row + t + 1, end, step, m, m_ok)
    here = _gate(g_ptr, row + t, end, step, m, m_ok)
    return tl.where((i == t)[:, None], 1.0, F * tl.exp(after)[None, :]), -_expm1(here)


@triton.jit
def _spread(A, g_ptr, row, end, step, m, m_ok, M: tl.constexpr):
    """sum_j A_ij W_ij, [16, M], W_ij as products of gates."""
    i = tl.arange(0, 16)
    F = tl.zeros((16, M), tl.float32)
    out = tl.zeros((16, M), tl.float32)
    for back in range(16):
        t = 15 - back
        F, written = _earlier(F, i, t, g_ptr, row, end, step, m, m_ok)
        a = tl.sum(tl.where((i == t)[None, :], A, 0.0), 1)
        out += a[:, None] * F * written[None, :]
    return out


@triton.jit
def _gather(P, g_ptr, row, end, step, m, m_ok, M: tl.constexpr):
    """sum_m P_i W_ij, [16, 16]."""
    i = tl.arange(0, 16)
    F = tl.zeros((16, M), tl.float32)
    out = tl.zeros((16, 16), tl.float32)
    for back in range(16):
        t = 15 - back
        F, written = _earlier(F, i, t, g_ptr, row, end, step, m, m_ok)
        b = tl.sum(P * F * written[None, :], 1)
        out = tl.where((i == t)[None, :], b[:, None], out)
    return out


@triton.jit
def _pair_grads(A, dB, P, dU, g_ptr, row, end, step, m, m_ok, M: tl.constexpr):
    """ds_j and h_t of the pairs inside a block, both [16, M]."""
    i = tl.arange(0, 16)
    F = tl.zeros((16, M), tl.float32)
    ds = tl.zeros((16, M), tl.float32)
    h = tl.zeros((16, M), tl.float32)
    for back in range(16):
        t = 15 - back
        F, written = _earlier(F, i, t, g_ptr, row, end, step, m, m_ok)
        a = tl.sum(tl.where((i == t)[None, :], A, 0.0), 1)
        b = tl.sum(tl.where((i == t)[None, :], dB, 0.0), 1)
        x = F * (b[:, None] * P + a[:, None] * dU)
        ds = tl.where((i == t)[:, None], tl.sum(x, 0)[None, :], ds)
        paths = tl.cumsum(x, 0, reverse=True) * written[None, :]
        h += tl.where((i > t)[:, None], paths, 0.0)
    return ds, h


@triton.jit
def _mass(gamma):
    """z and 1 / z of Gamma; both 0 for an empty slot."""
    z = -_expm1(gamma)
    live = z > 1e-37
    return tl.where(live, z, 0.0), tl.where(live, 1.0 / tl.where(live, z, 1.0), 0.0)


@triton.jit
def _read(u, z, iz, m_ok, MASS: tl.constexpr):
    """Read weights of u [rows, M]: softmax, or e^{u/z} / sum of z e^{u/z} over slots with any mass."""
    if MASS:
        w = tl.where(iz > 0, u * iz, -float("inf"))
        top = tl.max(w, 1)
        e = tl.exp(w - tl.where(top == -float("inf"), 0.0, top)[:, None])
        total = tl.sum(z * e, 1)
        p = e * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    else:
        w = tl.where(m_ok[None, :], u, -float("inf"))
        e = tl.exp(w - tl.max(w, 1)[:, None])
        p = e * (1.0 / tl.sum(e, 1))[:, None]
    return p


@triton.jit
def _read_grad(p, u, z, iz, dp, MASS: tl.constexpr):
    """du and dz of the read."""
    S = tl.sum(p * dp, 1)[:, None]
    if MASS:
        du = p * (dp - z * S) * iz
        dz = -du * (u * iz) - p * S
    else:
        du = p * (dp - S)
        dz = tl.zeros_like(p)
    return du, dz


@triton.jit
def _held(X, slots, XP: tl.constexpr, M: tl.constexpr):
    """Where slots [X, M] lie in memory, and which exist, of those held as [XP / 16, 16, M]."""
    x = (tl.arange(0, XP // 16) * 16)[:, None, None] + tl.arange(0, 16)[None, :, None]
    m = tl.arange(0, M)[None, None, :]
    return x * slots + m, (x < X) & (m < slots)


@triton.jit(do_not_specialize=["T", "H"])
def _own_state(
    x_ptr, g_ptr, own_ptr, total_ptr, seg_start, seg_end, T, H, X, slots,
    SEG: tl.constexpr, XP: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). What a segment alone writes into empty slots [X, M] and its total log_gate [M]."""
    seg, h = tl.program_id(0) // H, tl.program_id(0) % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, x = tl.arange(0, 16), tl.arange(0, M), tl.arange(0, XP)
    m_ok = m < slots
    g_ptr += a * H * slots + h * slots
    x_ptr += (a * H + h) * X
    step = H * slots
    S = tl.zeros((XP // 16, 16, M), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for at in range(0, b, 16):
        row = at + t
        g = _load_gate(g_ptr, row, b, step, m, m_ok)
        w = -_expm1(g) * _left(g_ptr, row, at + 15, b, step, m, m_ok)
        tile = _tile(x_ptr, row, b, H * X, x, X)
        gone = tl.sum(g, 0)
        S = S * tl.exp(gone)[None, None, :] + _outer(tile, w, XP, M)
        total += gone
    base = tl.program_id(0).to(tl.int64)
    spot, ok = _held(X, slots, XP, M)
    tl.store(own_ptr + base * X * slots + spot, S, mask=ok)
    tl.store(total_ptr + base * slots + m, total, mask=m_ok)


@triton.jit
def _coming(
    buf_ptr, total_ptr, i, a, b, h, H, X, slots, e, m, ok,
    REVERSE: tl.constexpr, DECAY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What AHEAD segments from the i-th on write (in reverse: ask), and their log_gate; 0 past the last."""
    own, gone = (), ()
    for j in tl.static_range(AHEAD):
        base = h.to(tl.int64) + (b - 1 - (i + j - a) if REVERSE else i + j) * H
        here = ok & (i + j + e * 0 < b)
        own += (tl.load(buf_ptr + base * X * slots + e, mask=here, other=0.0),)
        if DECAY:
            gone += (tl.load(total_ptr + base * slots + m, mask=here, other=0.0),)
    return own, gone


@triton.jit(do_not_specialize=["n", "H"])
def _scan(
    buf_ptr, init_ptr, final_ptr, X, other_ptr, other_init_ptr, other_final_ptr, Y,
    total_ptr, doc_first, n, H, slots,
    REVERSE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, HAS_INIT: tl.constexpr,
    BOTH: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (documents * H, tiles of X * M, 1 or 2). Own sums become what is there before (REVERSE: after) it.

    buf [segments, H, X, M] in place; init and final [documents, H, M, X] float32. BOTH: another buffer with Y
    for X goes along: the kernel waits more than it moves. A thread keeps to its own elements. While AHEAD
    segments are stored over, the next as many are loaded; sums run one after another.
    """
    if BOTH:  # noqa: SIM102 - this one is decided as the kernel is compiled
        if tl.program_id(2) == 1:
            buf_ptr, final_ptr, X = other_ptr, other_final_ptr, Y
            if HAS_INIT:
                init_ptr = other_init_ptr
    doc, h = tl.program_id(0) // H, tl.program_id(0) % H
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x, m = e // slots, e % slots
    ok = e < X * slots
    if PACKED:
        a = tl.load(doc_first + doc)
        b = tl.load(doc_first + doc + 1)
    else:
        a = doc * n
        b = a + n
    where = tl.program_id(0).to(tl.int64) * X * slots + m * X + x
    S = tl.zeros((BLOCK,), tl.float32)
    if HAS_INIT:
        S = tl.load(init_ptr + where, mask=ok, other=0.0)
    own, gone = _coming(buf_ptr, total_ptr, a, a, b, h, H, X, slots, e, m, ok, REVERSE, DECAY, AHEAD)
    for i in range(a, b, AHEAD):
        next_own, next_gone = _coming(
            buf_ptr, total_ptr, i + AHEAD, a, b, h, H, X, slots, e, m, ok, REVERSE, DECAY, AHEAD
        )
        for j in tl.static_range(AHEAD):
            base = h.to(tl.int64) + (b - 1 - (i + j - a) if REVERSE else i + j) * H
            tl.store(buf_ptr + base * X * slots + e, S, mask=ok & (i + j + x * 0 < b))
            S = (S * tl.exp(gone[j]) if DECAY else S) + own[j].to(tl.float32)
        own, gone = next_own, next_gone
    tl.store(final_ptr + where, S, mask=ok)


@triton.jit
def _advance(K, V, k, v, w, gone, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr):
    """Slots after a block that writes w and whose log_gate sums to `gone`."""
    keep = tl.exp(gone)[None, None, :]
    return K * keep + _outer(k, w, DP, M), V * keep + _outer(v, w, EP, M)


@triton.jit(do_not_specialize=["T", "H"])
def _forward(
    q_ptr, k_ptr, v_ptr, g_ptr, o_ptr, k0_ptr, v0_ptr, gamma_ptr,
    seg_start, seg_end, scale, T, H, D, E, slots,
    G: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    MASS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). Reads q, k, v, log_gate and the slots before the segment; writes o.

    Slots K [D, M] and V [E, M] live in registers along the segment.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, d, e = tl.arange(0, 16), tl.arange(0, M), tl.arange(0, DP), tl.arange(0, EP)
    m_ok, step = m < slots, H * slots
    k_spot, k_ok = _held(D, slots, DP, M)
    v_spot, v_ok = _held(E, slots, EP, M)
    K = tl.load(k0_ptr + pid * D * slots + k_spot, mask=k_ok, other=0.0)
    V = tl.load(v0_ptr + pid * E * slots + v_spot, mask=v_ok, other=0.0)
    kept = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)
    g_ptr += (a * H + h) * slots
    q_ptr += (a * H + h) * G * D
    k_ptr += (a * H + h) * D
    v_ptr += (a * H + h) * E
    o_ptr += (a * H + h) * G * E
    causal = t[:, None] >= t[None, :]
    for at in range(0, b, 16):
        row = at + t
        g = _load_gate(g_ptr, row, b, step, m, m_ok)
        k = _tile(k_ptr, row, b, H * D, d, D)
        v = _tile(v_ptr, row, b, H * E, e, E)
        sums = tl.cumsum(g, 0)
        z, iz = _mass(kept[None, :] + sums)
        decay = tl.exp(sums)
        gone = tl.sum(g, 0)
        w = -_expm1(g) * _left(g_ptr, row, at + 15, b, step, m, m_ok)
        K0 = tl.reshape(K, (DP, M))
        V0 = tl.trans(tl.reshape(V, (EP, M)))
        for head in range(0, G):
            q = _tile(q_ptr + head * D, row, b, H * G * D, d, D)
            A = tl.where(causal, _dot(q, tl.trans(k)), 0.0)
            U = scale * (decay * _dot(q, K0) + _spread(A, g_ptr, at, b, step, m, m_ok, M))
            P = _read(U, z, iz, m_ok, MASS)
            Bm = _gather(P, g_ptr, at, b, step, m, m_ok, M)
            O = _dot(P * decay, V0) + _dot(Bm, v)
            _put(o_ptr + head * E, row, b, H * G * E, e, E, O)
        K, V = _advance(K, V, k, v, w, gone, DP, EP, M)
        kept += gone


@triton.jit(do_not_specialize=["T", "H"])
def _backward_reads(
    q_ptr, k_ptr, v_ptr, g_ptr, do_ptr, k0_ptr, v0_ptr, gamma_ptr, dk0_ptr, dv0_ptr, dgamma_ptr,
    seg_start, seg_end, scale, T, H, D, E, slots,
    G: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    MASS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (segments * H). What the segment's own reads ask of the slots before it: dK [D, M], dV [E, M].

    Walks the segment forward as _forward does; slots, and these sums, live in registers. With mass also
    dGamma [M], the sum of -dz e^Gamma.
    """
    pid = tl.program_id(0).to(tl.int64)
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, d, e = tl.arange(0, 16), tl.arange(0, M), tl.arange(0, DP), tl.arange(0, EP)
    m_ok, step = m < slots, H * slots
    k_spot, k_ok = _held(D, slots, DP, M)
    v_spot, v_ok = _held(E, slots, EP, M)
    K = tl.load(k0_ptr + pid * D * slots + k_spot, mask=k_ok, other=0.0)
    V = tl.load(v0_ptr + pid * E * slots + v_spot, mask=v_ok, other=0.0)
    start = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)
    dK = tl.zeros((DP // 16, 16, M), tl.float32)
    dV = tl.zeros((EP // 16, 16, M), tl.float32)
    dgamma = tl.zeros((M,), tl.float32)
    passed = tl.zeros((M,), tl.float32)  # log_gate since the segment began
    g_ptr += (a * H + h) * slots
    q_ptr += (a * H + h) * G * D
    k_ptr += (a * H + h) * D
    v_ptr += (a * H + h) * E
    do_ptr += (a * H + h) * G * E
    causal = t[:, None] >= t[None, :]
    for at in range(0, b, 16):
        row = at + t
        g = _load_gate(g_ptr, row, b, step, m, m_ok)
        k = _tile(k_ptr, row, b, H * D, d, D)
        v = _tile(v_ptr, row, b, H * E, e, E)
        sums = tl.cumsum(g, 0)
        gamma = start[None, :] + (passed[None, :] + sums)
        z, iz = _mass(gamma)
        decay = tl.exp(sums)
        reach = decay * tl.exp(passed)[None, :]
        gone = tl.sum(g, 0)
        w = -_expm1(g) * _left(g_ptr, row, at + 15, b, step, m, m_ok)
        K0 = tl.reshape(K, (DP, M))
        V0 = tl.reshape(V, (EP, M))
        for head in range(0, G):
            q = _tile(q_ptr + head * D, row, b, H * G * D, d, D)
            do = _tile(do_ptr + head * E, row, b, H * G * E, e, E)
            A = tl.where(causal, _dot(q, tl.trans(k)), 0.0)
            dB = tl.where(causal, _dot(do, tl.trans(v)), 0.0)
            U = scale * (decay * _dot(q, K0) + _spread(A, g_ptr, at, b, step, m, m_ok, M))
            P = _read(U, z, iz, m_ok, MASS)
            dP = decay * _dot(do, V0) + _spread(dB, g_ptr, at, b, step, m, m_ok, M)
            dU, dz = _read_grad(P, U, z, iz, dP, MASS)
            dK += _outer(q, scale * dU * reach, DP, M)
            dV += _outer(do, P * reach, EP, M)
            if MASS:
                dgamma -= tl.sum(dz * tl.exp(gamma), 0)
        K, V = _advance(K, V, k, v, w, gone, DP, EP, M)
        passed += gone
    tl.store(dk0_ptr + pid * D * slots + k_spot, dK, mask=k_ok)
    tl.store(dv0_ptr + pid * E * slots + v_spot, dV, mask=v_ok)
    tl.store(dgamma_ptr + pid * slots + m, dgamma, mask=m_ok)


@triton.jit(do_not_specialize=["first", "T", "H"])
def _backward(
    q_ptr, k_ptr, v_ptr, g_ptr, do_ptr, k0_ptr, v0_ptr, gamma_ptr, dk1_ptr, dv1_ptr, dgamma_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, sk_ptr, sv_ptr, sg_ptr, first,
    seg_start, seg_end, scale, T, H, D, E, slots,
    G: tl.constexpr, SEG: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    MASS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid (some of segments * H, from `first`). All gradients of the segment's tokens.

    Walks forward once to leave the slots before each block in scratch (sk, sv, sg), then backward with the
    gradients of the slots, dK [D, M] and dV [E, M], in registers.
    """
    local = tl.program_id(0).to(tl.int64)
    pid = first + local
    seg, h = pid // H, pid % H
    a, b = _place(seg, seg_start, seg_end, T, SEG, PACKED)
    t, m, d, e = tl.arange(0, 16), tl.arange(0, M), tl.arange(0, DP), tl.arange(0, EP)
    m_ok, step = m < slots, H * slots
    k_spot, k_ok = _held(D, slots, DP, M)
    v_spot, v_ok = _held(E, slots, EP, M)
    sk_ptr += local * (SEG // 16) * D * slots
    sv_ptr += local * (SEG // 16) * E * slots
    sg_ptr += local * (SEG // 16) * slots
    g_ptr += (a * H + h) * slots
    dg_ptr += (a * H + h) * slots
    q_ptr += (a * H + h) * G * D
    k_ptr += (a * H + h) * D
    v_ptr += (a * H + h) * E
    do_ptr += (a * H + h) * G * E
    dq_ptr += (a * H + h) * G * D
    dk_ptr += (a * H + h) * D
    dv_ptr += (a * H + h) * E
    K = tl.load(k0_ptr + pid * D * slots + k_spot, mask=k_ok, other=0.0)
    V = tl.load(v0_ptr + pid * E * slots + v_spot, mask=v_ok, other=0.0)
    kept = tl.load(gamma_ptr + pid * slots + m, mask=m_ok, other=0.0)
    blocks = (b + 15) // 16
    for n in range(0, blocks):
        tl.store(sk_ptr + n * D * slots + k_spot, K, mask=k_ok)
        tl.store(sv_ptr + n * E * slots + v_spot, V, mask=v_ok)
        tl.store(sg_ptr + n * slots + m, kept, mask=m_ok)
        at = n * 16
        row = at + t
        g = _load_gate(g_ptr, row, b, step, m, m_ok)
        k = _tile(k_ptr, row, b, H * D, d, D)
        v = _tile(v_ptr, row, b, H * E, e, E)
        w = -_expm1(g) * _left(g_ptr, row, at + 15, b, step, m, m_ok)
        gone = tl.sum(g, 0)
        K, V = _advance(K, V, k, v, w, gone, DP, EP, M)
        kept += gone
    tl.debug_barrier()

    dK = tl.load(dk1_ptr + pid * D * slots + k_spot, mask=k_ok, other=0.0)
    dV = tl.load(dv1_ptr + pid * E * slots + v_spot, mask=v_ok, other=0.0)
    dgamma = tl.load(dgamma_ptr + pid * slots + m, mask=m_ok, other=0.0)
    causal = t[:, None] >= t[None, :]
    before = (t[:, None] > t[None, :]).to(tl.float32)
    for back in range(0, blocks):
        n = blocks - 1 - back
        at = n * 16
        row = at + t
        g = _load_gate(g_ptr, row, b, step, m, m_ok)
        k = _tile(k_ptr, row, b, H * D, d, D)
        v = _tile(v_ptr, row, b, H * E, e, E)
        kept0 = tl.load(sg_ptr + n * slots + m, mask=m_ok, other=0.0)
        sums = tl.cumsum(g, 0)
        gamma = kept0[None, :] + sums
        z, iz = _mass(gamma)
        decay = tl.exp(sums)
        keep = tl.exp(tl.sum(g, 0))

        # what reaches the slots after the block
        left = _left(g_ptr, row, at + 15, b, step, m, m_ok)
        w = -_expm1(g) * left
        flat_dK = tl.reshape(dK, (DP, M))
        flat_dV = tl.reshape(dV, (EP, M))
        asked = _dot(k, flat_dK) + _dot(v, flat_dV)  # [16, M]
        ds = left * asked
        paths = _dot(before, w * asked)
        K3 = tl.load(sk_ptr + n * D * slots + k_spot, mask=k_ok, other=0.0)
        V3 = tl.load(sv_ptr + n * E * slots + v_spot, mask=v_ok, other=0.0)
        kept_on = tl.sum(tl.sum(K3 * dK, 0), 0) + tl.sum(tl.sum(V3 * dV, 0), 0)
        paths += (keep * kept_on)[None, :]
        dk = _dot(w, tl.trans(flat_dK))
        dv = _dot(w, tl.trans(flat_dV))
        dK = dK * keep[None, None, :]
        dV = dV * keep[None, None, :]

        K0 = _tile(sk_ptr + n * D * slots, d, D, slots, m, slots)
        V0 = _tile(sv_ptr + n * E * slots, e, E, slots, m, slots)
        walked = tl.zeros((16, M), tl.float32)  # over reads
        drift = tl.zeros((16, M), tl.float32)
        for head in range(0, G):
            q = _tile(q_ptr + head * D, row, b, H * G * D, d, D)
            do = _tile(do_ptr + head * E, row, b, H * G * E, e, E)
            A = tl.where(causal, _dot(q, tl.trans(k)), 0.0)
            dB = tl.where(causal, _dot(do, tl.trans(v)), 0.0)
            read_k = decay * _dot(q, K0)
            read_v = decay * _dot(do, V0)
            U = scale * (read_k + _spread(A, g_ptr, at, b, step, m, m_ok, M))
            dP = read_v + _spread(dB, g_ptr, at, b, step, m, m_ok, M)
            P = _read(U, z, iz, m_ok, MASS)
            dU, dz = _read_grad(P, U, z, iz, dP, MASS)
            dU = dU * scale
            walked += P * read_v + dU * read_k
            if MASS:
                drift += dz
            Bm = _gather(P, g_ptr, at, b, step, m, m_ok, M)
            dA = _gather(dU, g_ptr, at, b, step, m, m_ok, M)
            ds_in, h_in = _pair_grads(A, dB, P, dU, g_ptr, at, b, step, m, m_ok, M)
            ds += ds_in
            paths += h_in
            dk += _dot(tl.trans(dA), q)
            dv += _dot(tl.trans(Bm), do)
            dUd = dU * decay
            dq = _dot(dUd, tl.trans(K0)) + _dot(dA, k)
            _put(dq_ptr + head * D, row, b, H * G * D, d, D, dq)
            dK += _outer(q, dUd, DP, M)
            dV += _outer(do, P * decay, EP, M)

        paths += tl.cumsum(walked, 0, reverse=True)
        dg = paths - tl.exp(g) * ds + dgamma[None, :]
        if MASS:
            drift = drift * tl.exp(gamma)
            dg -= tl.cumsum(drift, 0, reverse=True)
            dgamma -= tl.sum(drift, 0)
        _put(dg_ptr, row, b, step, m, slots, dg)
        _put(dk_ptr, row, b, H * D, d, D, dk)
        _put(dv_ptr, row, b, H * E, e, E, dv)


@triton.jit
def _decode(
    q_ptr, k_ptr, v_ptr, g_ptr, o_ptr, k0_ptr, v0_ptr, kept0_ptr, k1_ptr, v1_ptr, kept1_ptr,
    scale, D, E, slots,
    G: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    MASS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, PARTS). One token written into its slots, then the read; slots are read and written once.

    K [M, D] in each part, which stores its share of D; V and o by parts of E, EP wide. Slots may be held in
    16 bits; they are rounded where they are stored, not before the read. EARLY, for few programs: V is loaded
    with K, and heads go together; else one after another, so that four programs fit on a multiprocessor.
    """
    pid, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m, d, e = tl.arange(0, M), tl.arange(0, DP), part * EP + tl.arange(0, EP)
    m_ok, d_ok, e_ok = m < slots, d < D, e < E
    k_spot = (pid * slots + m[:, None]) * D + d[None, :]
    v_spot = (pid * slots + m[:, None]) * E + e[None, :]
    k_ok, v_ok = m_ok[:, None] & d_ok[None, :], m_ok[:, None] & e_ok[None, :]
    K = tl.load(k0_ptr + k_spot, mask=k_ok, other=0.0)
    if EARLY:
        V = tl.load(v0_ptr + v_spot, mask=v_ok, other=0.0)
    g = tl.maximum(tl.load(g_ptr + pid * slots + m, mask=m_ok, other=0.0), -1e4)
    kept = tl.load(kept0_ptr + pid * slots + m, mask=m_ok, other=0.0) + g
    k = tl.load(k_ptr + pid * D + d, mask=d_ok, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + pid * E + e, mask=e_ok, other=0.0).to(tl.float32)
    keep, s = tl.exp(g)[:, None], -_expm1(g)[:, None]
    K = keep * K.to(tl.float32) + s * k[None, :]
    heads = tl.arange(0, GP)[:, None]
    U = tl.zeros((GP, M), tl.float32)
    for head in tl.range(0, G, loop_unroll_factor=G if EARLY else 1):
        q = tl.load(q_ptr + (pid * G + head) * D + d, mask=d_ok, other=0.0).to(tl.float32)
        U = tl.where(heads == head, scale * tl.sum(K * q[None, :], 1)[None, :], U)
    z, iz = _mass(kept[None, :])
    P = _read(U, z, iz, m_ok, MASS)
    tl.store(k1_ptr + k_spot, K, mask=k_ok & (d // (DP // PARTS) == part)[None, :])
    tl.store(kept1_ptr + pid * slots + m, kept, mask=m_ok & (part + m * 0 == 0))
    if not EARLY:
        V = tl.load(v0_ptr + v_spot, mask=v_ok, other=0.0)
    V = keep * V.to(tl.float32) + s * v[None, :]
    tl.store(v1_ptr + v_spot, V, mask=v_ok)
    for head in tl.range(0, G, loop_unroll_factor=G if EARLY else 1):
        o = tl.sum(V * tl.sum(tl.where(heads == head, P, 0.0), 0)[:, None], 0)
        tl.store(o_ptr + (pid * G + head) * E + e, o, mask=e_ok)


def _pad(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


class _Plan:
    """Sizes, tiles and segments of one call."""

    def __init__(self, q, k, v, log_gate, cu_seqlens, segment: int | None = None) -> None:
        B, self.T, self.HQ, self.D = q.shape
        self.H, self.E, self.M = k.shape[2], v.shape[3], log_gate.shape[3]
        self.group = self.HQ // self.H
        self.packed = cu_seqlens is not None
        self.dot = q.dtype if q.dtype == torch.bfloat16 else torch.float32  # of operands, and slots at rest
        self.segment = segment or SEGMENT
        if self.packed:
            starts, stops, first = [], [], [0]
            for a, b in itertools.pairwise(cu_seqlens.tolist()):
                begin = range(a, b, self.segment)
                starts += begin
                stops += [min(x + self.segment, b) for x in begin]
                first.append(len(starts))
            self.starts, self.stops = (torch.tensor(x, device=q.device) for x in (starts, stops))
            self.first = torch.tensor(first, dtype=torch.int32, device=q.device)
            self.docs, self.segments, self.each = len(first) - 1, len(starts), 0
        else:
            self.starts = self.stops = self.first = None
            self.each = -(-self.T // self.segment)
            self.docs, self.segments = B, B * self.each

    def kind(self) -> dict:
        return {"SEG": self.segment, "M": _pad(self.M), "PACKED": self.packed}

    def tiles(self) -> dict:
        return {**self.kind(), "DP": _pad(self.D), "EP": _pad(self.E), "G": self.group}

    def buffer(self, like: torch.Tensor, size: int) -> torch.Tensor:
        return like.new_empty(self.segments, self.H, size, self.M, dtype=self.dot)


WARPS = {"own": 4, "forward": 8, "reads": 8, "backward": 8}  # of a program; nothing is tuned at run time
# programs a key/value head, their warps, and whether V is loaded early; None: by the number of heads
DECODE = {"parts": None, "warps": None, "early": None}


def _options(kernel: str) -> dict[str, int]:
    return {"num_warps": WARPS[kernel], "num_stages": 1}


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gate: torch.Tensor) -> bool:
    """Whether these kernels take the call; all else is for the PyTorch form.

    Not: float64; more than 8 query heads a key/value head; slots that do not fit in registers, that is
    next_power_of_2(M) * (next_power_of_2(D) + next_power_of_2(E)) above 32,768.
    """
    M, D, E = (_pad(x.shape[-1]) for x in (log_gate, q, v))
    types = {x.dtype for x in (q, k, v)} <= {torch.float32, torch.float16, torch.bfloat16}
    fits = q.shape[2] // k.shape[2] <= 8 and M * (D + E) <= 32768
    return types and fits and min(q.numel(), k.numel(), v.numel()) > 0


def _states(plan: _Plan, k, v, g, k0, v0, kept0):
    """(Slots K, V and Gamma before each segment, its own log_gate), (the final K, V, Gamma)."""
    size = plan.segments * plan.H
    total = g.new_empty(plan.segments, plan.H, 1, plan.M)
    out = []
    for x in (k, v):
        X = x.shape[-1]
        own = plan.buffer(x, X)
        _own_state[(size,)](
            x, g, own, total, plan.starts, plan.stops, plan.T, plan.H, X, plan.M,
            XP=_pad(X), **plan.kind(), **_options("own"),
        )  # fmt: skip
        out.append(own)
    final = _run_scan(plan, out, total, (k0, v0), reverse=False, decay=True)
    gamma = total.clone()
    (kept,) = _run_scan(plan, [gamma], total, (kept0,), reverse=False, decay=False)
    return (*out, gamma, total), (*final, kept[..., 0])


def _run_scan(plan: _Plan, bufs, total, inits, *, reverse: bool, decay: bool) -> list[torch.Tensor]:
    """_scan of one buffer or two [segments, H, X, M], in place; what there is at the end, [docs, H, M, X]."""
    sizes = [x.shape[2] for x in bufs]
    finals = [total.new_empty(plan.docs, plan.H, plan.M, X, dtype=torch.float32) for X in sizes]
    each = list(zip(bufs, inits, finals, sizes, strict=True))
    _scan[(plan.docs * plan.H, triton.cdiv(max(sizes) * plan.M, SCAN["BLOCK"]), len(bufs))](
        *each[0], *each[-1], total, plan.first, plan.each, plan.H, plan.M,
        REVERSE=reverse, DECAY=decay, PACKED=plan.packed, HAS_INIT=inits[0] is not None, BOTH=len(bufs) == 2,
        **SCAN, num_warps=4,
    )  # fmt: skip
    return finals


def forward(q, k, v, log_gate, scale: float, mass: bool, k0, v0, kept0, cu_seqlens):
    """o and the final K [N, H, M, D], V [N, H, M, E], Gamma [N, H, M]; inputs as of gsa(), states float32."""
    q, k, v, g, k0, v0, kept0 = _plain(q, k, v, log_gate, k0, v0, kept0)
    plan = _Plan(q, k, v, g, cu_seqlens)
    o = v.new_empty(*q.shape[:3], plan.E)
    if one_token(q, k0):
        return o, *_one_token(plan, q, k, v, g, o, scale, mass, k0, v0, kept0)
    (K0, V0, gamma, _), final = _states(plan, k, v, g, k0, v0, kept0)
    _forward[(plan.segments * plan.H,)](
        q, k, v, g, o, K0, V0, gamma, plan.starts, plan.stops, scale,
        plan.T, plan.H, plan.D, plan.E, plan.M, MASS=mass, **plan.tiles(), **_options("forward"),
    )  # fmt: skip
    return o, *final


def one_token(q: torch.Tensor, k0: torch.Tensor | None) -> bool:
    """Whether this is one token after a state in every row."""
    return q.shape[1] == 1 and k0 is not None and k0.shape[0] == q.shape[0]


def _one_token(plan: _Plan, q, k, v, g, o, scale: float, mass: bool, k0, v0, kept0):
    """The slots after a token that follows a state; fills o."""
    after = tuple(torch.empty_like(x) for x in (k0, v0, kept0))
    programs = q.shape[0] * plan.H
    parts = DECODE["parts"] or (4 if programs <= 32 else 2 if programs <= 128 else 1)
    parts = min(parts, _pad(plan.E) // 16)
    early = programs <= 128 if DECODE["early"] is None else DECODE["early"]
    warps = DECODE["warps"] or (8 if programs <= 32 else 4)
    _decode[(programs, parts)](
        q, k, v, g, o, k0, v0, kept0, *after, scale, plan.D, plan.E, plan.M,
        G=plan.group, GP=triton.next_power_of_2(plan.group), DP=_pad(plan.D), EP=_pad(plan.E) // parts,
        M=_pad(plan.M), MASS=mass, PARTS=parts, EARLY=early, num_warps=warps,
        maxnreg=None if early else 512 // warps,
    )  # fmt: skip
    return after


def backward(q, k, v, log_gate, scale: float, mass: bool, k0, v0, kept0, cu_seqlens, do, dK1, dV1, dkept1):
    """Gradients of q, k, v, log_gate and of the initial K, V, Gamma (float32), given those of the results."""
    q, k, v, g, k0, v0, kept0 = _plain(q, k, v, log_gate, k0, v0, kept0)
    do, dK1, dV1, dkept1 = _plain(do, dK1, dV1, dkept1)
    plan = _Plan(q, k, v, g, cu_seqlens)
    size = plan.segments * plan.H
    (K0, V0, gamma, total), _ = _states(plan, k, v, g, k0, v0, kept0)
    sizes = plan.T, plan.H, plan.D, plan.E, plan.M
    tiles = plan.tiles()
    dK, dV = plan.buffer(q, plan.D), plan.buffer(q, plan.E)
    dgamma = torch.empty_like(gamma)
    _backward_reads[(size,)](
        q, k, v, g, do, K0, V0, gamma, dK, dV, dgamma, plan.starts, plan.stops, scale,
        *sizes, MASS=mass, **tiles, **_options("reads"),
    )  # fmt: skip
    dk0, dv0 = _run_scan(plan, [dK, dV], total, (dK1, dV1), reverse=True, decay=True)
    (dkept0,) = _run_scan(plan, [dgamma], total, (dkept1,), reverse=True, decay=False)
    dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
    blocks = plan.segment // C
    each = blocks * plan.M * (plan.D + plan.E) * dK.element_size()
    step = max(1, min(size, SCRATCH_BYTES // each))
    sk = dK.new_empty(step, blocks, plan.D, plan.M)
    sv = dK.new_empty(step, blocks, plan.E, plan.M)
    sg = g.new_empty(step, blocks, plan.M)
    for first in range(0, size, step):
        _backward[(min(step, size - first),)](
            q, k, v, g, do, K0, V0, gamma, dK, dV, dgamma, dq, dk, dv, dg, sk, sv, sg, first,
            plan.starts, plan.stops, scale, *sizes, MASS=mass, **tiles, **_options("backward"),
        )  # fmt: skip
    return dq, dk, dv, dg, dk0, dv0, dkept0[..., 0]


def _plain(*tensors):
    """Contiguous; in the interpreter, which has no bfloat16, callers pass float32."""
    return tuple(None if x is None else x.contiguous() for x in tensors)
