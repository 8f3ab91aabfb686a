"""keep.py's choice in Triton: one program, a warp, walks one document of one head.

Tokens are one after another, so a step must be short: a search for the least of a warp's integers, which
have the order of the floats since the chip finds the least of those in one instruction, and a comparison.

Blocks. No token leaves within `recent` tokens, so in a block of as many (BLOCK at most) a step needs nothing
of the one before but which slots are gone. A slot that compares equal is gone; which step took it is read
off the slots after the block. Had two slots been worth the same, both would be gone: such a block is done
again token by token.

Near slots. In registers, two a lane, are the slots that will be worth least `reach` tokens later; the others
are in memory, with a bound that none of them falls to till then. The bound takes part in the search. Where it
is the least, no slot is gone and the block ends: the near slots are chosen again, for a shorter reach. While
nothing of the sort happens the reach grows. All this only moves work: the choice is that of the rule.

Token by token. Few tokens, padded ones and ties go over all slots at once, one after another.

Scheduling. While one search runs, the values of the next step and the logarithms of the one after it are
made. Left to itself the compiler makes them before the search or after it, where they are waited for; so they
hang on the search's operand through `nought`, a zero that it cannot see, and the search's result on them.
"""

import torch
import triton
import triton.language as tl

from unsoftmax.kernels.gsa.keep import Keep
from unsoftmax.kernels.gsa.launch import Compiled, alike
from unsoftmax.kernels.gsa.onehot_reference import slot_table

LAST = tl.constexpr(2147483647)  # after every candidate
LANES = tl.constexpr(32)  # of a warp; tokens loaded at once
BLOCK = tl.constexpr(16)  # tokens of a block, at most
NEAR = 64  # slots in registers: two a lane
SHORT, FIRST, LONG = tl.constexpr(16), tl.constexpr(32), tl.constexpr(96)  # reaches, in tokens
FEW = 32  # tokens that do not pay for choosing near slots


@triton.jit
def _log2(age, APPROX: tl.constexpr):
    if APPROX:  # to 2^-22, a few of the last bits, in one instruction rather than twenty
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [age], tl.float32, True, 1)
    else:  # in the interpreter, which has no assembly
        return tl.log2(age)


@triton.jit
def _value(worth, age, fall, APPROX: tl.constexpr):
    """What slots are worth, by keep.py's formula; age in float32, 1 or more."""
    return worth + fall * _log2(age, APPROX)


