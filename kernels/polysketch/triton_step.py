"""One more token of each row on a GPU, in one launch: what chunked._step does, without looking at a number.

A row's window lies in the state's buffers; the new key joins it in the open block, and o is a sum over the
sinks, the window and S, as in triton_block.py. When the token is its block's last, the oldest block of the
window goes into S and the window moves on. All that is decided inside the kernel, row by row, so that a step
can be captured in a CUDA graph. The state given is never changed: all of it is written anew.
"""

import re

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # a build of torch without GPUs
    raise ImportError("the PolySketch kernels need triton") from error

from unsoftmax.kernels.polysketch.sketch import TILE, num_features
from unsoftmax.kernels.polysketch.triton_block import (
    EXACT,
    PAIR,
    SIDE,
    _far_mass,
    _load,
    _make_room,
    _near,
    _outer,
    _pair,
    _slice,
)

OPS = re.sub(r"\W", "_", __name__)  # a copy in a checkpoint's folder registers its own


@triton.jit
def _kept(
    old, new, n, h, p, slot, live, first, H: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows p of document n's buffer old [N, ROWS, H, SIZE], row slot from new [N, H, SIZE]; WIDE columns."""
    i = first + tl.arange(0, WIDE)
    inside = (i < SIZE)[None, :]
    at = ((n * ROWS + p) * H + h)[:, None] * SIZE + i[None, :]
    before = tl.load(old + at, mask=(live & (p != slot))[:, None] & inside, other=0.0)
    fresh = tl.load(new + (n * H + h) * SIZE + i, mask=i < SIZE, other=0.0)
    return tl.where((live & (p == slot))[:, None], fresh[None, :], before)


@triton.jit
def _move(
    old, new, after, n, h, slot, by, first, H: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The buffer after the step: row p is row p + by, or zeros past the end."""
    i = first + tl.arange(0, WIDE)
    for p0 in range(0, ROWS, BN):
        p = p0 + tl.arange(0, BN)
        rows = _kept(old, new, n, h, p + by, slot, p + by < ROWS, first, H, ROWS, SIZE, WIDE)
        at = ((n * ROWS + p) * H + h)[:, None] * SIZE + i[None, :]
        tl.store(after + at, rows, mask=(p < ROWS)[:, None] & (i < SIZE)[None, :])


@triton.jit(do_not_specialize=["normaliser"])
def _step(
    q, k, v, phi_q, phi_k, offset, lift, S, old_k, old_v, old_phi, sink_k, sink_v, seen,
    o, S_after, k_after, v_after, phi_after, sink_k_after, sink_v_after, seen_after, normaliser,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, SINKS: tl.constexpr, SOFT: tl.constexpr, DEGREE: tl.constexpr,
    SLICES: tl.constexpr, PAIRS: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """o [N, HQ, E] and the state after the token.

    Grid (tiles of BE columns of values, H, N): a program has the query heads of one group, and finds their
    weights for itself. Reads and writes S a tile of PAIR features at a time.
    """
    F: tl.constexpr = PAIRS * PAIR
    GROUP: tl.constexpr = HQ // H
    first = tl.program_id(0) * BE
    h = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    t = tl.load(seen + n)
    begin = t // C * C - (W - C)  # the token at the buffer's first row, before the document's first at times
    slot = (t - begin).to(tl.int32)
    ends = (t + 1) % C == 0
    m = tl.arange(0, BG)
    real = m < GROUP
    row = n * HQ + h * GROUP + m
    x = _load(q, row, real, D, BD)
    acc = tl.zeros((BG, BE), tl.float32)
    mass = tl.zeros((BG,), tl.float32)
    top = tl.full((BG,), float("-inf"), tl.float32)
    shift = tl.zeros((BG,), tl.float32)
    if offset is not None:
        shift = tl.load(offset + h * GROUP + m, mask=real, other=0.0)
    if SINKS > 0:
        j = tl.arange(0, 16)
        seated = (j < SINKS) & (j <= t)
        y0 = _kept(sink_k, k, n, h, j, t, seated, 0, H, SINKS, D, BD)
        u0 = _kept(sink_v, v, n, h, j, t, seated, first, H, SINKS, E, BE)
        acc, mass, top = _near(acc, mass, top, x, y0, u0, seated[None, :], shift, DEGREE, SOFT)
    tiles = slot // BN + 1 - (tl.maximum(-begin, 0) // BN).to(tl.int32)
    for i in range(tiles):  # the newest first, so that the first tile has a key
        p = (slot // BN - i) * BN + tl.arange(0, BN)
        here = (p <= slot) & (begin + p >= SINKS)
        y = _kept(old_k, k, n, h, p, slot, here, 0, H, W, D, BD)
        u = _kept(old_v, v, n, h, p, slot, here, first, H, W, E, BE)
        acc, mass, top = _near(acc, mass, top, x, y, u, here[None, :], shift, DEGREE, SOFT)
    state = (n * H + h) * F * (E + 1)
    far, live = _far_mass(_load(phi_q, row, real, R, BR), S + state + E, R, SLICES, BR, E + 1)
    live = live & real
    rise = tl.zeros((BG,), tl.float32)
    if lift is not None:
        rise = tl.load(lift + row, mask=real, other=0.0)
    factor = tl.exp(rise)
    if SOFT:
        acc, mass, top, factor = _make_room(acc, mass, top, far, rise)
    mass += far * factor
    e = first + tl.arange(0, BE)
    for pair in range(PAIRS):
        a, b, weight = _pair(pair, SLICES)
        f = pair * PAIR + tl.arange(0, PAIR)
        at = state + f[:, None] * (E + 1) + e[None, :]
        sums = tl.load(S + at, mask=(e < E)[None, :], other=0.0)
        ones = tl.load(S + state + f * (E + 1) + E)
        left = _slice(phi_q, row, live, a, R) * factor[:, None]
        features = _outer(left, _slice(phi_q, row, live, b, R), BG)
        acc = tl.dot(features, sums, acc, input_precision=EXACT)
        for i in range(tl.where(ends, C // BC, 0)):
            p = i * BC + tl.arange(0, BC)
            old = begin + p >= SINKS
            one = _kept(old_phi, phi_k, n, h, p, slot, old, a * SIDE, H, W, R, SIDE).to(tl.float32)
            other = _kept(old_phi, phi_k, n, h, p, slot, old, b * SIDE, H, W, R, SIDE).to(tl.float32)
            rows = _outer(one * weight, other, BC)
            values = _kept(old_v, v, n, h, p, slot, old, first, H, W, E, BE).to(tl.float32)
            sums = tl.dot(tl.trans(rows), values, sums, input_precision=EXACT)
            ones += tl.sum(rows, 0)
        tl.store(S_after + at, sums, mask=(e < E)[None, :])
        if first == 0:
            tl.store(S_after + state + f * (E + 1) + E, ones)
    if SOFT:
        mass += normaliser * tl.exp(tl.minimum(-top, 80.0))
    else:
        mass += normaliser
    acc *= tl.where(mass > 0, 1 / mass, 0.0)[:, None]
    at = row[:, None] * E + e[None, :]
    tl.store(o + at, acc.to(o.dtype.element_ty), mask=real[:, None] & (e < E)[None, :])
    by = tl.where(ends, C, 0)
    _move(old_v, v, v_after, n, h, slot, by, first, H, W, E, BE, BN)
    if SINKS > 0:
        _move(sink_v, v, sink_v_after, n, h, t, 0, first, H, SINKS, E, BE, 16)
    if first == 0:
        _move(old_k, k, k_after, n, h, slot, by, 0, H, W, D, BD, BN)
        _move(old_phi, phi_k, phi_after, n, h, slot, by, 0, H, W, R, BR, BN)
        if SINKS > 0:
            _move(sink_k, k, sink_k_after, n, h, t, 0, 0, H, SINKS, D, BD, 16)
        if h == 0:
            tl.store(seen_after + n, t + 1)


def _options(q, k, v, phi_q, rule: list[int]) -> dict:
    """rule: block, window, sinks, whether near weights are softmax, degree."""
    HQ, H, R, E = q.shape[1], k.shape[1], phi_q.shape[-1], v.shape[-1]
    C, W, sinks, soft, degree = rule
    wide = {name: max(16, triton.next_power_of_2(size)) for name, size in (("D", k.shape[-1]), ("R", R))}
    return {
        "HQ": HQ, "H": H, "D": k.shape[-1], "E": E, "R": R, "C": C, "W": W, "SINKS": sinks,
        "SOFT": bool(soft), "DEGREE": degree, "SLICES": R // TILE, "PAIRS": num_features(R) // TILE**2,
        "BG": max(16, triton.next_power_of_2(HQ // H)), "BN": min(32, C & -C), "BC": min(32, C & -C),
        "BD": wide["D"], "BE": min(32, max(16, triton.next_power_of_2(E))), "BR": wide["R"],
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


@torch.library.custom_op(f"{OPS}::step", mutates_args=())
def _step_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor,
    offset: torch.Tensor | None, lift: torch.Tensor | None, state: list[torch.Tensor], rule: list[int],
    normaliser: float,
) -> list[torch.Tensor]:  # fmt: skip
    options = _options(q, k, v, phi_q, rule)
    o, *after = _like(q, v, state)
    tiles = triton.cdiv(options["E"], options["BE"])
    _step[(tiles, options["H"], len(q))](
        q, k, v, phi_q, phi_k, offset, lift, *state, o, *after, normaliser, **options
    )
    return [o, *after]


def _like(q, v, state) -> list[torch.Tensor]:
    return [v.new_empty(*q.shape[:2], v.shape[-1]), *(torch.empty_like(x) for x in state)]


@_step_op.register_fake
def _(q, k, v, phi_q, phi_k, offset, lift, state, rule, normaliser):
    return _like(q, v, state)


def step_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, phi_q: torch.Tensor, phi_k: torch.Tensor,
    state: list[torch.Tensor], *,
    degree: int, block: int, window: int, sinks: int, soft: bool,
    offset: torch.Tensor | None, far_scale: torch.Tensor | None, normaliser: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """chunked._step without gates and gradients.

    Args:
        q, k, v, phi_q, phi_k: [N, 1, heads, size], of one dtype, as are the state's buffers.
        state: S, k, v, phi_k, sink_k, sink_v, seen of PolySketchState.
        far_scale: [HQ] or [N, 1, HQ] or None.

    Returns:
        o [N, 1, HQ, E] and the same parts of the state after the token.
    """
    tokens = [x[:, 0].contiguous() for x in (q, k, v, phi_q, phi_k)]
    offset = None if offset is None else offset.float().contiguous()
    lift = None if far_scale is None else far_scale.float().expand(q.shape[:3]).contiguous()
    rule = [block, window, sinks, int(soft), degree]
    o, *after = _step_op(*tokens, offset, lift, [x.contiguous() for x in state], rule, float(normaliser))
    return o.unsqueeze(1), after
