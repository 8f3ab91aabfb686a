"""PolySketch attention in the place of a teacher's softmax attention: options, parameters, start, forward.

The teacher's q, k, v, o, rotary positions and scale stay. Far weights are

    (offset + sharpness scale q . (k - key_mean)) ** degree    sketched by    (phi_q . phi_k) ** 2

Softmax does not change when all keys of a head move by a constant, a power does: key_mean takes out what all
far keys share. With local="softmax" near keys keep exp(scale q . k), so the shift comes back as the factor
exp(far_scale + scale q . far_query) on far weights, which starts at far_query = key_mean. With local="power"
all weights of a row shift alike and no factor is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from unsoftmax.kernels.mixer import AttentionShape, Mixer, MixerOptions, Owned, Rotary, packed
from unsoftmax.kernels.polysketch.chunked import PolySketchState, polysketch
from unsoftmax.kernels.polysketch.fit import fit
from unsoftmax.kernels.polysketch.sketch import (
    DEGREES,
    SKETCHES,
    ExactSketch,
    LearnedSketch,
    RandomSketch,
    append,
    num_features,
)

try:
    from unsoftmax.kernels.polysketch.triton_sketch import sketch_triton
    from unsoftmax.kernels.polysketch.triton_step import own
except ImportError:  # no triton
    sketch_triton = own = None


@dataclasses.dataclass(frozen=True)
class PolySketchOptions(MixerOptions):
    """The recipe's keys for mixer.name: polysketch. None means: what the chosen `local` wants."""

    degree: int = 4
    """Power p of the scores: 2, 4 or 8."""
    sketch: str = "learned"
    """learned | gaussian | hadamard | exact: the power itself, degree 2 only (4 has millions of features)."""
    sketch_size: int = 32
    """Coordinates of a sketch; the state has about half their square times head_dim a key/value head."""
    local: str = "softmax"
    """Weights of near keys: softmax (a conversion starts near its teacher) | power (as published)."""
    block: int | None = None
    """Tokens a block; near keys turn into far ones a block at a time. None: 32 for softmax, 256 for power."""
    window: int | None = None
    """Most tokens that are near, a multiple of block. None: 64 for softmax, one block for power."""
    sinks: int | None = None
    """First tokens of a document that are near for good. None: 4 for softmax, 0 for power."""
    normaliser: float = 0.0
    """Constant added to the sum of a row's weights. 0 averages exactly; 1 is the published layer."""

    def __post_init__(self) -> None:
        _one_of("sketch", self.sketch, SKETCHES)
        _one_of("degree", self.degree, DEGREES)
        _one_of("local", self.local, ("softmax", "power"))
        soft = self.local == "softmax"
        block = (32 if soft else 256) if self.block is None else self.block
        window = (2 * block if soft else block) if self.window is None else self.window
        sinks = (4 if soft else 0) if self.sinks is None else self.sinks
        for name, value in (("block", block), ("window", window), ("sinks", sinks)):
            object.__setattr__(self, name, value)  # so that a saved config says what was meant
        for name, least in (("sketch_size", 1), ("block", 1), ("sinks", 0), ("normaliser", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"mixer.{name} is {getattr(self, name)}; it must be at least {least}")
        if window < block or window % block:
            nearest = max(1, round(window / block)) * block
            raise ValueError(
                f"mixer.window is {window}; it must be a multiple of mixer.block {block}, such as {nearest}"
            )
        if self.sketch == "exact" and self.degree != 2:
            raise ValueError(
                f"mixer.degree is {self.degree}, too high for mixer.sketch exact: its state would have "
                "millions of features a head; use mixer.degree 2 or mixer.sketch learned (or "
                "mixer.local power and a mixer.block as long as the context: exact, in quadratic time)"
            )

    def state_numbers(self, shape: AttentionShape) -> int:
        D = shape.head_dim
        r = D + 1 if self.sketch == "exact" else self.sketch_size
        near = (self.window or 0) * (2 * D + r + 1) + (self.sinks or 0) * 2 * D
        return shape.num_kv_heads * (num_features(r) * (D + 1) + near)


def _one_of(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        listed = ", ".join(map(str, choices))
        raise ValueError(f"mixer.{name} is {value!r}; it must be one of {listed}")


class Power(nn.Module):
    """What the scores of each head are raised to a power with; a module, so that adapters can name it."""

    def __init__(self, shape: AttentionShape, far: bool) -> None:
        super().__init__()
        HQ, H, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.offset, self.sharpness = nn.Parameter(torch.empty(HQ)), nn.Parameter(torch.empty(HQ))
        self.key_mean = nn.Parameter(torch.empty(H, D))
        if far:
            self.far_scale, self.far_query = nn.Parameter(torch.empty(HQ)), nn.Parameter(torch.empty(HQ, D))


class PolySketchAttention(Mixer):
    """Exact attention to near keys and sinks, squared sketches of polynomial attention to all others.

    New parameters, and buffers, which are not trained:
        power.offset, power.sharpness [HQ]   the power's (sharpness s + offset); start 1 and 1 / degree
        power.key_mean [H, D]                what is taken off keys before the power; start 0
        power.far_scale [HQ], power.far_query [HQ, D]    log of the factor on far weights; start 0;
            local="softmax" only
        sketch.query, sketch.key [H, degree / 2, D + 1, r]    the learned sketch; starts as the largest
            terms of the power over single coordinates, low frequencies first; `fit` finds directions
        sketch.leaf, sketch.inner    buffers, a random sketch; drawn at the start
    """

    Options: ClassVar[type[MixerOptions]] = PolySketchOptions
    options: PolySketchOptions

    def __init__(self, shape: AttentionShape, options: PolySketchOptions) -> None:
        super().__init__(shape, options)
        H, D = shape.num_kv_heads, shape.head_dim
        self.power = Power(shape, far=options.local == "softmax")
        if options.sketch == "learned":
            self.sketch = LearnedSketch(options.degree, D + 1, options.sketch_size, H)
        elif options.sketch == "exact":
            self.sketch = ExactSketch()
        else:
            self.sketch = RandomSketch(options.sketch, options.degree, D + 1, options.sketch_size)
        if self.has_storage():  # a model about to be loaded is built without
            self.reset_new_parameters()

    @torch.no_grad()
    def reset_new_parameters(self) -> None:
        """The starts that the class docstring lists. Random sketches come from torch's global generator."""
        self.power.offset.fill_(1.0)
        self.power.sharpness.fill_(1.0 / self.options.degree)
        self.power.key_mean.zero_()
        if self.options.local == "softmax":
            self.power.far_scale.zero_()
            self.power.far_query.zero_()
        if isinstance(self.sketch, RandomSketch):
            self.sketch.reset()
        elif isinstance(self.sketch, LearnedSketch):
            D, H = self.shape.head_dim, self.shape.num_kv_heads
            slow_first = torch.arange(D).view(2, -1).flip(1).T.flatten()
            axes = torch.eye(D)[:, slow_first].expand(H, D, D)
            self.sketch.start(axes, axes, torch.full((H, D), 1.0 / self.options.degree))

    def fit(self, batches: Iterable[tuple[torch.Tensor, Rotary]]) -> dict[str, float]:
        """Key means, sharpness, the learned sketch and far weights from calibration text; see fit.py."""
        return fit(self, batches)

    def own(self, state: PolySketchState) -> PolySketchState | None:
        """See Mixer.own."""
        if own is None:
            return None
        rest = (x.clone(memory_format=torch.contiguous_format) for x in state[1:])
        return PolySketchState(own(state.S), *rest)

    def forward(
        self,
        x: torch.Tensor,
        *,
        rotary: Rotary,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        state: PolySketchState | Owned | None = None,
        keep_state: bool = False,
    ) -> tuple[torch.Tensor, PolySketchState | None]:
        """See Mixer.forward. Blocks are counted over real tokens: padding moves to the end of its row."""
        order = lengths = in_place = None
        if isinstance(state, Owned):
            state, in_place = state
        if cu_seqlens is not None:
            cu_seqlens = packed(cu_seqlens, x.shape[1], x.device)
        if mask is not None:
            lengths, order = mask.sum(1), (~mask).to(torch.uint8).argsort(dim=1, stable=True)
            x = _reorder(x.masked_fill(~mask.unsqueeze(-1), 0), order)
            rotary = Rotary(*(_reorder(r.expand(len(x), -1, -1), order) for r in rotary))
        q, k, v = self.project(x, rotary)
        with torch.autocast(x.device.type, enabled=False):
            o, state = self._attend(q, k, v, state, cu_seqlens, lengths, keep_state, in_place)
        y = self.o_proj(o.flatten(2).to(x.dtype)).to(x.dtype)
        if order is not None:
            y = _reorder(y, order.argsort(dim=1))
        return y, state

    def sketches(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """phi_q [B, T, HQ, r] and phi_k [B, T, H, r] of q and k with rotary positions, in q's dtype."""
        power = self.power
        sharpness, offset, mean = (p.to(q.dtype) for p in (power.sharpness, power.offset, power.key_mean))
        q = append(q * (self.scale * sharpness)[:, None], offset)
        return self.sketch(q, append(k - mean, 1.0))

    def far_factor(self, q: torch.Tensor) -> torch.Tensor:
        """Log of the factor on far weights, [B, T, HQ]; local="softmax" only."""
        return self.power.far_scale.to(q.dtype) + self.scale * (q * self.power.far_query.to(q.dtype)).sum(-1)

    def _attend(self, q, k, v, state, cu_seqlens, lengths, keep_state, in_place):
        if q.is_cuda and v.dtype == torch.bfloat16:
            tensors, special = self._narrow(q.to(v.dtype), k.to(v.dtype))
        else:
            tensors, special = self._wide(q, k)
        (q, k), phi = tensors[:2], tensors[2:]
        chosen = self.options
        return polysketch(
            q,
            k,
            v.to(q.dtype),
            *phi,
            degree=chosen.degree,
            block=chosen.block,
            local=chosen.local,
            window=chosen.window,
            sinks=chosen.sinks,
            normaliser=chosen.normaliser,
            state=state,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            keep_state=keep_state,
            in_place=in_place,
            **special,
        )

    def _wide(self, q, k):
        """q, k, their sketches and what `local` adds, in float32 at least."""
        power = self.power
        wide_q, wide_k = (t if t.dtype == torch.float64 else t.float() for t in (q, k))
        phi_q, phi_k = self.sketches(wide_q, wide_k)
        if self.options.local == "softmax":
            special = {"far_scale": self.far_factor(wide_q)}
            wide_q = wide_q * self.scale
        else:
            special = {"offset": power.offset}
            wide_q = wide_q * (self.scale * power.sharpness.to(wide_q.dtype))[:, None]
            wide_k = wide_k - power.key_mean.to(wide_k.dtype)
        return (wide_q, wide_k, phi_q, phi_k), special

    def _narrow(self, q, k):
        """The same in bfloat16 on a GPU. The scale goes on k, which is smaller."""
        power, soft = self.power, self.options.local == "softmax"
        tilt = self.scale * power.far_query if soft else None
        small = self.options.degree <= 4 and self.options.sketch_size <= 64
        if self.options.sketch == "learned" and small and sketch_triton:
            sketch = self.sketch
            phi_q, lift = sketch_triton(
                q, sketch.query, factor=self.scale * power.sharpness, last=power.offset, tilt=tilt
            )
            phi = phi_q, sketch_triton(k, sketch.key, factor=None, last=None, mean=power.key_mean)[0]
        else:
            phi, lift = self.sketches(q, k), (q.float() * tilt).sum(-1) if soft else None
        if soft:
            return (q, k * self.scale, *phi), {"far_scale": power.far_scale + lift}
        q = q * power.sharpness.to(q.dtype)[:, None]
        k = (k - power.key_mean.to(k.dtype)) * self.scale
        return (q, k, *phi), {"offset": power.offset}


def _reorder(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Tokens of x [B, T, size] in the order given, [B, T]."""
    return x.gather(1, order.unsqueeze(-1).expand_as(x))
