"""The learned sketch on a GPU: products of one or two affine maps of each head, forward and backward.

    phi = (x W_0 + b_0) o (x W_1 + b_1)          x [D], W [D, r], o elementwise
    dx = g_0 W_0^T + g_1 W_1^T,  dW_m = x^T g_m,  db_m = g_m,    g_m = dphi o the other factor

    lift = x . tilt                              the log of a query's far factor, on the way

What a layer does to x before (a factor, a mean taken off, one more coordinate) is affine too, and is folded
into W and b, which are small. So x is read once, and neither factors nor an appended copy reach memory.
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
def _map(W, bias, head, m, D, R, FACTORS: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """W_m [BD, BR] and b_m [1, BR] of a head."""
    d = tl.arange(0, BD)
    r = tl.arange(0, BR)
    at = W + ((head * FACTORS + m) * D + d[:, None]) * R + r[None, :]
    w = tl.load(at, mask=(d < D)[:, None] & (r < R)[None, :], other=0.0)
    return w, tl.load(bias + (head * FACTORS + m) * R + r, mask=r < R, other=0.0)[None, :]


@triton.jit(do_not_specialize=["T"])
def _sketch(
    x, W, bias, tilt, phi, lift, T,
    N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, FACTORS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """phi [B, T, N, R] of x [B, T, N, D], W [N, FACTORS, D, R], bias [N, FACTORS, R] float32.

    With tilt [N, D] float32 also lift [B, T, N] float32.

    Grid (N, tiles of BT tokens, B): heads run fastest, so that whole tokens are read together.
    """
    head = tl.program_id(0)
    token = tl.program_id(1) * BT + tl.arange(0, BT)
    row = (tl.program_id(2).to(tl.int64) * T + token) * N + head
    d = tl.arange(0, BD)
    r = tl.arange(0, BR)
    here = (token < T)[:, None]
    rows = tl.load(x + row[:, None] * D + d[None, :], mask=here & (d < D)[None, :], other=0.0)
    if tilt is not None:
        slope = tl.load(tilt + head * D + d, mask=d < D, other=0.0)
        tl.store(lift + row, tl.sum(rows.to(tl.float32) * slope[None, :], 1), mask=token < T)
    w, b = _map(W, bias, head, 0, D, R, FACTORS, BD, BR)
    product = tl.dot(rows, w, input_precision=EXACT) + b
    if FACTORS == 2:
        w, b = _map(W, bias, head, 1, D, R, FACTORS, BD, BR)
        product *= tl.dot(rows, w, input_precision=EXACT) + b
    at = phi + row[:, None] * R + r[None, :]
    tl.store(at, product.to(phi.dtype.element_ty), mask=here & (r < R)[None, :])


@triton.jit(do_not_specialize=["T", "steps"])
def _sketch_backward(
    x, W, bias, tilt, dphi, dlift, dx, dW, dbias, dtilt, T, steps,
    N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, FACTORS: tl.constexpr,
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
    w0, b0 = _map(W, bias, head, 0, D, R, FACTORS, BD, BR)
    if FACTORS == 2:
        w1, b1 = _map(W, bias, head, 1, D, R, FACTORS, BD, BR)
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
            slope = tl.load(tilt + head * D + d, mask=d < D, other=0.0)
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


TILES = {"forward": (128, 4, 2), "backward": (32, 4, 2)}  # tokens a step, warps, loads in flight


def _options(x: torch.Tensor, W: torch.Tensor, backward: bool = False) -> dict:
    N, factors, D, R = W.shape
    wide = x.dtype == torch.float32 or D > 128
    tokens, warps, stages = (32, 8, 1) if wide else TILES["backward" if backward else "forward"]
    return {
        "N": N, "D": D, "R": R, "FACTORS": factors, "BT": tokens, "BD": max(16, triton.next_power_of_2(D)),
        "BR": max(16, triton.next_power_of_2(R)), "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


@torch.library.custom_op(f"{OPS}::forward", mutates_args=())
def _sketch_op(
    x: torch.Tensor, W: torch.Tensor, bias: torch.Tensor, tilt: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    B, T, N, _ = x.shape
    phi, options = torch.empty(B, T, N, W.shape[-1], dtype=x.dtype, device=x.device), _options(x, W)
    lift = x.new_empty((0,) if tilt is None else (B, T, N), dtype=torch.float32)
    _sketch[(N, triton.cdiv(T, options["BT"]), B)](x, W, bias, tilt, phi, lift, T, **options)
    return phi, lift


@_sketch_op.register_fake
def _(x, W, bias, tilt):
    lift = x.new_empty((0,) if tilt is None else x.shape[:3], dtype=torch.float32)
    return x.new_empty(*x.shape[:3], W.shape[-1]), lift


@torch.library.custom_op(f"{OPS}::backward", mutates_args=())
def _sketch_backward_op(
    x: torch.Tensor, W: torch.Tensor, bias: torch.Tensor, tilt: torch.Tensor | None,
    dphi: torch.Tensor, dlift: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    B, T, N, _ = x.shape
    options = _options(x, W, backward=True)
    tiles = triton.cdiv(T, options["BT"])
    steps = max(1, min(32, tiles * B * N // 1024))  # some 1,000 programs, or parts of 32 tiles
    parts = triton.cdiv(tiles, steps)
    dx = torch.empty_like(x)
    dW, dbias, dtilt = (
        x.new_empty((0,) if like is None else (B, parts, *like.shape), dtype=torch.float32)
        for like in (W, bias, tilt)
    )
    _sketch_backward[(N, parts, B)](x, W, bias, tilt, dphi, dlift, dx, dW, dbias, dtilt, T, steps, **options)
    if tilt is not None:
        dtilt = dtilt.sum((0, 1))
    return dx, dW.sum((0, 1)).to(W.dtype), dbias.sum((0, 1)), dtilt


@_sketch_backward_op.register_fake
def _(x, W, bias, tilt, dphi, dlift):
    dtilt = bias.new_empty(0) if tilt is None else torch.empty_like(tilt)
    return torch.empty_like(x), torch.empty_like(W), torch.empty_like(bias), dtilt


def _gradients(ctx, dphi, dlift):
    tilt = ctx.saved_tensors[3]
    dlift = None if tilt is None else dlift.contiguous()
    *grads, dtilt = _sketch_backward_op(*ctx.saved_tensors, dphi.contiguous(), dlift)
    return *grads, None if tilt is None else dtilt


_sketch_op.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def sketch_triton(
    x: torch.Tensor, maps: torch.Tensor, *, factor: torch.Tensor | None, last: torch.Tensor | float,
    mean: torch.Tensor | None = None, tilt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The learned sketch of (x - mean) factor with one more coordinate, last; and x . tilt.

    Args:
        x: [B, T, N, D], bfloat16 or float32.
        maps: [H, 1 or 2, D + 1, r], r at most 64; N is a multiple of H.
        factor: [N] or None. last: [N] or one number. mean, tilt: [N, D] or None.

    Returns:
        phi [B, T, N, r] in x's dtype, and x . tilt [B, T, N] float32 if asked for.
    """
    N = x.shape[2]
    maps = maps.float().repeat_interleave(N // len(maps), 0)
    W = maps[:, :, :-1] if factor is None else maps[:, :, :-1] * factor.float().view(N, 1, 1, 1)
    bias = maps[:, :, -1] * torch.as_tensor(last, dtype=torch.float32, device=x.device).view(-1, 1, 1)
    if mean is not None:
        bias = bias - torch.einsum("nd,nmdr->nmr", mean.float(), W)
    tilt = None if tilt is None else tilt.float().contiguous()
    phi, lift = _sketch_op(x.contiguous(), W.to(x.dtype).contiguous(), bias.contiguous(), tilt)
    return phi, None if tilt is None else lift
