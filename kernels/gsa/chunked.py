"""Gated slot attention in plain PyTorch, chunkwise parallel: linear time, any device, any gate.

Within a chunk of C tokens, with K0, V0 the slots at its start, G_i the sum of log_gate up to token i of the
chunk, and W_ij = s_j exp(log_gate_{j+1} + ... + log_gate_i) for j <= i (else 0), per slot:

    A_ij = scale q_i . k_j          U_i = e^{G_i} (scale K0 q_i) + sum_j A_ij W_ij
    P    = read weights of U        B_ij = P_i . W_ij
    O_i  = (P_i e^{G_i}) V0 + sum_j B_ij v_j

W is built as products, row by row. A difference of running sums would lose its exponents (after a gate of
-1e4 a float32 sum has steps of 1e-3), and e^G and e^-G apart overflow. W exists once for each key/value head,
whatever the number of query heads that read it. Source: arXiv:2409.07146, chunkwise form.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from unsoftmax.kernels.gsa.reference import GSAState
from unsoftmax.kernels.mixer import packed

SEGMENT_BYTES = 32 << 20  # of W at a time; longer input is cut, and backward recomputes each piece
# Dtypes whose kernels are chosen unasked. bfloat16 passed its check on an H200 as it stands: the 21 cases of
# `benchmarks/check_gsa.py --quick`, with all gradients, up to 64 slots. float16 and float32 passed two each.
PROVEN: tuple[torch.dtype, ...] = (torch.bfloat16,)
LOWEST_GATE = -1e4  # e^-1e4 is 0 in float64 too, so nothing is lost, and no -inf meets a 0


def gsa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_gate: torch.Tensor,
    *,
    scale: float | None = None,
    mass: bool = False,
    state: GSAState | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk: int = 16,
    backend: str | None = None,
) -> tuple[torch.Tensor, GSAState]:
    """Gated slot attention; see reference.py for the equations.

    Args:
        q: [B, T, HQ, D]. Query head h reads key/value head h // (HQ // H).
        k, v: [B, T, H, D] and [B, T, H, E].
        log_gate: [B, T, H, M], natural log of what each slot keeps, at most 0; float32 (a bfloat16 gate
            has lost every half-life over 300 tokens). A token whose gates are all 0 leaves
            no trace in the slots.
        scale: of q k; None means D ** -0.5.
        mass: divide slots by their mass and leave empty ones out.
        state: the slots before the first token; None starts empty. Not changed.
        cu_seqlens: [N + 1], documents packed in one row (B = 1); `state` is then one for each document.
        chunk: tokens handled at once (PyTorch form).
        backend: "triton" or "torch"; None is triton on an NVIDIA GPU of compute capability 8.0 or later where
            the operands' dtype (autocast's, else the widest of q, k, v) is in PROVEN, which is bfloat16, and
            triton_chunk.supports takes the sizes (over 64 slots or 128 wide, only on 9.x and 10.x, which have
            the shared memory); else torch. float16 and float32 must be asked for.

    Returns:
        o [B, T, HQ, E] in v's dtype, and the state after the last token, N = B or documents. All sums and the
        state are float32, or float64 if q is; only slots k and v given in 16 bits for one token stay so.

    Raises:
        ValueError: shapes or cu_seqlens that do not fit, or a backend that cannot take the call.
    """
    _check(q, k, v, log_gate, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = packed(cu_seqlens, q.shape[1], q.device)
    if _use_triton(backend, q, k, v, log_gate):
        from unsoftmax.kernels.gsa.triton_op import gsa_triton

        return gsa_triton(q, k, v, log_gate, scale=scale, mass=mass, state=state, cu_seqlens=cu_seqlens)
    (B, T, HQ, D), (H, E), M = q.shape, v.shape[2:], log_gate.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    factor = D**-0.5 if scale is None else scale
    C = 1 if T == 1 else chunk  # decoding: a chunk of one
    lengths = [T] if cu_seqlens is None else cu_seqlens.diff().tolist()
    N = B if cu_seqlens is None else len(lengths)
    tiles = [-(-n // C) for n in lengths]
    index = None if cu_seqlens is None else _places(lengths, tiles, C, q.device)

    def tile(x: torch.Tensor) -> torch.Tensor:  # [B, tiles, C, H, ...]
        x = x.to(dtype)
        if index is None:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, sum(tiles) * C - T))
        else:
            x = x.new_zeros(1, sum(tiles) * C, *x.shape[2:]).index_copy(1, index, x)
        return x.unflatten(1, (-1, C))

    with torch.autocast(q.device.type, enabled=False):
        tiled_q = tile(q).unflatten(3, (H, HQ // H))
        kv, g = tile(torch.cat((k.to(dtype), v.to(dtype)), -1)), tile(log_gate.clamp_min(LOWEST_GATE))
        if state is None:
            S, kept = q.new_zeros(N, H, M, D + E, dtype=dtype), q.new_zeros(N, H, M, dtype=dtype)
        else:
            S, kept = torch.cat((state.k, state.v), -1).to(dtype), state.log_kept.to(dtype)
        o, S, kept = _segments(tiled_q * factor, kv, g, S, kept, tiles, cu_seqlens is not None, mass)
    o = o[:, :T] if index is None else o.index_select(1, index)
    K, V = S[..., :D], S[..., D:]
    if T == 1 and state is not None and {state.k.dtype, state.v.dtype} <= {torch.bfloat16, torch.float16}:
        K, V = K.to(state.k.dtype), V.to(state.v.dtype)
    return o.to(v.dtype), GSAState(K, V, kept)


def _segments(q, kv, g, S, kept, tiles: Sequence[int], packed: bool, mass: bool):
    """Walk the tiles a segment at a time, carrying the slots; backward recomputes each segment from there."""
    B, n, C, H, M = g.shape
    step = max(1, SEGMENT_BYTES // (B * H * C * C * M * g.element_size()))
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, kv, g, S, kept))
    starts = {}  # tile -> document, where one begins
    at = 0
    for doc, count in enumerate(tiles):
        if packed and count:
            starts[at] = doc
        at += count
    ends = {tile - 1: doc for (tile, _), doc in zip(list(starts.items())[1:], starts.values())}
    if starts:
        ends[n - 1] = list(starts.values())[-1]
    here = (S[:1], kept[:1]) if packed else (S, kept)
    first, final, out = (S, kept), [*zip(S.split(1), kept.split(1))], []
    for a in range(0, n, step):
        b = min(a + step, n)
        inside = {t - a: doc for t, doc in starts.items() if a <= t < b}
        leaves = [t - a for t in ends if a <= t < b]
        args = (q[:, a:b], kv[:, a:b], g[:, a:b], *here, *first, inside, leaves, mass)
        if grad and n > step:
            o, *here, left = checkpoint(_segment, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            o, *here, left = _segment(*args)
        for t, value in zip(leaves, left):
            final[ends[t + a]] = value
        out.append(o)
    o = torch.cat(out, 1) if out else q.new_zeros(B, 0, H * q.shape[4], kv.shape[-1] - q.shape[-1])
    return (o, *(torch.cat(x) for x in zip(*final))) if packed else (o, *here)


def _segment(q, kv, g, S, kept, first_S, first_kept, starts: dict[int, int], leaves: list[int], mass: bool):
    """Tiles q [B, n, C, H, G, D], kv [B, n, C, H, D + E], g [B, n, C, H, M] from slots S, kept onwards.

    Tile t begins document starts[t] with slots first_*[starts[t]]. Returns o [B, n C, HQ, E], the slots after
    the last tile, and those after each tile of `leaves`.
    """
    B, n, C, H, Gq, D = q.shape
    q = q.permute(0, 3, 1, 2, 4, 5)  # [B, H, n, C, G, D]
    kv, g = kv.permute(0, 3, 1, 2, 4), g.permute(0, 3, 1, 2, 4)
    W = _Pairs.apply(*_Kept.apply(g))  # [B, H, n, C, C, M]
    G = g.cumsum(3)
    added = (W[..., -1, :, :].transpose(-1, -2) @ kv).unbind(2)  # n x [B, H, M, D + E]
    total = G[..., -1, :]
    keep, total = total.exp().unsqueeze(-1).unbind(2), total.unbind(2)

    before, gamma, left = [], [], []
    for t in range(n):
        if t in starts:
            d = starts[t]
            S, kept = first_S[d : d + 1], first_kept[d : d + 1]
        before.append(S)
        gamma.append(kept)
        S, kept = torch.addcmul(added[t], S, keep[t]), kept + total[t]
        if t in leaves:
            left.append((S, kept))
    S0, gamma0 = torch.stack(before, 2), torch.stack(gamma, 2)

    k, v = kv.split((D, kv.shape[-1] - D), -1)
    K0, V0 = S0.split((D, kv.shape[-1] - D), -1)
    rows = q.reshape(B, H, n, C * Gq, D)
    A = (rows @ k.transpose(-1, -2)).view(B, H, n, C, Gq, C)
    decay = G.exp().unsqueeze(-2)  # [B, H, n, C, 1, M]
    U = decay * (rows @ K0.transpose(-1, -2)).view(B, H, n, C, Gq, -1) + A @ W
    P = _massed(U, _Kept.apply(gamma0.unsqueeze(3) + G)[1].unsqueeze(-2)) if mass else U.softmax(-1)
    inner = (P @ W.transpose(-1, -2)).flatten(3, 4)  # B of the equations, [B, H, n, C G, C]
    o = (P * decay).flatten(3, 4) @ V0 + inner @ v
    o = o.view(B, H, n, C, Gq, -1).permute(0, 2, 3, 1, 4, 5).reshape(B, n * C, H * Gq, -1)
    return o, S, kept, left


class _Kept(torch.autograd.Function):
    """exp(g) and -expm1(g). Autograd's slope of expm1, 1 + expm1, has lost e^g where g is -9."""

    @staticmethod
    def forward(ctx, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = g.exp()
        ctx.save_for_backward(a)
        return a, -torch.expm1(g)

    @staticmethod
    @once_differentiable
    def backward(ctx, da: torch.Tensor, ds: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        return (da - ds) * a


class _Pairs(torch.autograd.Function):
    """W [..., C (i), C (j), M] of what is kept a and written s [..., C, M]; 0 where j > i.

    Row by row, W_i = (a_i W_{i-1}, s_i): no exponential, no difference, no division, whatever the gates.
    """

    @staticmethod
    def forward(ctx, a: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        C = a.shape[-2]
        W = a.new_zeros(*a.shape[:-1], C, a.shape[-1])
        W[..., 0, 0, :] = s[..., 0, :]
        for i in range(1, C):
            torch.mul(W[..., i - 1, :i, :], a[..., i, None, :], out=W[..., i, :i, :])
            W[..., i, i, :] = s[..., i, :]
        ctx.save_for_backward(a, W)
        return W

    @staticmethod
    @once_differentiable
    def backward(ctx, dW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, W = ctx.saved_tensors
        dW, da = dW.clone(), torch.zeros_like(a)
        for i in range(a.shape[-2] - 1, 0, -1):
            after = dW[..., i, :i, :]
            da[..., i, :] = (after * W[..., i - 1, :i, :]).sum(-2)
            dW[..., i - 1, :i, :].addcmul_(after, a[..., i, None, :])
        return da, dW.diagonal(dim1=-3, dim2=-2).transpose(-1, -2)


def _massed(u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """e^{u/z} / sum of z e^{u/z} over the slots with any mass; u [..., G, M], z [..., 1, M].

    Not softmax(u / z + log z) / z: two terms of its slope in z, each of size 1 / z, cancel.
    """
    empty = z < torch.finfo(z.dtype).tiny
    z = z.masked_fill(empty, 1.0)
    w = (u / z).masked_fill(empty, -torch.inf)
    top = (w + z.log()).detach().amax(-1, keepdim=True)
    none = top == -torch.inf
    e = (w - top.masked_fill(none, 0.0)).exp()  # at most 1 / z
    return e / (z * e).sum(-1, keepdim=True).masked_fill(none, 1.0)


def _places(lengths: Sequence[int], tiles: Sequence[int], C: int, device: torch.device) -> torch.Tensor:
    """Where each packed token goes, so that every document begins a tile; [T]."""
    at, places = 0, []
    for n, count in zip(lengths, tiles):
        places.append(torch.arange(at, at + n))
        at += count * C
    return torch.cat(places).to(device)


def operand_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.dtype:
    """Of q, k and v in the Triton kernels: autocast's, else the widest of theirs."""
    if torch.is_autocast_enabled(q.device.type):
        return torch.get_autocast_dtype(q.device.type)
    return torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)


def _capability(device: torch.device) -> int:
    """Of an NVIDIA GPU, the first digit: 8 is Ampere. 0 of all else, since the kernels hold PTX."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_properties(device).major


def _use_triton(backend: str | None, q, k, v, log_gate) -> bool:
    """The rule of gsa's `backend`. Imports triton only where it may run: this file also loads without it."""
    if backend not in (None, "triton", "torch"):
        raise ValueError(f"gsa: backend is {backend!r}; it must be 'triton', 'torch' or None")
    if backend == "torch":
        return False
    if backend is None:
        large = log_gate.shape[-1] > 64 or max(q.shape[-1], v.shape[-1]) > 128
        chips = (9, 10) if large else range(8, 100)
        if operand_dtype(q, k, v) not in PROVEN or _capability(q.device) not in chips:
            return False
    elif q.device.type != "cpu" and _capability(q.device) < 8:  # on a CPU, Triton's interpreter may run them
        raise ValueError(
            "gsa: backend 'triton' needs an NVIDIA GPU of compute capability 8.0 or later, "
            f"which {q.device} is not; use 'torch', or None"
        )
    try:
        from unsoftmax.kernels.gsa.triton_chunk import supports
    except ImportError as error:
        if backend is None:
            return False
        raise ValueError("gsa: backend 'triton' needs triton, which is not installed; use 'torch'") from error
    if supports(q, k, v, log_gate):
        return True
    if backend == "triton":
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, log_gate))
        raise ValueError(f"gsa: backend 'triton' does not take {q.dtype} {shapes}; use 'torch', or None")
    return False


def _check(q, k, v, log_gate, cu_seqlens) -> None:
    B, T, HQ, D = q.shape
    H = k.shape[2]
    if HQ % H:
        raise ValueError(
            f"gsa: q has {HQ} heads, which is not a multiple of the {H} heads of k; {HQ // H * H or H} is"
        )
    want = {
        "k": (k, (B, T, H, D)),
        "v": (v, (B, T, H, v.shape[-1])),
        "log_gate": (log_gate, (B, T, H, log_gate.shape[-1])),
    }
    for name, (x, shape) in want.items():
        if x.shape != shape:
            raise ValueError(f"gsa: {name} is {tuple(x.shape)}; with q {tuple(q.shape)} it must be {shape}")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"gsa: packed documents (cu_seqlens) come in one row, B is {B}")