@triton.jit
def _order(value, kept):
    """Integers in the order of the values, none of which is -0.0; LAST where kept."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(kept, LAST, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _singly(
    now,
    there,
    age,
    worth,
    i,
    count,
    slot,
    size,
    fixed,
    latest,
    fall,
    PADDED: tl.constexpr,
    APPROX: tl.constexpr,
):
    """Up to LANES tokens one after another over all slots: the slots they take, the slots' ages and worth,
    the next token's index.

    now: bits of the tokens' importances; there: whether they are real. While the search of one step runs, the
    slots' values of the next are made, as if none were taken.
    """
    u, chosen = tl.arange(0, LANES), tl.zeros((LANES,), tl.int32)
    one = slot * 0 + 1
    key = _order(_value(worth, tl.maximum(age, 1).to(tl.float32), fall, APPROX), fixed | (age < latest))
    for s in range(0, count):
        mine = tl.sum(tl.where(u == s, now, 0), axis=0).to(tl.float32, bitcast=True) + 0.0  # -0.0 is 0.0
        step, here = 1, slot >= 0
        if PADDED:
            step = tl.sum(tl.where((u == s) & there, 1, 0), axis=0)
            here = slot < step * LAST
        older = age + step
        then = _value(worth, tl.maximum(older, 1).to(tl.float32), fall, APPROX)
        next_key = _order(then, fixed | (older < latest))
        new_key = _order(_value(mine, one.to(tl.float32), fall, APPROX), fixed | (latest > 1))
        least = tl.min(key, axis=0)
        taken = tl.min(tl.where(key == least, slot, LAST), axis=0)
        taken = tl.where(i < size, i, taken)
        hit = (slot == taken) & here
        key = tl.where(hit, new_key, next_key)
        age = tl.where(hit, 1, older)
        worth = tl.where(hit, mine, worth)
        chosen = tl.where(u == s, taken, chosen)
        i += step
    return chosen, age, worth, i


@triton.jit
def _edge(low, free, edge, CLOSE: tl.constexpr):
    """A value that some CLOSE of the free slots' do not exceed, 5/8 of it at least if the search finds that.

    edge: where it starts; steps double until they have passed the goal, then halve.
    """
    found = tl.sum((free & (low <= edge)).to(tl.int32))
    step, passed, rose, tries = 0.25, found < 0, found < CLOSE, 0
    while ((found > CLOSE) | (found < CLOSE * 5 // 8)) & (tries < 24):
        rise = found <= CLOSE
        passed = passed | (rise != rose)
        step = tl.where(passed, 0.5 * step, 2.0 * step)
        edge += tl.where(rise, step, -step)
        found = tl.sum((free & (low <= edge)).to(tl.int32))
        rose = rise
        tries += 1
    return edge


@triton.jit
def _nearest(
    born, worth, room, slot, i, size, sinks, fall, reach, edge, CLOSE: tl.constexpr, APPROX: tl.constexpr
):
    """Finds the CLOSE slots worth least `reach` tokens on: how many; what the others stay above till then;
    and the edge of their worth, where the next search starts.

    born, worth: pointers to all slots of the head; room: to 3 CLOSE integers of the program's own, which
    get the slots' numbers, ages and worth.
    """
    inside, free = slot < size, (slot >= sinks) & (slot < size)
    age = i - tl.load(born + slot, mask=inside, other=-1).to(tl.int32)
    value = tl.load(worth + slot, mask=inside, other=0.0)
    oldest = tl.where(fall < 0, age + reach, age).to(tl.float32)
    slack = 1e-6 * (tl.abs(value) + 32.0 * tl.abs(fall))  # above all roundings
    low = _value(value, oldest, fall, APPROX) - slack + 0.0
    close = free
    if size - sinks > CLOSE:
        edge = _edge(low, free, edge, CLOSE)
        close = free & (low <= edge)
    lanes = tl.reshape(close.to(tl.int32), (slot.shape[0] // LANES, LANES))
    counts = tl.sum(lanes, axis=0)
    rank = tl.reshape(
        tl.cumsum(lanes, axis=0) + (tl.cumsum(counts, axis=0) - counts)[None, :] - 1, slot.shape
    )
    close = close & (rank < CLOSE)
    bound = tl.min(_order(low, ~free | close))
    tl.store(room + rank, slot, mask=close)
    tl.store(room + CLOSE + rank, age, mask=close)
    tl.store(room + 2 * CLOSE + rank, value.to(tl.int32, bitcast=True), mask=close)
    tl.debug_barrier()
    return tl.minimum(tl.sum(counts, axis=0), CLOSE), bound, edge


@triton.jit
def _part(room, held, place, CLOSE: tl.constexpr):
    """Numbers (-1: none), ages and worth of a lane's near slot."""
    there = place < held
    number = tl.load(room + place, mask=there, other=-1)
    age = tl.load(room + CLOSE + place, mask=there, other=1)
    return number, age, tl.load(room + 2 * CLOSE + place, mask=there, other=0).to(tl.float32, bitcast=True)


