"""The gated slot attention layer: a start that keeps the teacher ("ring"), and the published one ("paper").

ring    The teacher's q, k, v, rotary positions and scale. Each token replaces one slot and all others stay
        exactly as they are (onehot.py), so the layer is softmax over the tokens that are still there. Which
        slot: keep.py. With `recent` None the slots are a ring, and the layer begins as the teacher inside a
        window of num_slots - sinks tokens. With a number, only so many of the latest tokens are sure to
        stay; all others stay while they are worth it, by an importance w x of each key/value head and its
        fall with age, both fitted in closed form (`fit`). Importance and decay are not trained: a hard
        choice has no gradient, and a straight-through one changed nothing that was measured.
paper   SiLU on q, k, v; no rotary positions; scale 1; log_gate = logsigmoid(f_proj x) / 8; SiLU and RMSNorm
        on the output (arXiv:2409.07146, as in its public layer).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from unsoftmax.kernels.gsa.chunked import gsa
from unsoftmax.kernels.gsa.keep import Keep, choose_slots, ring_slots
from unsoftmax.kernels.gsa.onehot import slot_attention
from unsoftmax.kernels.gsa.onehot_reference import SlotState
from unsoftmax.kernels.gsa.reference import GSAState
from unsoftmax.kernels.mixer import AttentionShape, Mixer, MixerOptions, Rotary, packed, token_index

DAMPING = 8.0  # the paper's tau
NORM_EPS = 1e-5
RIDGE = 1e-3  # of the mean variance of x
FAR = 24  # tokens: importance is the attention from so far or farther
FAR_QUERIES = 24  # a mean over at least as many later queries, if rows allow
QUERY_BLOCK = 256  # rows of attention held at once while fitting


@dataclass(frozen=True)
class GSAOptions(MixerOptions):
    num_slots: int | tuple[int, ...] = 64
    """Slots of each key/value head: one number, or one for each head of the layer (ring start)."""
    start: str = "ring"
    """"ring" keeps the teacher inside a window; "paper" is the published layer."""
    sinks: int = 4
    """First tokens of a document that stay for good (ring start)."""
    recent: int | None = None
    """Latest tokens sure to stay, such as 8; null: all slots but the sinks are theirs (ring start). A head
    that was dealt fewer slots keeps as many as it has beside the sinks."""

    def __post_init__(self) -> None:
        if not isinstance(self.num_slots, int):  # JSON has lists
            object.__setattr__(self, "num_slots", tuple(self.num_slots))
        if self.start not in ("ring", "paper"):
            raise ValueError(f"mixer.start is {self.start!r}; it must be 'ring' or 'paper'")
        if self.sinks < 0:
            raise ValueError(f"mixer.sinks is {self.sinks}; it must be 0 or more")
        shown = self.num_slots if isinstance(self.num_slots, int) else list(self.num_slots)
        if not self.each or min(self.each) < 1:
            raise ValueError(f"mixer.num_slots is {shown}; it must be at least 1, such as 64")
        if self.recent is not None and self.recent < 1:
            raise ValueError(f"mixer.recent is {self.recent}; it must be at least 1, such as 16, or null")
        if self.start == "paper" and (self.recent is not None or not isinstance(self.num_slots, int)):
            key, value = ("recent", self.recent) if self.recent is not None else ("num_slots", shown)
            raise ValueError(
                f"mixer.{key} is {value}, but mixer.start 'paper' has one num_slots and no recent; "
                "use 64 and null, or mixer.start 'ring'"
            )
        if self.start == "ring" and min(self.each) <= self.sinks:
            raise ValueError(
                f"mixer.num_slots is {shown}, which leaves no slot beside mixer.sinks {self.sinks}; "
                f"at least {self.sinks + 1} would"
            )
        left = max(self.each) - self.sinks
        if isinstance(self.num_slots, int) and self.recent is not None and self.recent > left:
            raise ValueError(
                f"mixer.recent is {self.recent}, and mixer.num_slots {shown} leaves {left} slots beside "
                f"mixer.sinks {self.sinks}; fewer, such as {min(8, left)}, let tokens stay by importance"
            )

    @property
    def each(self) -> tuple[int, ...]:
        """num_slots as a tuple: of one number, or of one for each head."""
        return (self.num_slots,) if isinstance(self.num_slots, int) else self.num_slots

    def slots(self, heads: int) -> tuple[int, ...]:
        """Slots of each of the layer's key/value heads."""
        return self.each * heads if len(self.each) == 1 else self.each

    def state_numbers(self, shape: AttentionShape) -> int:
        beside = 1 if self.start == "paper" else 3  # log_kept; or a token's index (two numbers) and worth
        return sum(self.slots(shape.num_kv_heads)) * (2 * shape.head_dim + beside)


