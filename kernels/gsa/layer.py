"""The gated slot attention layer: a start that keeps the teacher ("ring"), and the published one ("paper").

ring    The teacher's q, k, v, rotary positions and scale. Each token replaces one slot and all others stay
        exactly as they are (onehot.py), so the layer is softmax over the tokens that are still there. Token
        t < sinks takes slot t, which nothing overwrites. The other slots are rings, each overwritten in
        turn: one for tokens of no importance, which holds the latest of them, and one for each of
        memory_slots. A token goes to ring c, the number of thresholds that its importance reaches: the more
        important, the rarer its company, and the longer it stays. Importance is w x for each key/value
        head, the thresholds are -b_c (both in `importance`, fitted in closed form by `fit`). The choice is
        hard; its gradient comes through biases of value 0, see _straight_through. Without memory_slots the
        layer begins as the teacher inside a window of num_slots - sinks tokens.
paper   SiLU on q, k, v; no rotary positions; scale 1; log_gate = logsigmoid(f_proj x) / 8; SiLU and RMSNorm
        on the output (arXiv:2409.07146, as in its public layer).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from unsoftmax.kernels.gsa.chunked import gsa
from unsoftmax.kernels.gsa.onehot import slot_attention
from unsoftmax.kernels.gsa.onehot_reference import SlotState
from unsoftmax.kernels.gsa.reference import GSAState
from unsoftmax.kernels.mixer import AttentionShape, Mixer, MixerOptions, Rotary, packed, token_index

DAMPING = 8.0  # the paper's tau
NORM_EPS = 1e-5
RIDGE = 1e-3  # of the mean variance of x
FAR_QUERIES = 32  # a token's importance is a mean over at least as many later queries, if rows allow
NEAR_COUNT = 0.05  # how far, of the count asked for, a threshold may move to a wider gap between scores
LEAST_GAP = 1e-4  # of the scores' standard deviation: narrower gaps are rounding
QUERY_BLOCK = 256  # rows of attention held at once while fitting


@dataclass(frozen=True)
class GSAOptions(MixerOptions):
    num_slots: int = 64
    """Slots of each key/value head."""
    start: str = "ring"
    """"ring" keeps the teacher inside a window; "paper" is the published layer."""
    sinks: int = 4
    """First tokens of a document that stay for good (ring start)."""
    memory_slots: tuple[int, ...] = ()
    """Slots, of num_slots, of each ring that only important tokens enter, the rarest last (ring start)."""
    memory_rates: tuple[float, ...] = ()
    """For each of memory_slots, the share of calibration tokens that enter it or a rarer one; falling."""

    def __post_init__(self) -> None:
        for key in ("memory_slots", "memory_rates"):  # JSON has lists
            object.__setattr__(self, key, tuple(getattr(self, key)))
        slots, rates = self.memory_slots, self.memory_rates
        if self.num_slots < 1:
            raise ValueError(f"mixer.num_slots is {self.num_slots}; it must be at least 1, such as 64")
        if self.start not in ("ring", "paper"):
            raise ValueError(f"mixer.start is {self.start!r}; it must be 'ring' or 'paper'")
        if self.start == "paper" and slots:
            raise ValueError(
                f"mixer.memory_slots is {list(slots)}, but mixer.start 'paper' has no memory; "
                "use [], or mixer.start 'ring'"
            )
        if self.sinks < 0:
            raise ValueError(f"mixer.sinks is {self.sinks}; it must be 0 or more")
        if any(n < 1 for n in slots):
            raise ValueError(f"mixer.memory_slots is {list(slots)}; each must be 1 or more, such as [12, 12]")
        if len(rates) != len(slots):
            raise ValueError(
                f"mixer.memory_rates is {list(rates)}; it needs one share for each of mixer.memory_slots "
                f"{list(slots)}, such as {[round(0.25 / 3**n, 3) for n in range(len(slots))]}"
            )
        if any(not 0 < r < 1 for r in rates) or any(a <= b for a, b in itertools.pairwise(rates)):
            raise ValueError(
                f"mixer.memory_rates is {list(rates)}; they must fall, between 1 and 0, such as "
                f"{[round(0.25 / 3**n, 3) for n in range(len(rates))]}"
            )
        if self.start == "ring" and self.ring < 1:
            raise ValueError(
                f"mixer.num_slots is {self.num_slots}, which leaves no ring beside mixer.sinks {self.sinks} "
                f"and mixer.memory_slots {list(slots)}; at least {self.sinks + sum(slots) + 1} would"
            )

    @property
    def ring(self) -> int:
        """Slots that hold the latest of the tokens of no importance."""
        return self.num_slots - self.sinks - sum(self.memory_slots)

    @property
    def rings(self) -> tuple[int, ...]:
        """Slots of every ring, the one for tokens of no importance first."""
        return self.ring, *self.memory_slots


class RingState(NamedTuple):
    """k and v of the slots [B, H, M, D], which of them hold a token [B, H, M] bool; int64 counts of the real
    tokens seen [B] and of those written to each ring [B, H, rings]. Biases, all 0, are not kept."""

    k: torch.Tensor
    v: torch.Tensor
    filled: torch.Tensor
    seen: torch.Tensor
    written: torch.Tensor


class Importance(nn.Module):
    """Scores of x [B, T, hidden] against each threshold of each key/value head, [B, T, H, thresholds].

    In float32 at least, so that a choice does not hang on the rounding of a matmul.
    """

    def __init__(self, hidden_size: int, heads: int, thresholds: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(heads, thresholds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            wide = _wide(x)
            score = F.linear(x.to(wide), self.weight.to(wide))
            return score.unsqueeze(-1) + self.bias.to(wide)


class GatedSlotAttention(Mixer):
    """See the module docstring; `options` is a GSAOptions."""

    Options = GSAOptions
    options: GSAOptions

    def __init__(self, shape: AttentionShape, options: GSAOptions) -> None:
        super().__init__(shape, options)
        H = shape.num_kv_heads
        if options.start == "paper":
            self.f_proj = nn.Linear(shape.hidden_size, H * options.num_slots, bias=False)
            self.g_norm = nn.RMSNorm(shape.num_heads * shape.head_dim, eps=NORM_EPS)
        elif options.memory_slots:
            self.importance = Importance(shape.hidden_size, H, len(options.memory_slots))
        if self.has_storage():
            self.reset_new_parameters()

    @torch.no_grad()
    def reset_new_parameters(self) -> None:
        """f_proj normal, 0.02; g_norm ones; importance picks memory_rates of random x of unit RMS."""
        if self.options.start == "paper":
            nn.init.normal_(self.f_proj.weight, std=0.02)
            nn.init.ones_(self.g_norm.weight)
        elif self.options.memory_slots:
            nn.init.normal_(self.importance.weight, std=self.shape.hidden_size**-0.5)
            for c, rate in enumerate(self.options.memory_rates):
                nn.init.constant_(self.importance.bias[:, c], -NormalDist().inv_cdf(1 - rate))

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
            o, new = self._ring(x, rotary, mask, cu_seqlens, state)
        return self.o_proj(o).to(x.dtype), new if keep_state else None

    def _paper(self, x, mask, cu_seqlens, state: GSAState | None) -> tuple[torch.Tensor, GSAState]:
        q, k, v = (F.silu(t) for t in self.project(x, None))
        gate = self._soft_gates(x, mask)
        o, state = gsa(q, k, v, gate, scale=1.0, state=state, cu_seqlens=cu_seqlens)
        wide, weight = F.silu(o.flatten(2).to(_wide(x))), self.g_norm.weight
        return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), NORM_EPS).to(o.dtype), state

    def _ring(self, x, rotary, mask, cu_seqlens, state: RingState | None) -> tuple[torch.Tensor, RingState]:
        q, k, v = self.project(x, rotary)
        seen = None if state is None else state.seen
        index = token_index(mask, cu_seqlens, seen, (x.shape[0], x.shape[1]), x.device)
        real = torch.ones_like(index, dtype=torch.bool) if mask is None else mask.bool()
        write, bias, written = self._writes(x, index, real, state, cu_seqlens)
        slots = None
        if state is not None:
            slots = SlotState(state.k, state.v, torch.where(state.filled, 0.0, -torch.inf))
        o, slots = slot_attention(
            q,
            k,
            v,
            write,
            bias,
            num_slots=self.options.num_slots,
            scale=self.scale,
            state=slots,
            cu_seqlens=cu_seqlens,
        )
        filled = slots.bias > -torch.inf
        if cu_seqlens is not None:
            now = cu_seqlens.diff()
        else:
            now = real.sum(1).expand(len(x)) + (0 if seen is None else seen)
        return o.flatten(2), RingState(slots.k, slots.v, filled, now, written)

    def _soft_gates(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[B, T, H, M]; the sigmoid in float32, where half-lives over 300 tokens still exist."""
        logit = self.f_proj(x.to(self.f_proj.weight.dtype)).unflatten(
            -1, (self.shape.num_kv_heads, self.options.num_slots)
        )
        gate = F.logsigmoid(logit.to(_wide(x))) / DAMPING
        return gate if mask is None else gate.masked_fill(~mask.bool()[:, :, None, None], 0.0)

    def _writes(
        self,
        x: torch.Tensor,
        index: torch.Tensor,
        real: torch.Tensor,
        state: RingState | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """write, bias [B, T, H, 1] and tokens written to each ring [N, H, rings]; index as of token_index."""
        opt, (B, T, _), H = self.options, x.shape, self.shape.num_kv_heads
        free = (real & (index >= opt.sinks)).expand(B, T).unsqueeze(-1)  # tokens that go to a ring
        bias, ring = None, torch.zeros(B, T, H, dtype=torch.int64, device=x.device)
        if opt.memory_slots:
            score = self.importance(x)
            ring = (score >= 0).sum(-1)
            bias = _straight_through(score, ring, free).unsqueeze(-1)
        mine = F.one_hot(ring, len(opt.rings)) * free.unsqueeze(-1)  # [B, T, H, rings]
        total = F.pad(mine.cumsum(1), (0, 0, 0, 0, 1, 0))  # before token t, at t
        if cu_seqlens is not None:
            start = (torch.arange(T, device=x.device) - index[0]).clamp_min(0)
            before = total[:, :-1] - total[:, start]
            written = total[0, cu_seqlens[1:]] - total[0, cu_seqlens[:-1]]
        else:
            earlier = 0 if state is None else state.written.unsqueeze(1)
            before, written = total[:, :-1] + earlier, (total + earlier)[:, -1]
        size = torch.tensor(opt.rings, device=x.device)
        first = opt.sinks + size.cumsum(0) - size
        turn = before.gather(-1, ring.unsqueeze(-1)).squeeze(-1) % size[ring]
        slot = torch.where(free, first[ring] + turn, index.unsqueeze(-1))
        return torch.where(real.unsqueeze(-1), slot, -1).unsqueeze(-1), bias, written

    @torch.no_grad()
    def fit(self, batches: Iterable[tuple[torch.Tensor, Rotary]]) -> dict[str, float]:
        """Fit importance: ridge regression on x of the log attention that a token gets `ring` later or more.

        The thresholds are then set so that about memory_rates of the calibration tokens reach them. In
        float64; the same text gives the same bits. Returns the tokens, the share of variance explained and
        the share in any memory (means over heads); {} if there is no memory.
        """
        if not self.options.memory_slots:
            return {}
        sums = _Moments()
        for x, rotary in batches:
            target, usable = self._far_attention(x, rotary)
            sums.add(x[:, usable].flatten(0, 1).double(), target[:, usable].flatten(0, 1).double())
        weight, explained = sums.ridge()
        self.importance.weight.copy_(weight.T)
        self.importance.bias.zero_()
        scores = torch.cat(
            [self.importance(x)[:, self.options.sinks :, :, 0].flatten(0, 1) for x, _ in batches]
        )
        top = scores.sort(0, descending=True).values
        for c, share in enumerate(self.options.memory_rates):
            count = max(1, round(share * len(scores)))
            for h, ranked in enumerate(top.unbind(1)):
                self.importance.bias[h, c] = -_threshold(ranked, count)
        rate = (scores + self.importance.bias[:, 0] >= 0).double().mean().item()
        return {"tokens": float(len(scores)), "explained": explained, "important": rate}

    def _far_attention(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """log mean attention [B, T, H] a token gets `ring` later or more, and who has enough later [T]."""
        opt, T = self.options, x.shape[1]
        q, k, _ = (t.to(_wide(x)) for t in self.project(x, rotary))
        q = q.unflatten(2, (self.shape.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, H, G, T, D]
        k = k.permute(0, 2, 3, 1).unsqueeze(2)  # [B, H, 1, D, T]
        j, received = torch.arange(T, device=x.device), 0.0
        for i in j.split(QUERY_BLOCK):
            logit = (q[..., i, :] @ k) * self.scale
            p = logit.masked_fill(i[:, None] < j, -torch.inf).softmax(-1)
            received = received + (p.sum(2) * (i[:, None] - j >= opt.ring)).sum(-2)
        later = (T - opt.ring - j).clamp_min(0)
        usable = (later >= max(1, min(FAR_QUERIES, (T - opt.ring) // 4))) & (j >= opt.sinks)
        if not usable.any():
            raise ValueError(
                f"calibration rows have {T} tokens, too few to see past mixer.sinks {opt.sinks} and a ring "
                f"of {opt.ring}; use rows of {2 * (opt.ring + opt.sinks) + FAR_QUERIES} or more"
            )
        return (received / later.clamp_min(1) + 1e-6).log().transpose(1, 2), usable


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


def _threshold(ranked: torch.Tensor, count: int) -> torch.Tensor:
    """A threshold that about `count` of the falling scores [N] reach, as far from any of them as can be.

    In the first layer a score depends on the token alone, so many are equal but for rounding: a threshold
    among them would leave the ring of a common token to the last bit of a matmul.
    """
    if len(ranked) < 2:
        return ranked[0]
    gap, rank = -ranked.diff(), torch.arange(1, len(ranked), device=ranked.device)
    best = torch.where((rank - count).abs() <= count * NEAR_COUNT, gap, -1.0).argmax()
    clear = gap > LEAST_GAP * ranked.std()
    if not clear[best] and clear.any():
        best = torch.where(clear, (rank - count).abs(), len(ranked)).argmin()
    return (ranked[best] + ranked[best + 1]) / 2


def _straight_through(score: torch.Tensor, ring: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """Biases [B, T, H] of the tokens' copies: all 0, with slopes for score [B, T, H, thresholds].

    With w = sigmoid(score) of the threshold that put it there, a token in a memory has the slope of log w: it
    learns from every read while it is there. A token passed over has that of w at the first threshold, as
    log(1 + w) has at the hard w = 0: it learns for as long as it lives.
    """
    held = score.gather(-1, (ring - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1)
    soft = torch.where(ring > 0, F.logsigmoid(held), held.sigmoid())
    return torch.where(free, soft - soft.detach(), 0.0)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