@triton.jit
def _put(born, worth, number, age, value, i):
    """Near slots to memory."""
    tl.store(born + number, (i - age).to(tl.int64), mask=number >= 0)
    tl.store(worth + number, value, mask=number >= 0)


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
    near,  # [N, H, 3 CLOSE] int32, room
    T,
    S,
    sinks,
    recent,
    H: tl.constexpr,
    SLOTS: tl.constexpr,
    CLOSE: tl.constexpr,  # 0: token by token
    APPROX: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    SEEN: tl.constexpr,
    STATE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Grid [N, H], a warp."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, u = tl.arange(0, SLOTS), tl.arange(0, LANES)
    size, first = tl.load(heads + 2 * h), n * S + tl.load(heads + 2 * h + 1)
    at = first + slot
    inside, fixed, fall = slot < size, (slot < sinks) | (slot >= size), -tl.load(decay + h)
    latest = tl.minimum(size - sinks, recent)
    i = 0
    if SEEN:
        i = tl.load(seen + n).to(tl.int32)
    age, worth = tl.zeros((SLOTS,), tl.int32) + i + 1, tl.zeros((SLOTS,), tl.float32)  # born at -1
    if STATE:
        age = i - tl.load(born_in + at, mask=inside, other=-1).to(tl.int32)
        worth = tl.load(worth_in + at, mask=inside, other=0.0) + 0.0
    begin, stop = n * T, n * T + T
    if PACKED:
        begin, stop = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)

    if CLOSE == 0:
        coming = tl.load(importance + (begin + u) * H + h, mask=begin + u < stop, other=0.0)
        for t0 in range(begin, stop, LANES):
            t, now = t0 + u, coming.to(tl.int32, bitcast=True)
            coming = tl.load(importance + (t + LANES) * H + h, mask=t + LANES < stop, other=0.0)
            there = t < stop
            if PADDED:
                there = tl.load(real + t, mask=there, other=0) != 0
            count = tl.minimum(stop - t0, LANES).to(tl.int32)
            chosen, age, worth, i = _singly(
                now, there, age, worth, i, count, slot, size, fixed, latest, fall, PADDED, APPROX
            )
            tl.store(write + t * H + h, tl.where(there, chosen, -1).to(tl.int64), mask=t < stop)
        if KEEP:
            tl.store(born_out + at, (i - age).to(tl.int64), mask=inside)
            tl.store(worth_out + at, tl.where(fixed, 0.0, worth), mask=inside)
    else:
        # The tokens that fill empty slots.
        filling = tl.minimum(tl.maximum(size - i, 0), stop - begin).to(tl.int32)
        new, t = (slot >= i) & (slot < i + filling), begin + slot - i
        mine = tl.load(importance + t * H + h, mask=new, other=0.0) + 0.0
        tl.store(write + t * H + h, slot.to(tl.int64), mask=new)
        tl.store(born_out + at, tl.where(new, slot, i - age).to(tl.int64), mask=inside)
        tl.store(worth_out + at, tl.where(fixed, 0.0, tl.where(new, mine, worth)), mask=inside)
        i += filling

        born, values, room = born_out + first, worth_out + first, near + (n * H + h) * 3 * CLOSE
        number_a, age_a, worth_a = u * 0 - 1, u * 0 + 1, u * 0.0  # a lane's first near slot
        number_b, age_b, worth_b = u * 0 - 1, u * 0 + 1, u * 0.0  # and its second
        bound, left, reach, edge = LAST + 0, -1, FIRST + 0, 0.0
        nought, fall_bits = size >> 30, fall.to(tl.int32, bitcast=True)
        t0 = begin + filling
        coming = tl.load(importance + (t0 + u) * H + h, mask=t0 + u < stop, other=0.0)
        while t0 < stop:
            count, now = tl.minimum(stop - t0, tl.minimum(latest, BLOCK)).to(tl.int32), coming
            following = t0 + count + u
            coming = tl.load(importance + following * H + h, mask=following < stop, other=0.0)
            fresh = 0
            if left < count:
                fresh = 1
                reach = tl.minimum(reach + tl.where(left < 0, 0, 2), LONG)
                _put(born, values, number_a, age_a, worth_a, i)
                _put(born, values, number_b, age_b, worth_b, i)
                tl.debug_barrier()
                held, bound, edge = _nearest(
                    born, values, room, slot, i, size, sinks, fall, reach, edge, CLOSE, APPROX
                )
                number_a, age_a, worth_a = _part(room, held, u, CLOSE)
                number_b, age_b, worth_b = _part(room, held, LANES + u, CLOSE)
                left = tl.where(bound == LAST, LAST, reach)

            wait_a, start_a, gone_a = latest - age_a, age_a.to(tl.float32), number_a < 0
            wait_b, start_b, gone_b = latest - age_b, age_b.to(tl.float32), number_b < 0
            key_a = _order(_value(worth_a, start_a, fall, APPROX), wait_a > 0)
            key_b = _order(_value(worth_b, start_b, fall, APPROX), wait_b > 0)
            since_a, since_b = start_a + 1.0, start_b + 1.0
            log_a, log_b = _log2(since_a, APPROX), _log2(since_b, APPROX)
            for s in tl.static_range(BLOCK):
                key_a, key_b = tl.where(gone_a, LAST, key_a), tl.where(gone_b, LAST, key_b)
                lane = tl.minimum(tl.minimum(key_a, key_b), bound)
                least = tl.min(lane, axis=0)
                one = ((lane & nought) ^ 0x3F800000).to(tl.float32, bitcast=True)
                now_fall = ((lane & nought) ^ fall_bits).to(tl.float32, bitcast=True)
                since_a = tl.where(gone_a, since_a, since_a + one)
                since_b = tl.where(gone_b, since_b, since_b + one)
                after_a, after_b = _log2(since_a, APPROX), _log2(since_b, APPROX)
                next_a = _order(worth_a + now_fall * log_a, wait_a > s + 1)
                next_b = _order(worth_b + now_fall * log_b, wait_b > s + 1)
                gone_a = gone_a | ((key_a ^ (next_a & nought)) == least)
                gone_b = gone_b | ((key_b ^ (next_b & nought)) == least)
                key_a, key_b, log_a, log_b = next_a, next_b, after_a, after_b
            took_a = (tl.where(gone_a, since_a, since_a + 1.0) - start_a).to(tl.int32) - 2
            took_b = (tl.where(gone_b, since_b, since_b + 1.0) - start_b).to(tl.int32) - 2
            # Commit the steps before the first that took no slot, unless one took several.
            bit_a = tl.where((took_a >= 0) & (took_a < count), 1 << (took_a & 31), 0)
            bit_b = tl.where((took_b >= 0) & (took_b < count), 1 << (took_b & 31), 0)
            steps = tl.xor_sum(bit_a ^ bit_b, axis=0)
            single = tl.sum(bit_a + bit_b, axis=0) == steps
            missing = (~steps & (steps + 1)).to(tl.float32)  # 2 ^ the first step that is not there
            done = (missing.to(tl.int32, bitcast=True) >> 23) - 127
            if single & (done > 0):
                taken_a, taken_b = (bit_a != 0) & (took_a < done), (bit_b != 0) & (took_b < done)
                tl.store(write + (t0 + took_a) * H + h, number_a.to(tl.int64), mask=taken_a)
                tl.store(write + (t0 + took_b) * H + h, number_b.to(tl.int64), mask=taken_b)
                new_a = tl.gather(now, tl.where(taken_a, took_a, 0), axis=0) + 0.0  # -0.0 is 0.0
                new_b = tl.gather(now, tl.where(taken_b, took_b, 0), axis=0) + 0.0
                worth_a, worth_b = tl.where(taken_a, new_a, worth_a), tl.where(taken_b, new_b, worth_b)
                age_a = tl.where(taken_a, done - took_a, age_a + done)
                age_b = tl.where(taken_b, done - took_b, age_b + done)
                left = tl.where(done < count, -1, left - done)
                reach = tl.where(done < count, tl.maximum(reach - 16, SHORT), reach)
            elif single & ((fresh == 0) | (reach > SHORT)):
                done, left, reach = 0, -1, tl.maximum(reach - 16, SHORT)
            else:
                _put(born, values, number_a, age_a, worth_a, i)
                _put(born, values, number_b, age_b, worth_b, i)
                tl.debug_barrier()
                age = i - tl.load(born + slot, mask=inside, other=-1).to(tl.int32)
                worth = tl.load(values + slot, mask=inside, other=0.0)
                bits, there = now.to(tl.int32, bitcast=True), u < count
                chosen, age, worth, _ = _singly(
                    bits, there, age, worth, i, count, slot, size, fixed, latest, fall, False, APPROX
                )
                tl.store(write + (t0 + u) * H + h, chosen.to(tl.int64), mask=there)
                tl.debug_barrier()
                tl.store(born + slot, (i + count - age).to(tl.int64), mask=inside)
                tl.store(values + slot, tl.where(fixed, 0.0, worth), mask=inside)
                tl.debug_barrier()
                number_a, number_b, left, done = u * 0 - 1, u * 0 - 1, -1, count
            if done < count:
                coming = tl.load(importance + (t0 + done + u) * H + h, mask=t0 + done + u < stop, other=0.0)
            i += done
            t0 += done
        _put(born, values, number_a, age_a, worth_a, i)
        _put(born, values, number_b, age_b, worth_b, i)


