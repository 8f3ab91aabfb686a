"""Slot attention with one-hot writes in plain PyTorch: attention over the tokens that are still alive.

A chunk of C queries sees the M slots as they stand before it, each the copy of some earlier token, its owner,
and its own C tokens:

    S_ij = scale q_i . k_j + L_ij       j over the M owners, then the chunk's own tokens
    O_i  = softmax(S_i) V

where only L knows of slots: an owner's bias until its slot is overwritten in the chunk, log of the sum of
e^bias over the copies of token j that are alive at i, and -inf otherwise. The owners are a running maximum
over the chunks of each slot's last write; keys and values are read where they lie: no slot is ever stored.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from unsoftmax.kernels.chip import has_triton
from unsoftmax.kernels.gsa.onehot_reference import SlotState, slots_of
from unsoftmax.kernels.mixer import packed

CHUNK = 64
BLOCK_BYTES = 8 << 20  # of scores at a time; backward computes them again


def slot_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    write: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_slots: int | Sequence[int],
    scale: float | None = None,
    state: SlotState | None = None,
    cu_seqlens: torch.Tensor | None = None,
    keep_state: bool = True,
    backend: str | None = None,
) -> tuple[torch.Tensor, SlotState | None]:
    """Attention over slots that each token may overwrite; see onehot_reference.py for the equations.

    Args:
        q: [B, T, HQ, D]. Query head h reads key/value head h // (HQ // H).
        k, v: [B, T, H, D] and [B, T, H, E].
        write: [B, T, H, W] integers, W = 1 or 2: the slots a token overwrites, before it reads; -1: none.
        bias: [B, T, H, W] float32, log of the weight of each copy in every read; None: 0. -inf: the slot is
            empty from then on.
        num_slots: M of every head, or of each; a head's writes are below its own.
        scale: of q k; None means D ** -0.5.
        state: the slots before the first token; None starts empty. Not changed.
        cu_seqlens: [N + 1], documents packed in one row (B = 1); `state` is then one for each document.
        keep_state: False if nobody wants the slots after the last token.
        backend: "triton" or "torch"; None chooses Triton on CUDA, for dtypes and head sizes it has.

    Returns:
        o [B, T, HQ, E] in v's dtype, 0 where every slot is empty, and the slots after the last token, N = B
        or documents, in the dtypes of k and v, or None unless keep_state. Sums are float32, or float64 if q
        is. Gradients reach q, k, v, bias and state.

    Raises:
        ValueError: shapes or cu_seqlens that do not fit.
    """
    sizes = slots_of(num_slots, k.shape[2])
    _check(q, k, v, write, bias, sizes, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = packed(cu_seqlens, q.shape[1], q.device)
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"slot_attention: backend is {backend!r}; it must be None, 'torch' or 'triton'")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if backend == "triton" or (backend is None and _suits_triton(q, k, v)):
        from unsoftmax.kernels.gsa.triton_onehot import slot_attention_triton

        return slot_attention_triton(q, k, v, write, bias, sizes, factor, state, cu_seqlens, keep_state)
    with torch.autocast(q.device.type, enabled=False):
        if len(set(sizes)) > 1:
            o, state = _by_size(q, k, v, write, bias, sizes, factor, state, cu_seqlens)
        else:
            o, state = _even(q, k, v, write, bias, sizes[0], factor, state, cu_seqlens)
    return o, state if keep_state else None


def _suits_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    if not q.is_cuda or max(q.shape[-1], v.shape[-1]) > 256 or not has_triton():
        return False
    return all(x.dtype in (torch.float32, torch.float16, torch.bfloat16) for x in (q, k, v))


def _even(q, k, v, write, bias, M, factor, state, cu_seqlens) -> tuple[torch.Tensor, SlotState]:
    if q.shape[1] == 1 and cu_seqlens is None:
        return _step(q, k, v, write, bias, M, factor, state)
    return _chunks(q, k, v, write, bias, M, factor, state, cu_seqlens)


def _by_size(q, k, v, write, bias, sizes, factor, state, cu_seqlens) -> tuple[torch.Tensor, SlotState]:
    """Heads of as many slots together, so that each pays for its own alone."""
    G, ends, parts, order = q.shape[2] // len(sizes), {}, [], []
    for n in sorted(set(sizes)):
        heads = [h for h, size in enumerate(sizes) if size == n]
        old = None
        if state is not None:
            mine = [[x.split(list(sizes), 1)[h] for h in heads] for x in state]
            old = SlotState(*(torch.cat(x, 1) for x in mine))
        queries = q.unflatten(2, (-1, G))[:, :, heads].flatten(2, 3)
        tokens = (None if x is None else x[:, :, heads] for x in (k, v, write, bias))
        o, new = _even(queries, *tokens, n, factor, old, cu_seqlens)
        parts.append(o.unflatten(2, (-1, G)))
        order += heads
        ends |= {h: [x[:, i * n : (i + 1) * n] for x in new] for i, h in enumerate(heads)}
    back = sorted(range(len(order)), key=order.__getitem__)
    o = torch.cat(parts, 2)[:, :, back].flatten(2, 3)
    return o, SlotState(*(torch.cat([ends[h][i] for h in range(len(sizes))], 1) for i in range(3)))


class _Plan(NamedTuple):
    """Who sees whom, for every tile: a chunk of a document, of one key/value head; P = B H n tiles."""

    query: torch.Tensor  # [P, C G] row of q [B T HQ]; one past the last where there is no token
    key: torch.Tensor  # [P, M + C] row of k [B T H (+ N H M of the state)]
    copy: torch.Tensor  # [P, M] number of the owners' copies in bias [B T H W + N H M], -1 where empty
    until: torch.Tensor  # [P, M] the first token of the chunk that no longer sees the owner
    dies: torch.Tensor  # [P, C, W] the same for each write of the chunk; 0 where there is none
    last_key: torch.Tensor  # [N, H, M] as key, for the slots after the last token
    last_copy: torch.Tensor  # [N, H, M] as copy


def _chunks(q, k, v, write, bias, M, factor, state, cu_seqlens) -> tuple[torch.Tensor, SlotState]:
    (B, T, HQ, D), (H, E), W = q.shape, v.shape[2:], write.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    plan = _plan(write, M, HQ // H, state is not None, cu_seqlens)
    rows_k, rows_v = k.reshape(-1, D), v.reshape(-1, E)
    rows_b = q.new_zeros(B * T * H * W, dtype=dtype) if bias is None else bias.reshape(-1).to(dtype)
    if state is not None:
        rows_k = torch.cat((rows_k, state.k.reshape(-1, D).to(k.dtype)))
        rows_v = torch.cat((rows_v, state.v.reshape(-1, E).to(v.dtype)))
        rows_b = torch.cat((rows_b, state.bias.reshape(-1).to(dtype)))
    copies = torch.cat((rows_b, rows_b.new_full((1,), -torch.inf)))  # number -1: nothing
    own = plan.key[:, M:, None] * W + torch.arange(W, device=q.device)
    o = _Read.apply(
        q.reshape(-1, D).to(dtype),
        rows_k.to(dtype),
        rows_v.to(dtype),
        copies[plan.copy],
        copies[own],
        plan,
        factor,
        HQ // H,
    )
    empty = (plan.last_copy < 0).unsqueeze(-1)
    if not len(rows_k):  # no token, no state: nothing to point at
        rows_k, rows_v = rows_k.new_zeros(1, D), rows_v.new_zeros(1, E)
    K, V = (x[plan.last_key].masked_fill(empty, 0.0).flatten(1, 2) for x in (rows_k, rows_v))
    kept = torch.promote_types(rows_b.dtype, torch.float32)
    return o.view(B, T, HQ, E).to(v.dtype), SlotState(K, V, copies[plan.last_copy].to(kept).flatten(1, 2))


@torch.no_grad()
def _plan(write: torch.Tensor, M: int, G: int, has_state: bool, cu_seqlens: torch.Tensor | None) -> _Plan:
    (B, T, H, W), C, device = write.shape, CHUNK, write.device
    if cu_seqlens is None:
        ends, lengths = [0], [T]
    else:
        ends, lengths = cu_seqlens.tolist(), cu_seqlens.diff().tolist()
    tiles = [-(-n // C) for n in lengths]
    n, size, many = sum(tiles), torch.tensor(lengths, device=device), torch.tensor(tiles, device=device)
    doc = torch.arange(len(tiles), device=device).repeat_interleave(many, output_size=n)  # of each tile
    first = many.cumsum(0) - many  # tile of each document
    number, c = torch.arange(n, device=device) - first[doc], torch.arange(C, device=device)
    count = (size[doc] - number * C).clamp_max(C)  # tokens in each tile
    real = c < count[:, None]  # [n, C]
    begin = torch.tensor(ends[: len(tiles)], device=device)[doc]
    token = torch.where(real, (begin + number * C)[:, None] + c, 0)

    slot = (
        torch.where(real[:, :, None, None], write.long()[:, token], -1)
        if T
        else write.new_zeros(B, 0, C, H, W).long()
    )
    slot = slot.permute(0, 3, 1, 2, 4).flatten(3) + 1  # [B, H, n, C W], 0 for none
    order = torch.arange(C * W, device=device)
    when = (torch.arange(n, device=device)[:, None] * C * W + order).expand_as(slot)
    shape = (B, H, n, M + 1)
    last = slot.new_full(shape, -1).scatter_reduce(-1, slot, when, "amax")[..., 1:]
    again = slot.new_full(shape, C * W).scatter_reduce(-1, slot, order.expand_as(slot), "amin")[..., 1:]
    until = torch.minimum(again // W, count[:, None])
    rank, place = (slot * (C * W) + order).sort(-1)  # by slot, then by time: the next one is the death
    following = torch.nn.functional.pad(rank[..., 1:], (0, 1), value=(M + 2) * C * W)
    death = torch.where(following // (C * W) == rank // (C * W), following % (C * W) // W, C)
    dies = torch.empty_like(death).scatter(-1, place, torch.minimum(death, count[:, None]))
    dies = torch.where(slot > 0, dies, 0).unflatten(-1, (C, W))

    owner = last.cummax(2).values if n else last
    lane, head = torch.arange(B, device=device).view(B, 1, 1, 1), torch.arange(H, device=device).view(H, 1, 1)

    def found(owner: torch.Tensor, doc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of k and numbers of copies of owners [B, H, tiles or documents, M] in documents doc."""
        known = owner >= (first[doc] * C * W)[:, None]
        at = owner.clamp_min(0)
        flat = token.flatten()[at // W] if n else at
        row = (lane * T + flat) * H + head
        copy = row * W + at % W
        m = torch.arange(M, device=device)
        held = ((doc[:, None] + lane) * H + head) * M + m  # with documents B is 1, else doc is 0
        if has_state:
            return torch.where(known, row, B * T * H + held), torch.where(known, copy, B * T * H * W + held)
        return torch.where(known, row, 0), torch.where(known, copy, -1)

    before = torch.cat((owner[:, :, :0], torch.full_like(owner[:, :, :1], -1), owner[:, :, :-1]), 2)
    key, copy = found(before, doc)
    mine = ((lane * T + token) * H + head).expand(B, H, n, C)
    heads = head.unsqueeze(-1) * G + torch.arange(G, device=device)
    query = (lane.unsqueeze(-1) * T + token[..., None]) * H * G + heads  # [B, H, n, C, G]
    query = torch.where(real[..., None], query, B * T * H * G)
    docs = torch.arange(len(tiles), device=device)
    at_end = owner[:, :, (first + many - 1).clamp_min(0)] if n else owner.new_full((B, H, len(tiles), M), -1)
    at_end = torch.where((many > 0)[:, None], at_end, -1)
    last_key, last_copy = (x.transpose(1, 2).flatten(0, 1) for x in found(at_end, docs))
    parts = (query.flatten(-2), torch.cat((key, mine), -1), copy, until, dies)
    tiles_first = (x.expand(B, H, *x.shape[2:]).flatten(0, 2) for x in parts)
    return _Plan._make((*tiles_first, last_key, last_copy))


class _Read(torch.autograd.Function):
    """o [rows of q, E]; backward computes the scores again, so that memory is the operands' own."""

    @staticmethod
    def forward(ctx: Any, q, k, v, slot_bias, own_bias, plan: _Plan, factor: float, G: int) -> torch.Tensor:
        o = q.new_empty(len(q) + 1, v.shape[-1])  # the last row takes what belongs to no token
        for part in _parts(plan, G, q.element_size()):
            query, key, until, dies = (x[part] for x in (plan.query, plan.key, plan.until, plan.dies))
            L, some = _log_weights(slot_bias[part], own_bias[part], until, dies)
            P = _weights(q, k, query, key, L, factor, G)
            O = P @ _rows(v, key)
            o[query.flatten()] = (O.unflatten(1, (-1, G)) * some[..., None, None]).flatten(0, 2)
        ctx.save_for_backward(q, k, v, slot_bias, own_bias, o, *plan[:5])
        ctx.factor, ctx.G = factor, G
        return o[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(do.device.type, enabled=False):  # someone may call backward inside of one
            return _Read._backward(ctx, do)

    @staticmethod
    def _backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, slot_bias, own_bias, o, *plan = ctx.saved_tensors
        plan, factor, G = _Plan._make((*plan, None, None)), ctx.factor, ctx.G
        dq, dk, dv = q.new_empty(len(q) + 1, q.shape[-1]), torch.zeros_like(k), torch.zeros_like(v)
        d_slot, d_own = torch.zeros_like(slot_bias), torch.zeros_like(own_bias)
        for part in _parts(plan, G, q.element_size()):
            query, key, until, dies = (x[part] for x in (plan.query, plan.key, plan.until, plan.dies))
            with torch.enable_grad():
                biases = [x[part].detach().requires_grad_() for x in (slot_bias, own_bias)]
                L, some = _log_weights(*biases, until, dies)
            P = _weights(q, k, query, key, L.detach(), factor, G)
            dO = (_rows(do, query).unflatten(1, (-1, G)) * some[..., None, None]).flatten(1, 2)
            _add_rows(dv, key, P.mT @ dO)
            delta = torch.linalg.vecdot(dO, _rows(o, query)).unsqueeze(-1)
            dS = (dO @ _rows(v, key).mT).sub_(delta).mul_(P)
            if any(ctx.needs_input_grad[3:5]):
                d = torch.autograd.grad(L, biases, dS.unflatten(1, (-1, G)).sum(2))
                d_slot[part], d_own[part] = d
            dS = dS.mul_(factor)
            dq[query.flatten()] = (dS @ _rows(k, key)).flatten(0, 1)
            _add_rows(dk, key, dS.mT @ _rows(q, query))
        return dq[:-1], dk, dv, d_slot, d_own, None, None, None


def _parts(plan: _Plan, G: int, itemsize: int) -> list[slice]:
    P, rows = plan.query.shape
    step = max(1, BLOCK_BYTES // (rows * plan.key.shape[1] * itemsize))
    return [slice(a, a + step) for a in range(0, P, step)]


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index], for a row past the last any other."""
    return x.index_select(0, index.flatten().clamp_max(len(x) - 1)).view(*index.shape, x.shape[-1])


def _add_rows(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """x[index] += rows, in an order that never changes."""
    if x.is_cuda:
        x.index_put_((index.flatten(),), rows.flatten(0, 1), accumulate=True)  # sorts; index_add_ would race
    else:
        x.index_add_(0, index.flatten(), rows.flatten(0, 1))


def _weights(q, k, query, key, L: torch.Tensor, factor: float, G: int) -> torch.Tensor:
    S = _rows(q, query) @ _rows(k, key).mT
    S.mul_(factor).unflatten(1, (-1, G)).add_(L.unsqueeze(2))
    return S.softmax(-1)


def _log_weights(
    slot_bias: torch.Tensor, own_bias: torch.Tensor, until: torch.Tensor, dies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """L [P, C, M + C], and who sees anything [P, C]; L is 0 in the rows of those who do not."""
    i = torch.arange(dies.shape[1], device=dies.device)[:, None]
    slots = torch.where(i < until.unsqueeze(1), slot_bias.unsqueeze(1), -torch.inf)
    void = own_bias == -torch.inf
    dies, b = torch.where(void, 0, dies).unsqueeze(1), own_bias.masked_fill(void, 0.0)
    alive = (i.mT <= i).unsqueeze(-1) & (i.unsqueeze(-1) < dies)  # [P, C, C, W]
    own = torch.where(alive[..., 0], b[:, None, :, 0], -torch.inf)
    if b.shape[-1] == 2:
        own = torch.where(alive[..., 1], b[:, None, :, 1], own)
        own = torch.where(alive.all(-1), torch.logaddexp(b[..., 0], b[..., 1]).unsqueeze(1), own)
    L = torch.cat((slots, own), -1)
    some = (-torch.inf < L).any(-1)
    return torch.where(some.unsqueeze(-1), L, 0.0), some


def _step(q, k, v, write, bias, M, factor, state) -> tuple[torch.Tensor, SlotState]:
    """One token a row: into its slots, then the read."""
    (B, _, HQ, D), (H, E) = q.shape, v.shape[2:]
    dtype = torch.promote_types(q.dtype, torch.float32)
    if state is None:
        state = SlotState(
            k.new_zeros(B, H * M, D), v.new_zeros(B, H * M, E), q.new_full((B, H * M), -torch.inf)
        )
    types = k.dtype, v.dtype, dtype
    K, V, b = (x.to(kind).unflatten(1, (H, M)) for x, kind in zip(state, types))
    slot = torch.arange(M, device=q.device)
    hits = [write[:, 0, :, w, None] == slot for w in range(write.shape[-1])]  # each [B, H, M]
    for w, hit in enumerate(hits):
        b = torch.where(hit, 0.0 if bias is None else bias[:, 0, :, w, None].to(dtype), b)
    hit = torch.stack(hits).any(0).unsqueeze(-1)
    K, V = torch.where(hit, k[:, 0].unsqueeze(2), K), torch.where(hit, v[:, 0].unsqueeze(2), V)
    some = (b > -torch.inf).any(-1)[..., None, None]
    S = (factor * q.to(dtype).view(B, H, HQ // H, D)) @ K.to(dtype).mT + b.unsqueeze(2)
    o = torch.where(some, S, 0.0).softmax(-1) * some @ V.to(dtype)
    return o.view(B, 1, HQ, E).to(v.dtype), SlotState(*(x.flatten(1, 2) for x in (K, V, b)))


def _check(q, k, v, write, bias, sizes, cu_seqlens) -> None:
    B, T, HQ, D = q.shape
    H, W = k.shape[2], write.shape[-1]
    if HQ % H:
        raise ValueError(
            f"slot_attention: q has {HQ} heads, which is not a multiple of the {H} heads of k; "
            f"{HQ // H * H or H} is"
        )
    if W not in (1, 2):
        raise ValueError(f"slot_attention: write has {W} slots a token; it must be 1 or 2")
    if len(sizes) != H:
        raise ValueError(
            f"slot_attention: num_slots is {list(sizes)}, of {len(sizes)} heads, and k has {H}; "
            f"give one number, or {H}"
        )
    if min(sizes) < 1:
        raise ValueError(f"slot_attention: num_slots is {min(sizes)}; it must be at least 1, such as 64")
    named = (("k", k, H, D), ("v", v, H, v.shape[-1]), ("write", write, H, W), ("bias", bias, H, W))
    for name, x, *size in named:
        if x is not None and x.shape != (B, T, *size):
            raise ValueError(
                f"slot_attention: {name} is {tuple(x.shape)}; with q {tuple(q.shape)} it must be "
                f"{(B, T, *size)}"
            )
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"slot_attention: packed documents (cu_seqlens) come in one row, B is {B}")
