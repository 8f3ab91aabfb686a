"""Which slot a token takes: the first tokens stay, the latest stay, the rest stay while they are worth it.

A key/value head has M slots. The tokens of a document, i = 0, 1, ..., fill them in order; after that token i
takes the slot of the token j that is worth least,

    worth_j(i) = importance_j - decay log2(i - j)

among those that are neither one of the first `sinks` nor one of the last `recent`. importance is the head's
estimate of the log of the attention that j gets from afar, and decay its loss with each doubling of the
distance: attention falls about as a power of distance, so worth is the log of what j would get next. With
recent = M - sinks the oldest token is the only candidate: the slots are a ring, a window of M - sinks tokens.

The choice is made one token after another, in float32, and has no gradient.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from unsoftmax.kernels.chip import has_triton
from unsoftmax.kernels.gsa.onehot_reference import slot_table

NEVER = -1  # born of an empty slot


class Keep(NamedTuple):
    """The token in each slot, all of a head and then the next one's [B, S]: its index in the document (int64,
    NEVER where empty) and its importance (float32)."""

    born: torch.Tensor
    importance: torch.Tensor


def ring_slots(
    index: torch.Tensor,
    counts: torch.Tensor | None,
    slots: tuple[int, ...],
    sinks: int,
    real: torch.Tensor | None,
) -> tuple[torch.Tensor, Keep | None]:
    """choose_slots with recent = M - sinks, all tokens at once.

    index [B, T]: of each token in its document; counts [N]: seen after the last, by row or document; None if
    nobody wants the state. Returns as choose_slots.
    """
    size = slot_table(slots, index.device)[:, 0]
    i = index.unsqueeze(-1)
    write = torch.where(i < size, i, sinks + (i - sinks) % (size - sinks))
    write = write if real is None else torch.where(real.unsqueeze(-1), write, -1)
    if counts is None:
        return write, None
    slot = torch.cat([torch.arange(n, device=index.device) for n in slots])
    size = size.repeat_interleave(size, output_size=sum(slots))
    last = counts.view(-1, 1) - 1
    born = last - (last - slot) % (size - sinks)
    born = torch.where(slot < sinks, slot, born)
    born = torch.where(slot <= last, born, NEVER)
    return write, Keep(born, torch.zeros(born.shape, device=index.device))


def choose_slots(
    importance: torch.Tensor,
    decay: torch.Tensor,
    slots: tuple[int, ...],
    *,
    sinks: int,
    recent: int,
    real: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    state: Keep | None = None,
    cu_seqlens: torch.Tensor | None = None,
    keep_state: bool = True,
    backend: str | None = None,
) -> tuple[torch.Tensor, Keep | None]:
    """The slot that each token overwrites.

    Args:
        importance: [B, T, H] float32.
        decay: [H] float32, loss of worth for each doubling of a token's age.
        slots: M of each of the H heads.
        sinks: first tokens that are never overwritten, fewer than any of `slots`.
        recent: latest tokens that are never overwritten; a head of fewer slots keeps as many as it can.
        real: [B, T] bool, False at padding, which takes no slot; None: every token is real.
        seen: [B] int64, real tokens of each row before these; None: none.
        state: before the first token; None starts empty. Not changed.
        cu_seqlens: [N + 1] int64, documents packed in one row (B = 1); excludes real, seen and state.
        keep_state: False if nobody wants the state after the last token.
        backend: "triton" or "torch"; None chooses Triton on CUDA.

    Returns:
        [B, T, H] int64, -1 at padding, and the state after the last token, of B rows or N documents, or None
        unless keep_state.
    """
    importance, decay = importance.detach().float(), decay.detach().float()
    if backend == "triton" or (backend is None and importance.is_cuda and has_triton()):
        from unsoftmax.kernels.gsa.triton_keep import choose_slots_triton

        rule = slots, sinks, recent
        return choose_slots_triton(importance, decay, *rule, real, seen, state, cu_seqlens, keep_state)
    (B, T, H), device = importance.shape, importance.device
    rows = B if cu_seqlens is None else len(cu_seqlens) - 1
    if state is None:
        born = torch.full((rows, sum(slots)), NEVER, dtype=torch.int64, device=device)
        state = Keep(born, torch.zeros(born.shape, device=device))
    if cu_seqlens is None:
        write, after = _choose(importance, decay, slots, sinks, recent, real, seen, state)
    else:
        place, inside = _beside(cu_seqlens, T)
        chosen, after = _choose(importance[0][place], decay, slots, sinks, recent, inside, None, state)
        write = torch.empty(1, T, H, dtype=torch.int64, device=device)
        write[0, place[inside]] = chosen[inside]
    return write, after if keep_state else None


def _beside(cu_seqlens: torch.Tensor, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed documents as rows of their own: where each place's token lies, and which places hold one."""
    lengths = cu_seqlens.diff()
    t = torch.arange(int(lengths.max()) if len(lengths) else 0, device=cu_seqlens.device)
    return (cu_seqlens[:-1, None] + t).clamp_max(max(0, T - 1)), t < lengths[:, None]