_compiled = Compiled()


@torch.no_grad()
def choose_slots_triton(
    importance, decay, slots, sinks, recent, real, seen, state: Keep | None, cu_seqlens, keep_state, near=None
) -> tuple[torch.Tensor, Keep | None]:
    """See keep.choose_slots; near 0: token by token; NEAR: in blocks; None: what is faster.

    Blocks take a quarter of the time for 100 slots or more, up to twice for NEAR or fewer.
    """
    B, T, H = importance.shape
    N, S = B if cu_seqlens is None else len(cu_seqlens) - 1, sum(slots)
    write = importance.new_empty((B, T, H), dtype=torch.int64)
    held = (None, None) if state is None else (state.born.contiguous(), state.importance.contiguous())
    SLOTS = max(32, 1 << (max(slots) - 1).bit_length())
    if near is None:
        near = NEAR if max(slots) > NEAR else 0
    close, out, room = 0 if real is not None or T < FEW else near, (None, None), None
    if keep_state or close:
        out = importance.new_empty((N, S), dtype=torch.int64), importance.new_empty((N, S))
    if close:
        room = importance.new_empty((N, H, 3 * close), dtype=torch.int32)
    if real is not None:
        real = real.contiguous().view(torch.int8)
    heads = slot_table(slots, importance.device)
    tensors = (importance.contiguous(), real, decay.contiguous(), heads, cu_seqlens, seen, *held)
    kind, more = alike(*tensors), (SLOTS, close, importance.is_cuda)
    flags = real is not None, cu_seqlens is not None, seen is not None, state is not None, keep_state
    if N and H:
        whole = kind and (kind, T % 16 == 0, T == 1, S % 16 == 0, S == 1, sinks, recent, H, *more, *flags)
        arguments = (*tensors, write, *out, room, T, S, sinks, recent, H, *more, *flags)
        _compiled.launch(_choose, (N, H, 1), whole, arguments, num_warps=1)
    return write, Keep(*out) if keep_state else None
