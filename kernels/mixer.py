"""What a mixer is: the shape legend, the contract every mixer keeps, and the laws it is tested by.

Shapes  B batch · T tokens · HQ query heads · H key/value heads · D head size of q and k · E of v
        M slots · r sketch size · N documents packed in one row.
        Tensors are [B, T, heads, size]. Query head h reads key/value head h // (HQ // H).
        Packed documents: B = 1 and cu_seqlens [N + 1], int, from 0 to T, not decreasing.

Laws    1. Chunked and Triton forms equal the reference in float64, output and every gradient.
        2. A later token changes no earlier output, bit for bit, forward and backward.
        3. Prefill in any pieces, then one token at a time, equals the whole at once; a state given
           in is never changed in place.
        4. A document start forgets everything before it; padding anywhere leaves no trace.
        5. The state dict keeps the source's names and shapes; everything else is declared new.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

SOURCE_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The geometry of one attention layer, as the source checkpoint has it.

    `scale` multiplies q k before the softmax; None means head_dim ** -0.5.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}; {self.num_heads // self.num_kv_heads * self.num_kv_heads} would be"
            )


class Rotary(NamedTuple):
    """Rotary factors of the tokens at hand: cos and sin, [B or 1, T, D], the two halves alike."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Apply rotary positions to x [B, T, heads, D], pairs (i, i + D/2), as Llama and Mistral do."""
    cos, sin = rotary.cos.unsqueeze(2), rotary.sin.unsqueeze(2)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def packed(cu_seqlens: torch.Tensor, tokens: int, device: torch.device) -> torch.Tensor:
    """cu_seqlens [N + 1], int32 or int64, as int64 on the device of a row of so many tokens.

    Raises ValueError unless it runs from 0 to `tokens` without decreasing. The values of a tensor are looked
    at once, so that on a GPU only the first of many layers waits for them.
    """
    key = (tokens, 0 if cu_seqlens.is_inference() else cu_seqlens._version)
    if not torch.compiler.is_compiling() and getattr(cu_seqlens, "_packs", None) != key:
        _check_documents(cu_seqlens, tokens)
    found = cu_seqlens.to(device, torch.int64)
    for seen in (cu_seqlens, found):
        seen._packs = (tokens, 0 if seen.is_inference() else seen._version)  # type: ignore[attr-defined]
    return found


def _check_documents(cu_seqlens: torch.Tensor, tokens: int) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype}; it must be torch.int64 or torch.int32")
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)}; it must be [documents + 1]")
    cuts = cu_seqlens.tolist()
    if cuts[0] != 0:
        raise ValueError(f"cu_seqlens begins with {cuts[0]}; it must begin with 0")
    for n, (a, b) in enumerate(itertools.pairwise(cuts)):
        if a > b:
            raise ValueError(f"cu_seqlens falls from {a} to {b} at entry {n + 1}; it must never decrease")
    if cuts[-1] != tokens:
        raise ValueError(f"cu_seqlens ends with {cuts[-1]}; it must end with {tokens}, the tokens of the row")


