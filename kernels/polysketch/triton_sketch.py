"""The learned sketch on a GPU: products of one or two affine maps of each head, forward and backward.

    phi = (x W_0 + b_0) o (x W_1 + b_1)          x [D], W [D, r], o elementwise
    dx = g_0 W_0^T + g_1 W_1^T,  dW_m = x^T g_m,  db_m = g_m,    g_m = dphi o the other factor

    lift = x . tilt                              the log of a query's far factor, on the way

What a layer does to x before (a factor, a mean taken off, one more coordinate) is affine too: with maps M
[D + 1, r] of a key/value head

    W_m = factor M_m[:D],  b_m = last M_m[D] - mean W_m

so x is read once, and neither factors nor an appended copy reach memory. Each program makes W and b for
itself, since a launch costs more than that.

Kernels   _sketch, _sketch_backward and _gather, which brings dW and db down to what they came from
"""

import re

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # a build of torch without GPUs
    raise ImportError("the PolySketch kernels need triton") from error

OPS = re.sub(r"\W", "_", __name__)  # a copy in a checkpoint's folder registers its own
EXACT = tl.constexpr("tf32x3")


@triton.jit
def _map(
    x, maps, factor, last, mean, head, m, D, R, GROUP: tl.constexpr, FACTORS: tl.constexpr,
    BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """W_m [BD, BR] in x's dtype and b_m [1, BR] of a head."""
    d = tl.arange(0, BD)
    r = tl.arange(0, BR)
    at = maps + (head // GROUP * FACTORS + m) * (D + 1) * R + r
    inside = (d < D)[:, None] & (r < R)[None, :]
    w = tl.load(at[None, :] + d[:, None] * R, mask=inside, other=0.0).to(tl.float32)
    if factor is not None:
        w *= tl.load(factor + head).to(tl.float32)
    w = w.to(x.dtype.element_ty)
    b = tl.load(at + D * R, mask=r < R, other=0.0).to(tl.float32)
    if last is not None:
        b *= tl.load(last + head).to(tl.float32)
    if mean is not None:  # times the rounded W: what is taken off is what the mean of x gave
        middle = tl.load(mean + head * D + d, mask=d < D, other=0.0).to(tl.float32)
        b -= tl.sum(middle[:, None] * w.to(tl.float32), 0)
    return w, b[None, :]


@triton.jit(do_not_specialize=["T", "steps"])
def _sketch(
    x, maps, factor, last, mean, tilt, phi, lift, T, steps,
    N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, FACTORS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """phi [B, T, N, R] of x [B, T, N, D], maps [N / GROUP, FACTORS, D + 1, R], factor and last [N] (or None,
    which is 1), mean [N, D] (or None). With tilt [N, D] also lift [B, T, N] float32.

    Grid (N, parts of steps tiles of BT tokens, B): heads run fastest, so that whole tokens are read together.
    """
    head = tl.program_id(0)
    d = tl.arange(0, BD)
    r = tl.arange(0, BR)
    w0, b0 = _map(x, maps, factor, last, mean, head, 0, D, R, GROUP, FACTORS, BD, BR)
    if FACTORS == 2:
        w1, b1 = _map(x, maps, factor, last, mean, head, 1, D, R, GROUP, FACTORS, BD, BR)
    if tilt is not None:
        slope = tl.load(tilt + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    for step in range(steps):
        token = (tl.program_id(1) * steps + step) * BT + tl.arange(0, BT)
        row = (tl.program_id(2).to(tl.int64) * T + token) * N + head
        here = (token < T)[:, None]
        rows = tl.load(x + row[:, None] * D + d[None, :], mask=here & (d < D)[None, :], other=0.0)
        if tilt is not None:
            tl.store(lift + row, tl.sum(rows.to(tl.float32) * slope[None, :], 1), mask=token < T)
        product = tl.dot(rows, w0, input_precision=EXACT) + b0
        if FACTORS == 2:
            product *= tl.dot(rows, w1, input_precision=EXACT) + b1
        at = phi + row[:, None] * R + r[None, :]
        tl.store(at, product.to(phi.dtype.element_ty), mask=here & (r < R)[None, :])


@triton.jit(do_not_specialize=["T", "steps"])
def _sketch_backward(
    x, maps, factor, last, mean, tilt, dphi, dlift, dx, dW, dbias, dtilt, T, steps,
    N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, FACTORS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dx, and sums over parts in float32: dW [B, parts, N, FACTORS, D, R], and dbias and dtilt alike.

    Grid (N, parts of steps tiles of BT tokens, B).
    """
    head = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BD)
    r = tl.arange(0, BR)
    sum0 = tl.zeros((BD, BR), tl.float32)
    sum1 = tl.zeros((BD, BR), tl.float32)
    bias0 = tl.zeros((BT, BR), tl.float32)  # summed over tokens in the end
    bias1 = tl.zeros((BT, BR), tl.float32)
    slopes = tl.zeros((BD,), tl.float32)
    w0, b0 = _map(x, maps, factor, last, mean, head, 0, D, R, GROUP, FACTORS, BD, BR)
    if FACTORS == 2:
        w1, b1 = _map(x, maps, factor, last, mean, head, 1, D, R, GROUP, FACTORS, BD, BR)
    for step in range(steps):
        token = (part * steps + step) * BT + tl.arange(0, BT)
        row = (batch * T + token) * N + head
        here = (token < T)[:, None]
        rows = tl.load(x + row[:, None] * D + d[None, :], mask=here & (d < D)[None, :], other=0.0)
        g = tl.load(dphi + row[:, None] * R + r[None, :], mask=here & (r < R)[None, :], other=0.0).to(
            tl.float32
        )
        g0 = g
        if FACTORS == 2:
            g0 = g * (tl.dot(rows, w1, input_precision=EXACT) + b1)
            g1 = g * (tl.dot(rows, w0, input_precision=EXACT) + b0)
            bias1 += g1
            g1 = g1.to(rows.dtype)
            grad = tl.dot(g1, tl.trans(w1), input_precision=EXACT)
            sum1 = tl.dot(tl.trans(rows), g1, sum1, input_precision=EXACT)
        else:
            grad = tl.zeros((BT, BD), tl.float32)
        bias0 += g0
        g0 = g0.to(rows.dtype)
        grad = tl.dot(g0, tl.trans(w0), grad, input_precision=EXACT)
        sum0 = tl.dot(tl.trans(rows), g0, sum0, input_precision=EXACT)
        if tilt is not None:
            climb = tl.load(dlift + row, mask=token < T, other=0.0)
            slope = tl.load(tilt + head * D + d, mask=d < D, other=0.0).to(tl.float32)
            grad += climb[:, None] * slope[None, :]
            slopes += tl.sum(climb[:, None] * rows.to(tl.float32), 0)
        tl.store(
            dx + row[:, None] * D + d[None, :], grad.to(dx.dtype.element_ty), mask=here & (d < D)[None, :]
        )
    slot = (batch * tl.num_programs(1) + part) * N + head
    if tilt is not None:
        tl.store(dtilt + slot * D + d, slopes, mask=d < D)
    slot = slot * FACTORS
    inside = (d < D)[:, None] & (r < R)[None, :]
    tl.store(dW + (slot * D + d[:, None]) * R + r[None, :], sum0, mask=inside)
    tl.store(dbias + slot * R + r, tl.sum(bias0, 0), mask=r < R)
    if FACTORS == 2:
        tl.store(dW + ((slot + 1) * D + d[:, None]) * R + r[None, :], sum1, mask=inside)
        tl.store(dbias + (slot + 1) * R + r, tl.sum(bias1, 0), mask=r < R)


@triton.jit(do_not_specialize=["parts"])
def _gather(
    x, maps, factor, last, mean, dW, dbias, slopes, dmaps, dfactor, dlast, dmean, dtilt, parts,
    N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, FACTORS: tl.constexpr,
    BP: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """dmaps and dtilt, and addends of dfactor [tiles, FACTORS, N], dlast [FACTORS, N], dmean [FACTORS, N, D].

    Grid (tiles of BD coordinates, FACTORS, H). dW, dbias and slopes are _sketch_backward's parts, added BP at
    a time.
    """
    tile = tl.program_id(0)
    m = tl.program_id(1)
    h = tl.program_id(2)
    d = tile * BD + tl.arange(0, BD)
    r = tl.arange(0, BR)
    inside = (d < D)[:, None] & (r < R)[None, :]
    at = (h * FACTORS + m) * (D + 1) * R + r
    M = tl.load(maps + at[None, :] + d[:, None] * R, mask=inside, other=0.0).to(tl.float32)
    M_last = tl.load(maps + at + D * R, mask=r < R, other=0.0).to(tl.float32)
    total = tl.zeros((BD, BR), tl.float32)
    total_last = tl.zeros((BR,), tl.float32)
    for g in range(GROUP):
        head = h * GROUP + g
        dw = tl.zeros((BD, BR), tl.float32)
        db = tl.zeros((BR,), tl.float32)
        slope = tl.zeros((BD,), tl.float32)
        for first in range(0, parts, BP):
            part = first + tl.arange(0, BP)
            here = part < parts
            slot = (part.to(tl.int64) * N + head) * FACTORS + m
            each = dW + (slot[:, None, None] * D + d[None, :, None]) * R + r[None, None, :]
            dw += tl.sum(tl.load(each, mask=here[:, None, None] & inside[None, :, :], other=0.0), 0)
            each = dbias + slot[:, None] * R + r[None, :]
            db += tl.sum(tl.load(each, mask=here[:, None] & (r < R)[None, :], other=0.0), 0)
            if slopes is not None:
                each = slopes + (part.to(tl.int64) * N + head)[:, None] * D + d[None, :]
                slope += tl.sum(tl.load(each, mask=here[:, None] & (d < D)[None, :], other=0.0), 0)
        if slopes is not None:
            tl.store(dtilt + head * D + d, slope, mask=d < D)  # of each m the same
        times = 1.0
        if factor is not None:
            times = tl.load(factor + head).to(tl.float32)
        if mean is not None:
            middle = tl.load(mean + head * D + d, mask=d < D, other=0.0).to(tl.float32)
            dw -= middle[:, None] * db[None, :]
            w = (M * times).to(x.dtype.element_ty).to(tl.float32)
            tl.store(dmean + (m * N + head) * D + d, -tl.sum(w * db[None, :], 1), mask=d < D)
        if factor is not None:
            tl.store(dfactor + (tile * FACTORS + m) * N + head, tl.sum(M * dw))
        if last is not None:
            if tile == 0:
                tl.store(dlast + m * N + head, tl.sum(M_last * db))
            db *= tl.load(last + head).to(tl.float32)
        total += times * dw
        total_last += db
    tl.store(dmaps + at[None, :] + d[:, None] * R, total.to(dmaps.dtype.element_ty), mask=inside)
    if tile == 0:
        tl.store(dmaps + at + D * R, total_last.to(dmaps.dtype.element_ty), mask=r < R)


TILES = {"forward": (128, 4, 2), "backward": (32, 4, 3)}  # tokens a step, warps, loads in flight
COORDINATES = 8  # of dmaps that one program sums


def _options(x: torch.Tensor, maps: torch.Tensor, backward: bool = False) -> dict:
    N, D = x.shape[2:]
    H, factors, _, R = maps.shape
    wide = x.dtype == torch.float32 or D > 128
    tokens, warps, stages = (32, 8, 1) if wide else TILES["backward" if backward else "forward"]
    return {
        "N": N, "D": D, "R": R, "GROUP": N // H, "FACTORS": factors, "BT": tokens,
        "BD": max(16, triton.next_power_of_2(D)), "BR": max(16, triton.next_power_of_2(R)),
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _sums(x: torch.Tensor, maps: torch.Tensor) -> dict:
    whole = _options(x, maps)
    fixed = {name: whole[name] for name in ("N", "D", "R", "GROUP", "FACTORS", "BR")}
    return fixed | {"BP": 8, "BD": COORDINATES, "num_warps": 4, "num_stages": 2}


@torch.library.custom_op(f"{OPS}::forward", mutates_args=())
def _sketch_op(
    x: torch.Tensor, maps: torch.Tensor, factor: torch.Tensor | None, last: torch.Tensor | None,
    mean: torch.Tensor | None, tilt: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    phi, lift = _like(x, maps, tilt)
    B, T, N, _ = x.shape
    options = _options(x, maps)
    parts, steps = _parts(x, options["BT"], 2048, 8)
    _sketch[(N, parts, B)](x, maps, factor, last, mean, tilt, phi, lift, T, steps, **options)
    return phi, lift


def _parts(x: torch.Tensor, tokens: int, programs: int, most: int) -> tuple[int, int]:
    """Parts of a row, and their tiles of so many tokens: enough for some programs, but no more than most."""
    B, T, N, _ = x.shape
    tiles = triton.cdiv(T, tokens)
    steps = max(1, min(most, tiles * B * N // programs))
    return triton.cdiv(tiles, steps), steps


def _like(x, maps, tilt) -> tuple[torch.Tensor, torch.Tensor]:
    lift = x.new_empty((0,) if tilt is None else x.shape[:3], dtype=torch.float32)
    return x.new_empty(*x.shape[:3], maps.shape[-1]), lift


@_sketch_op.register_fake
def _(x, maps, factor, last, mean, tilt):
    return _like(x, maps, tilt)


@torch.library.custom_op(f"{OPS}::backward", mutates_args=())
def _sketch_backward_op(
    x: torch.Tensor, maps: torch.Tensor, factor: torch.Tensor | None, last: torch.Tensor | None,
    mean: torch.Tensor | None, tilt: torch.Tensor | None, dphi: torch.Tensor, dlift: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    B, T, N, D = x.shape
    options = _options(x, maps, backward=True)
    H, factors, _, R = maps.shape
    parts, steps = _parts(x, options["BT"], 1024, 32)

    def sums(given, *shape):
        return None if given is None else x.new_empty(shape, dtype=torch.float32)

    dx, dmaps, slots = torch.empty_like(x), torch.empty_like(maps), (B, parts, N)
    dW, dbias, slopes = sums(x, *slots, factors, D, R), sums(x, *slots, factors, R), sums(tilt, *slots, D)
    _sketch_backward[(N, parts, B)](
        x, maps, factor, last, mean, tilt, dphi, dlift, dx, dW, dbias, slopes, T, steps, **options
    )
    turns = triton.cdiv(D, COORDINATES)
    dfactor, dlast = sums(factor, turns * factors, N), sums(last, factors, N)
    dmean, dtilt = sums(mean, factors, N, D), sums(tilt, N, D)
    _gather[(turns, factors, H)](
        x, maps, factor, last, mean, dW, dbias, slopes, dmaps, dfactor, dlast, dmean, dtilt, B * parts,
        **_sums(x, maps),
    )  # fmt: skip
    rest = (None if g is None else g.sum(0) for g in (dfactor, dlast, dmean))
    given = zip((*rest, dtilt), (factor, last, mean, tilt))
    return dx, dmaps, *(x.new_empty(0) if g is None else g.to(like.dtype) for g, like in given)


@_sketch_backward_op.register_fake
def _(x, maps, factor, last, mean, tilt, dphi, dlift):
    rest = (x.new_empty(0) if like is None else torch.empty_like(like) for like in (factor, last, mean, tilt))
    return torch.empty_like(x), torch.empty_like(maps), *rest


def _gradients(ctx, dphi, dlift):
    given = ctx.saved_tensors
    dlift = None if given[-1] is None else dlift.contiguous()
    found = _sketch_backward_op(*given, dphi.contiguous(), dlift)
    return tuple(None if x is None else g for x, g in zip(given, found))


_sketch_op.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def sketch_triton(
    x: torch.Tensor, maps: torch.Tensor, *, factor: torch.Tensor | None, last: torch.Tensor | None,
    mean: torch.Tensor | None = None, tilt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The learned sketch of (x - mean) factor with one more coordinate, last; and x . tilt.

    Args:
        x: [B, T, N, D], bfloat16 or float32.
        maps: [H, 1 or 2, D + 1, r], r at most 64; N is a multiple of H.
        factor, last: [N] or None, which is 1. mean, tilt: [N, D] or None.

    Returns:
        phi [B, T, N, r] in x's dtype, and x . tilt [B, T, N] float32 if asked for.
    """
    rest = (None if t is None else t.contiguous() for t in (factor, last, mean, tilt))
    phi, lift = _sketch_op(x.contiguous(), maps.contiguous(), *rest)
    return phi, None if tilt is None else lift
