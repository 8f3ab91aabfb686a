"""keep.py's choice in Triton: one program walks one document of one head, its slots in a warp's registers.

Tokens are one after another, so a step must be short. What stands in a slot is worth, at the next token,
something that does not hang on which slot this token takes, unless it takes that one: so the logarithms of
the next step are made beside the search of this one, and only the search is waited for. It looks for the
least of integers that have the order of the floats, since the chip finds those across a warp in one
instruction, and then for the first slot that has it. Importances are loaded 32 tokens at a time, a block
ahead.
"""

import torch
import triton
import triton.language as tl

from unsoftmax.kernels.gsa.keep import Keep
from unsoftmax.kernels.gsa.launch import Compiled, alike
from unsoftmax.kernels.gsa.onehot_reference import slot_table

LAST = tl.constexpr(2147483647)  # after every candidate
BLOCK = tl.constexpr(32)  # tokens loaded at once: a warp's lanes


@triton.jit
def _order(worth, age, fall, kept):
    """Integers in the order of the slots' worth at that age; LAST where kept."""
    value = worth - fall * tl.log2(tl.maximum(age, 1).to(tl.float32)) + 0.0  # -0.0 is 0.0
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(kept, LAST, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _choose(
    importance,  # [tokens, H] float32
    real,  # [tokens] int8
    decay,  # [H] float32
    heads,  # [H, 2] int32: slots, slots of the heads before
    cu_seqlens,  # [N + 1] int64
    seen,  # [N] int64
    born_in,  # [N, S] int64
    worth_in,  # [N, S] float32
    write,  # [tokens, H] int64
    born_out,
    worth_out,
    T,
    S,
    sinks,
    recent,
    H: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    SEEN: tl.constexpr,
    STATE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Grid [N, H], a warp."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, u = tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    size, at = tl.load(heads + 2 * h), n * S + tl.load(heads + 2 * h + 1) + slot
    inside, fixed, fall = slot < size, (slot < sinks) | (slot >= size), tl.load(decay + h)
    latest = tl.minimum(size - sinks, recent)
    i = 0
    if SEEN:
        i = tl.load(seen + n).to(tl.int32)
    age, worth = tl.zeros((SLOTS,), tl.int32) + i + 1, tl.zeros((SLOTS,), tl.float32)  # born at -1
    if STATE:
        age = i - tl.load(born_in + at, mask=inside, other=-1).to(tl.int32)
        worth = tl.load(worth_in + at, mask=inside, other=0.0)
    begin, stop = n * T, n * T + T
    if PACKED:
        begin, stop = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    key = _order(worth, age, fall, fixed | (age < latest))
    coming = tl.load(importance + (begin + u) * H + h, mask=begin + u < stop, other=0.0)
    for t0 in range(begin, stop, BLOCK):
        t, now = t0 + u, coming.to(tl.int32, bitcast=True)
        coming = tl.load(importance + (t + BLOCK) * H + h, mask=t + BLOCK < stop, other=0.0)
        chosen = tl.zeros((BLOCK,), tl.int32)
        there = t < stop
        if PADDED:
            there = tl.load(real + t, mask=there, other=0) != 0
        for s in range(0, tl.minimum(stop - t0, BLOCK).to(tl.int32)):
            mine = tl.sum(tl.where(u == s, now, 0), axis=0).to(tl.float32, bitcast=True)
            step, here = 1, slot >= 0
            if PADDED:
                step = tl.sum(tl.where((u == s) & there, 1, 0), axis=0)
                here = slot < step * SLOTS
            older = age + step
            next_key = _order(worth, older, fall, fixed | (older < latest))
            new_key = _order(mine + slot * 0.0, slot * 0 + 1, fall, fixed | (latest > 1))
            least = tl.min(key, axis=0)
            taken = tl.min(tl.where(key == least, slot, SLOTS), axis=0)
            taken = tl.where(i < size, i, taken)
            hit = (slot == taken) & here
            key = tl.where(hit, new_key, next_key)
            age = tl.where(hit, 1, older)
            worth = tl.where(hit, mine, worth)
            chosen = tl.where(u == s, taken, chosen)
            i += step
        tl.store(write + t * H + h, tl.where(there, chosen, -1).to(tl.int64), mask=t < stop)
    if KEEP:
        tl.store(born_out + at, (i - age).to(tl.int64), mask=inside)
        tl.store(worth_out + at, tl.where(fixed, 0.0, worth), mask=inside)


_compiled = Compiled()


@torch.no_grad()
def choose_slots_triton(
    importance, decay, slots, sinks, recent, real, seen, state: Keep | None, cu_seqlens, keep_state
) -> tuple[torch.Tensor, Keep | None]:
    """See keep.choose_slots."""
    B, T, H = importance.shape
    N, S = B if cu_seqlens is None else len(cu_seqlens) - 1, sum(slots)
    write = importance.new_empty((B, T, H), dtype=torch.int64)
    held = (None, None) if state is None else (state.born.contiguous(), state.importance.contiguous())
    out = (None, None)
    if keep_state:
        out = importance.new_empty((N, S), dtype=torch.int64), importance.new_empty((N, S))
    if real is not None:
        real = real.contiguous().view(torch.int8)
    heads = slot_table(slots, importance.device)
    tensors = (importance.contiguous(), real, decay.contiguous(), heads, cu_seqlens, seen, *held)
    SLOTS, kind = max(32, 1 << (max(slots) - 1).bit_length()), alike(*tensors)
    flags = real is not None, cu_seqlens is not None, seen is not None, state is not None, keep_state
    if N and H:
        whole = kind and (kind, T % 16 == 0, T == 1, S % 16 == 0, S == 1, sinks, recent, H, SLOTS, *flags)
        arguments = (*tensors, write, *out, T, S, sinks, recent, H, SLOTS, *flags)
        _compiled.launch(_choose, (N, H, 1), whole, arguments, num_warps=1)
    return write, Keep(*out) if keep_state else None