def token_index(
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seen: torch.Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """Index of each token in its document, [B, T] int64; padding repeats the index before it (-1 at first).

    mask [B, T] bool, True where real; seen [B] int64, real tokens that came in earlier calls.
    """
    B, T = shape
    if cu_seqlens is not None:
        t = torch.arange(T, device=device)
        start = cu_seqlens[torch.searchsorted(cu_seqlens[1:], t, right=True)]
        return (t - start).unsqueeze(0)
    real = torch.ones(B, T, dtype=torch.int64, device=device) if mask is None else mask.long()
    index = real.cumsum(1) - 1
    return index if seen is None else index + seen.unsqueeze(1)


@dataclasses.dataclass(frozen=True)
class MixerOptions:
    """Base of each mixer's options: a frozen dataclass whose fields are the recipe's keys under `mixer`.

    Subclasses check their values in __post_init__ and raise ValueError with the key as the user types it
    ("mixer.num_slots is 0; it must be ...").
    """

    def state_numbers(self, shape: AttentionShape) -> int:
        """Numbers of 4 bytes in the state of one sequence in one layer, by arithmetic alone.

        What a conversion is refused by, before anything so large is made. 0: nothing to refuse.
        """
        return 0


class Owned(NamedTuple):
    """A state from `Mixer.own` that `forward`, given one token a row, may change in place where real [B].

    It returns the same tensors, or a new state whose rows that are not real are nobody's.
    """

    state: Any
    real: torch.Tensor


class Mixer(nn.Module):
    """One attention layer: the source's four projections, and whatever the mixer adds to them.

    A subclass sets `Options`, adds its new parameters after `super().__init__`, and defines `forward`
    and `reset_new_parameters`; `fit` if it has a closed-form start. What is fitted or drawn but never trained
    is a persistent buffer, so that no optimizer and no weight decay can reach it.
    """

    Options: ClassVar[type[MixerOptions]] = MixerOptions

    def __init__(self, shape: AttentionShape, options: MixerOptions) -> None:
        super().__init__()
        self.shape, self.options = shape, options
        self.scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(q_width, shape.hidden_size, bias=shape.o_bias)

    def project(self, x: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, ...]:
        """q [B, T, HQ, D] and k, v [B, T, H, D] of x [B, T, hidden], q and k with rotary positions."""
        B, T, _ = x.shape
        q, k, v = (p(x).view(B, T, -1, self.shape.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        return (q, k, v) if rotary is None else (rotate(q, rotary), rotate(k, rotary), v)

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Name to parameter, for every parameter that the source checkpoint does not have."""
        return {n: p for n, p in self.named_parameters() if n.split(".")[0] not in SOURCE_PROJECTIONS}

    def new_tensors(self) -> dict[str, torch.Tensor]:
        """new_parameters, and the buffers that are saved: all that a checkpoint has beyond its source."""
        state = self.state_dict(keep_vars=True)
        return {n: t for n, t in state.items() if n.split(".")[0] not in SOURCE_PROJECTIONS}

    def has_storage(self) -> bool:
        """Whether new tensors can be written: not on the meta device, nor once ZeRO-3 has sharded them."""
        return all(t.numel() and not t.is_meta for t in self.new_tensors().values())

    def reset_new_parameters(self) -> None:
        """Give every new parameter and buffer its documented start, in place."""

    @property
    def fit_tokens(self) -> int:
        """The shortest calibration row that `fit` can do with."""
        return 1

    def fit(self, batches: Iterable[tuple[torch.Tensor, Rotary]]) -> dict[str, float]:
        """Set new parameters in closed form from calibration text; returns what a report should show.

        batches: (x [B, T, hidden], the layer's normed input in the teacher, and its rotary factors), whole
        rows without padding. The projections already hold the source's weights. May be iterated again.
        """
        return {}

    def own(self, state: Any) -> Any:
        """A copy of a state for `Owned`; None from a mixer that never changes one in place."""
        return None

    def forward(
        self,
        x: torch.Tensor,
        *,
        rotary: Rotary,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        state: Any = None,
        keep_state: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """Mix tokens.

        Args:
            x: [B, T, hidden].
            rotary: cos and sin of each token's position.
            mask: [B, T] bool, True where the token is real; None means all are. Masked tokens leave no trace
                in other outputs nor in the state; their own output is finite and means nothing.
            cu_seqlens: [N + 1], documents packed in one row (B = 1); excludes mask and state.
            state: what an earlier call returned; None starts empty. Never changed in place unless Owned,
                which only mixers with `own` take.
            keep_state: also return the state after the last token.

        Returns:
            y [B, T, hidden] in x's dtype, and the state: a NamedTuple of tensors whose dimension 0 is B
            (so that beams can index it), or None unless keep_state.
        """
        raise TypeError(f"{type(self).__name__} does not define forward")