class RingState(NamedTuple):
    """k, v of every head's slots, one head after another [B, slots of all heads, D]; the tokens in them, by
    index in the document (int64, -1: empty) and importance (float32), both [B, slots of all heads]; tokens
    seen [B] int64."""

    k: torch.Tensor
    v: torch.Tensor
    born: torch.Tensor
    importance: torch.Tensor
    seen: torch.Tensor


class Importance(nn.Module):
    """Log attention that tokens x [B, T, hidden] get from afar, [B, T, H] float32, and its fall with age.

    In float32 at least, so that a choice does not hang on the rounding of a matmul. Buffers: fitted, never
    trained.
    """

    weight: torch.Tensor
    decay: torch.Tensor

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(heads, hidden_size))
        self.register_buffer("decay", torch.empty(heads))

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(_wide(x)), self.weight.to(_wide(x))).float()


class GatedSlotAttention(Mixer):
    """See the module docstring; `options` is a GSAOptions."""

    Options = GSAOptions
    options: GSAOptions

    def __init__(self, shape: AttentionShape, options: GSAOptions) -> None:
        super().__init__(shape, options)
        H = shape.num_kv_heads
        if len(options.each) not in (1, H):
            raise ValueError(
                f"mixer.num_slots is {list(options.each)}, of {len(options.each)} heads, and the layer has "
                f"{H}; give one number, or {H}"
            )
        if options.start == "paper":
            self.f_proj = nn.Linear(shape.hidden_size, H * options.each[0], bias=False)
            self.g_norm = nn.RMSNorm(shape.num_heads * shape.head_dim, eps=NORM_EPS)
        elif options.recent is not None:
            self.importance = Importance(shape.hidden_size, H)
        if self.has_storage():
            self.reset_new_parameters()

    @property
    def fit_tokens(self) -> int:
        if self.options.recent is None:
            return 1
        least = FAR + self.options.sinks + 1
        return next(T for T in itertools.count(least) if T - FAR - self.options.sinks >= _least_queries(T))

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of each key/value head."""
        return self.options.slots(self.shape.num_kv_heads)

    @torch.no_grad()
    def reset_new_parameters(self) -> None:
        """f_proj normal, 0.02; g_norm ones; importance of random x is normal, and falls by 1 a doubling."""
        if self.options.start == "paper":
            nn.init.normal_(self.f_proj.weight, std=0.02)
            nn.init.ones_(self.g_norm.weight)
        elif self.options.recent is not None:
            nn.init.normal_(self.importance.weight, std=self.shape.hidden_size**-0.5)
            nn.init.ones_(self.importance.decay)

    def forward(
        self,
        x: torch.Tensor,
        *,
        rotary: Rotary,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        state: RingState | GSAState | None = None,
        keep_state: bool = False,
    ) -> tuple[torch.Tensor, RingState | GSAState | None]:
        """See Mixer.forward. With cu_seqlens the state's dimension 0 is the documents."""
        if cu_seqlens is not None and (mask is not None or state is not None):
            raise ValueError("cu_seqlens excludes mask and state; pass packed documents alone")
        if cu_seqlens is not None:
            cu_seqlens = packed(cu_seqlens, x.shape[1], x.device)
        if self.options.start == "paper":
            assert state is None or isinstance(state, GSAState)
            o, new = self._paper(x, mask, cu_seqlens, state)
        else:
            assert state is None or isinstance(state, RingState)
            o, new = self._ring(x, rotary, mask, cu_seqlens, state, keep_state)
        return self.o_proj(o).to(x.dtype), new if keep_state else None

    def _paper(self, x, mask, cu_seqlens, state: GSAState | None) -> tuple[torch.Tensor, GSAState]:
        q, k, v = (F.silu(t) for t in self.project(x, None))
        gate = self.soft_gates(x, mask)
        o, state = gsa(q, k, v, gate, scale=1.0, state=state, cu_seqlens=cu_seqlens)
        wide, weight = F.silu(o.flatten(2).to(_wide(x))), self.g_norm.weight
        return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), NORM_EPS).to(o.dtype), state

    def _ring(
        self, x, rotary, mask, cu_seqlens, state: RingState | None, keep_state: bool
    ) -> tuple[torch.Tensor, RingState | None]:
        q, k, v = self.project(x, rotary)
        write, keep = self.writes(x, mask, cu_seqlens, state, keep_state=keep_state)
        old = None
        if state is not None:
            old = SlotState(state.k, state.v, torch.where(state.born < 0, -torch.inf, 0.0))
        o, new = slot_attention(
            q,
            k,
            v,
            write.unsqueeze(-1),
            num_slots=self.slots,
            scale=self.scale,
            state=old,
            cu_seqlens=cu_seqlens,
            keep_state=keep_state,
        )
        if new is None or keep is None:
            return o.flatten(2), None
        return o.flatten(2), RingState(new.k, new.v, *keep, self._seen(x, mask, cu_seqlens, state))

    def soft_gates(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """log_gate [B, T, H, M] of the paper start; the sigmoid in float32, for half-lives over 300."""
        logit = self.f_proj(x.to(self.f_proj.weight.dtype)).unflatten(
            -1, (self.shape.num_kv_heads, self.options.each[0])
        )
        gate = F.logsigmoid(logit.to(_wide(x))) / DAMPING
        return gate if mask is None else gate.masked_fill(~mask.bool()[:, :, None, None], 0.0)

    def writes(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        state: RingState | None = None,
        slots: tuple[int, ...] | None = None,
        keep_state: bool = True,
    ) -> tuple[torch.Tensor, Keep | None]:
        """The slot each token of x overwrites, [B, T, H] int64 (-1: none), and what then is in the slots.

        cu_seqlens: int64.
        slots: other numbers of slots than the layer's own, the heads repeated to match: head h of the result
            is head h mod H of the layer. Excludes state.
        keep_state: False if nobody wants what then is in the slots.
        """
        opt, (B, T, _), slots = self.options, x.shape, slots or self.slots
        real, seen = None if mask is None else mask.bool(), None if state is None else state.seen
        if opt.recent is None:
            index = token_index(mask, cu_seqlens, seen, (B, T), x.device).expand(B, T)
            counts = self._seen(x, mask, cu_seqlens, state) if keep_state else None
            return ring_slots(index, counts, slots, opt.sinks, real)
        importance, decay = self.importance(x), self.importance.decay
        repeats = len(slots) // self.shape.num_kv_heads
        if repeats > 1:
            importance, decay = importance.repeat(1, 1, repeats), decay.repeat(repeats)
        return choose_slots(
            importance,
            decay,
            slots,
            sinks=opt.sinks,
            recent=opt.recent,
            real=real,
            seen=seen,
            state=None if state is None else Keep(state.born, state.importance),
            cu_seqlens=cu_seqlens,
            keep_state=keep_state,
        )

    def _seen(self, x, mask, cu_seqlens, state: RingState | None) -> torch.Tensor:
        """Real tokens so far of each row or document [N] int64."""
        if cu_seqlens is not None:
            return cu_seqlens.diff().long()
        if mask is not None:
            here = mask.long().sum(1)
            return here if state is None else state.seen + here
        if state is not None:
            return state.seen + x.shape[1]
        return torch.full((len(x),), x.shape[1], device=x.device)

    @torch.no_grad()
    def fit(self, batches: Iterable[tuple[torch.Tensor, Rotary]]) -> dict[str, float]:
        """Fit importance and decay to the attention that the teacher's tokens get from afar.

        Importance: ridge regression on x of the log of the mean attention from FAR tokens later or more.
        Decay: the slope of that log over log2 of the distance, by least squares over bands of a doubling
        each. In float64; the same text gives the same bits. Returns the share of variance explained and the
        decay (means over heads) and the tokens; {} if all slots are a ring.
        """
        if self.options.recent is None:
            return {}
        sums, bands = _Moments(), _Bands()
        for x, rotary in batches:
            target, usable = self._far_attention(x, rotary, bands)
            sums.add(x[:, usable].flatten(0, 1).double(), target[:, usable].flatten(0, 1).double())
        weight, explained = sums.ridge()
        self.importance.weight.copy_(weight.T)
        self.importance.decay.copy_(bands.slope())
        decay = self.importance.decay.double().mean().item()
        return {"tokens": float(sums.n), "explained": explained, "decay": decay}

    def _far_attention(
        self, x: torch.Tensor, rotary: Rotary, bands: _Bands
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log mean attention [B, T, H] from FAR later or more, and who has enough later [T]; bands too."""
        opt, (B, T, _), H = self.options, x.shape, self.shape.num_kv_heads
        q, k, _ = (t.to(_wide(x)) for t in self.project(x, rotary))
        q = q.unflatten(2, (H, -1)).permute(0, 2, 3, 1, 4)  # [B, H, G, T, D]
        k = k.permute(0, 2, 3, 1).unsqueeze(2)  # [B, H, 1, D, T]
        j = torch.arange(T, device=x.device)
        edges = bands.edges(T)
        # within[n, j]: attention that j got from fewer than distances[n] tokens later
        distances = [near for near, _ in edges] + [edges[-1][1]]
        within, so_far = x.new_zeros(len(distances), B, H, T, dtype=_wide(x)), q.new_zeros(B, H, 1, T)
        for i in j.split(QUERY_BLOCK):
            a, b = int(i[0]), int(i[-1]) + 1
            logit = (q[..., i, :] @ k[..., :b]) * self.scale
            p = logit.masked_fill(i[:, None] < j[:b], -torch.inf).softmax(-1).sum(2)
            p[:, :, 0] += so_far[:, :, 0, :b]
            p = p.cumsum(2)
            so_far[..., :b] = p[:, :, -1:]
            for n, distance in enumerate(distances):
                mine = j[max(0, a - distance + 1) : max(0, b - distance + 1)]
                within[n, ..., mine] = p[:, :, mine + distance - 1 - a, mine]
        for n, distance in enumerate(distances):  # of those that the row's end cuts off: all there was
            within[n, ..., max(0, T - distance + 1) :] = so_far[:, :, 0, max(0, T - distance + 1) :]
        for n, (near, far) in enumerate(edges):
            queries = (T - near - j).clamp(0, far - near)
            bands.add(near, within[n + 1] - within[n], queries, (queries >= FAR_QUERIES) & (j >= opt.sinks))
        later = (T - FAR - j).clamp_min(0)
        usable = (later >= _least_queries(T)) & (j >= opt.sinks)
        if not usable.any():
            raise ValueError(
                f"calibration rows have {T} tokens, too few to see attention from {FAR} tokens on; "
                f"use rows of {self.fit_tokens} or more"
            )
        return _log_mean(so_far[:, :, 0] - within[0], later).transpose(1, 2), usable


def _least_queries(tokens: int) -> int:
    """Later queries that a token of a calibration row needs for its importance to be fitted to."""
    return max(1, min(FAR_QUERIES, (tokens - FAR) // 4))


def _log_mean(received: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    return (
        received.clamp_min(0) / queries.clamp_min(1) + 1e-6
    ).log()  # a difference of sums may round below 0


class _Bands:
    """Mean log attention by distance: FAR to twice that, and so on, each to double."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}
        self.counts: dict[int, int] = {}

    @staticmethod
    def edges(T: int) -> list[tuple[int, int]]:
        found, near = [], FAR
        while near < max(T, FAR + 1):
            found.append((near, 2 * near))
            near *= 2
        return found

    def add(self, near: int, received: torch.Tensor, queries: torch.Tensor, usable: torch.Tensor) -> None:
        """received [B, H, T], from so many queries [T] of the band that begins at `near`."""
        if usable.any():
            logs = _log_mean(received, queries)[..., usable].double()
            self.sums[near] = self.sums.get(near, 0) + logs.sum((0, 2))
            self.counts[near] = self.counts.get(near, 0) + logs.shape[0] * logs.shape[2]

    def slope(self) -> torch.Tensor:
        """Loss of log attention with each doubling [H], at least 0; 1 if rows show fewer than two bands."""
        if len(self.sums) < 2:
            return torch.ones(())
        logs = torch.stack([self.sums[near] / self.counts[near] for near in sorted(self.sums)])  # [bands, H]
        step = torch.arange(len(logs), dtype=torch.float64, device=logs.device)
        step = (step - step.mean()).unsqueeze(-1)
        return (-(step * logs).sum(0) / step.square().sum()).clamp_min(0)


class _Moments:
    """Running sums of x and y [tokens, ·] for a ridge regression with a free intercept."""

    def __init__(self) -> None:
        self.n = 0
        self.xx = self.xy = self.yy = self.x = self.y = torch.zeros(())

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if not self.n:  # zeros of nothing, on any device
            self.xx = self.xy = self.yy = self.x = self.y = x.new_zeros(())
        self.n += len(x)
        self.xx, self.xy, self.yy = self.xx + x.T @ x, self.xy + x.T @ y, self.yy + (y * y).sum(0)
        self.x, self.y = self.x + x.sum(0), self.y + y.sum(0)

    def ridge(self) -> tuple[torch.Tensor, float]:
        """Weights [hidden, H] and the mean share of variance explained."""
        if not self.n:
            raise ValueError("no calibration text: calibration.tokens must leave at least one row")
        x, y = self.x / self.n, self.y / self.n
        xx = self.xx / self.n - torch.outer(x, x)
        xy = self.xy / self.n - torch.outer(x, y)
        spread = xx.diagonal().mean().clamp_min(1e-12)
        weight = torch.linalg.solve(
            xx + RIDGE * spread * torch.eye(len(xx), dtype=xx.dtype, device=xx.device), xy
        )
        left = self.yy / self.n - y * y
        explained = (2 * (weight * xy).sum(0) - (weight * (xx @ weight)).sum(0)) / left.clamp_min(1e-12)
        return weight, explained.mean().item()


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