@torch.no_grad()
def _choose(importance, decay, slots, sinks, recent, real, seen, state: Keep) -> tuple[torch.Tensor, Keep]:
    """choose_slots for rows [N, T, H], all heads of all rows at once.

    Tokens come in blocks so short that none is overwritten in its own block: what every slot is worth at each
    of its steps is then known before, and only the search goes token by token, past the slots just taken.
    """
    N, T, H = importance.shape
    ones = torch.ones(N, T, dtype=torch.int64, device=importance.device) if real is None else real.long()
    index = ones.cumsum(1) - 1 if seen is None else ones.cumsum(1) - 1 + seen.unsqueeze(1)
    M = max(slots)  # also the number of a column beside the slots, which padding takes
    born, worth = (torch.nn.functional.pad(_side_by_side(x, slots), (0, 1)) for x in state)
    sizes, slot = (torch.tensor(x, device=importance.device) for x in (slots, range(M + 1)))
    fixed = (slot < sinks) | (slot >= sizes.unsqueeze(-1))  # [H, M + 1]
    worth = worth.masked_fill(fixed, torch.inf)  # a candidate never
    latest, fall = (sizes - sinks).clamp_max(recent), -decay.view(1, H, 1, 1)
    oldest = int(index.max()) + 2 if T else 1
    logs = _logs(max(4096, 1 << oldest.bit_length()), importance.device)
    write = [born.new_zeros(N, H, 0)]
    block = min(recent, min(slots) - sinks)
    for t in range(0, T, block):
        i = index[:, None, t : t + block]  # [N, 1, tokens]
        age = i.unsqueeze(-1) - born.unsqueeze(2)
        value = torch.addcmul(worth.unsqueeze(2), fall, logs[age])
        value.masked_fill_(age < latest.view(1, H, 1, 1), torch.inf)  # [N, H, tokens, M + 1]
        filling = bool((i < M).any())
        taken = []
        for step in range(i.shape[-1]):
            now, best = i[..., step, None], value[:, :, step].argmin(-1, keepdim=True)
            if filling:
                best = torch.where(now < sizes.view(1, H, 1), now, best)
            if real is not None:
                best = torch.where(real[:, t + step].view(N, 1, 1), best, M)
            taken.append(best)
            value.scatter_(-1, best.unsqueeze(2).expand(N, H, i.shape[-1], 1), torch.inf)
        chosen = torch.cat(taken, -1)  # [N, H, tokens]
        stays = (chosen < sinks) | (chosen == M)
        born.scatter_(-1, chosen, i.expand(chosen.shape))
        mine = importance[:, t : t + block].transpose(1, 2)
        worth.scatter_(-1, chosen, torch.where(stays, torch.inf, mine))
        write.append(chosen if real is None else torch.where(chosen == M, -1, chosen))
    after = (born, worth.masked_fill(fixed, 0.0))
    keep = Keep(*(torch.cat([x[:, h, :n] for h, n in enumerate(slots)], 1) for x in after))
    return torch.cat(write, -1).transpose(1, 2), keep


@functools.lru_cache(maxsize=4)
def _logs(ages: int, device: torch.device) -> torch.Tensor:
    """log2 of ages, a table: so small a log2 waits for threads, a lookup does not."""
    return torch.arange(ages, device=device).float().clamp_min_(1).log2_()


def _side_by_side(x: torch.Tensor, slots: tuple[int, ...]) -> torch.Tensor:
    """[N, S] as a new [N, H, M], with zeros where a head has no such slot."""
    heads = x.split(list(slots), 1)
    return torch.stack([torch.nn.functional.pad(s, (0, max(slots) - s.shape[1])) for s in heads], 1)
