"""keep.py's choice in Triton: one program walks one document of one head, its slots in registers.

Grid  documents x heads, one warp. Reads importance [H, tokens] and, for padding, real; writes each token's
slot. A step is a logarithm a slot and a search for the least over them; the next token's importance is
loaded a step ahead.
"""

import torch
import triton
import triton.language as tl

from unsoftmax.kernels.gsa.keep import Keep


@triton.jit
def _choose(
    importance,  # [H, tokens] float32
    real,  # [tokens] int8
    decay,  # [H] float32
    sizes,  # [H] int64
    start,  # [N] int64, first token of the document
    end,  # [N] int64
    first,  # [N] int64, index of its first real token
    born_in,  # [N, H, M] int64
    worth_in,  # [N, H, M] float32
    write,  # [tokens, H] int64
    born_out,
    worth_out,
    tokens,
    sinks,
    recent,
    M,
    H: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.arange(0, SLOTS)
    inside = slot < M
    at = (n * H + h) * M + slot
    size, fall = tl.load(sizes + h).to(tl.int32), tl.load(decay + h)
    fixed = (slot < sinks) | (slot >= size)
    latest = tl.minimum(size - sinks, recent)
    born = tl.load(born_in + at, mask=inside, other=-1).to(tl.int32)
    worth = tl.where(fixed, float("inf"), tl.load(worth_in + at, mask=inside, other=0.0))
    begin, stop = tl.load(start + n), tl.load(end + n)
    row = importance + h.to(tl.int64) * tokens
    i = tl.load(first + n).to(tl.int32)
    coming = tl.load(row + begin, mask=begin < stop, other=0.0)
    for t in range(begin, stop):
        now = coming
        coming = tl.load(row + t + 1, mask=t + 1 < stop, other=0.0)
        age = i - born
        value = worth - fall * tl.log2(tl.maximum(age, 1).to(tl.float32))
        value = tl.where(age < latest, float("inf"), value)
        taken = tl.where(i < size, i, tl.argmin(value, 0))
        if PADDED:
            here = tl.load(real + t) != 0
        else:
            here = True
        hit = (slot == taken) & here
        born = tl.where(hit, i, born)
        worth = tl.where(hit, tl.where(fixed, float("inf"), now), worth)
        tl.store(write + t * H + h, tl.where(here, taken, -1).to(tl.int64))
        i += tl.where(here, 1, 0)
    tl.store(born_out + at, born.to(tl.int64), mask=inside)
    tl.store(worth_out + at, tl.where(fixed, 0.0, worth), mask=inside)


@torch.no_grad()
def choose_slots_triton(
    importance, decay, index, sizes, sinks, recent, real, state: Keep, cu_seqlens
) -> tuple[torch.Tensor, Keep]:
    """See keep.choose_slots; sizes [H] int64."""
    B, T, H = importance.shape
    N, _, M = state.born.shape
    device = importance.device
    if cu_seqlens is None:
        start = torch.arange(N, device=device) * T
        end = start + T
        # The index of the first real token: padding before it repeats the one before, or -1.
        skipped = 0 if real is None else (~real[:, :1]).long()
        first = index[:, :1] + skipped if T else index.new_zeros(N)
    else:
        start, end = cu_seqlens[:-1].contiguous(), cu_seqlens[1:].contiguous()
        first = torch.zeros_like(start)
    write = torch.empty(B, T, H, dtype=torch.int64, device=device)
    out = Keep(torch.empty_like(state.born), torch.empty_like(state.importance))
    if N and H:
        _choose[(N, H)](
            importance.permute(2, 0, 1).contiguous(),
            (write if real is None else real.to(torch.int8).contiguous()),
            decay.contiguous(),
            sizes,
            start,
            end,
            first.contiguous(),
            state.born.contiguous(),
            state.importance.contiguous(),
            write,
            *out,
            B * T,
            sinks,
            recent,
            M,
            H,
            triton.next_power_of_2(M),
            real is not None,
            num_warps=1,
        )
    return write, out
