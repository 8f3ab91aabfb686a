"""What a converted model remembers between calls: a state a mixer, keys and values where softmax is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer


def map_state(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same (nested) NamedTuple with `change` applied to every tensor in it; anything else stays."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, tuple):
        return type(state)(*(map_state(part, change) for part in state))
    return state


class StateLayer(CacheLayerMixin):
    """One mixer's state, and how many tokens, padding included, went into it."""

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.tokens = 0

    def store(self, state: Any, tokens: int) -> None:
        """Replace the state by the one after `tokens` more tokens."""
        self.state = state
        self.tokens += tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise TypeError("a mixer's cache layer holds a state; it has no keys and values to initialise")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        raise TypeError("a mixer's cache layer holds a state; it takes no keys and values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.tokens = None, 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.state = map_state(self.state, lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = map_state(self.state, lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise ValueError(
                "a mixer's state cannot be cropped: it does not keep single tokens. Assisted decoding and "
                "prompt lookup need that; keep a copy of the cache (copy.deepcopy) to go back to"
            )

    def offload(self) -> None:
        """Stays where it is: a state is small."""

    def prefetch(self) -> None:
        """Stays where it is: a state is small."""


class WindowLayer(DynamicSlidingWindowLayer):
    """Keys and values that a sliding window still reaches: of its length in real tokens, padding between."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.reach = window - 1  # latest tokens, padding included, that a later token may still look at

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        assert self.keys is not None and self.values is not None
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        first = 0 if self.record_past else max(keys.shape[-2] - self.reach, 0)  # all, for crop to go back in
        self.keys, self.values = keys[:, :, first:], values[:, :, first:]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = 0 if self.keys is None else self.keys.shape[-2]
        return kept + query_length, self.cumulative_length - kept

    def reset(self) -> None:
        self.reach = self.sliding_window - 1
        super().reset()


class StateCache(Cache):
    """Cache of a converted model.

    `seen` [B] counts the real tokens of each row, None while no padding has come (then all tokens are real).
    `real` [B, tokens] says which tokens are, kept only where a softmax layer has to mask its keys by it.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.kept = frozenset(config.softmax_layers)
        self.count_of_layers = len(config.layer_mixers)
        self.window: int | None = getattr(config, "sliding_window", None)
        super().__init__(layers=self._empty_layers())
        self.seen: torch.Tensor | None = None
        self.real: torch.Tensor | None = None

    def _empty_layers(self) -> list[Any]:
        def empty(i: int) -> CacheLayerMixin:
            if i not in self.kept:
                return StateLayer()
            return DynamicLayer() if self.window is None else WindowLayer(self.window)

        return [empty(i) for i in range(self.count_of_layers)]

    def count(self, mask: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
        """Note which of the tokens [B, T] about to be mixed are real: mask [B, T] bool, None means all."""
        past = self.get_seq_length()
        if mask is None and self.seen is None:
            return
        mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
        seen = torch.full((shape[0],), past, device=device) if self.seen is None else self.seen
        self.seen = seen + mask.sum(1)
        if self.kept:
            real = mask.new_ones(shape[0], past) if self.real is None else self.real
            self.real = torch.cat([real, mask], dim=1)
            self._reach(self.real)

    def _reach(self, real: torch.Tensor) -> None:
        """Keep as many tokens as hold window - 1 real ones in every row, or all its real ones."""
        if self.window is None:
            return
        later = real.flip(1).cumsum(1).flip(1)  # real tokens from each place on
        wanted = real & (later < self.window)
        tokens = real.shape[1]
        first = torch.where(wanted, torch.arange(tokens, device=real.device), tokens).min()
        for i in self.kept:
            self.layers[i].reach = max(tokens - int(first), self.window - 1)

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.seen, self.real = map_state(self.seen, change), map_state(self.real, change)

    def reset(self) -> None:
        self.layers = self._empty_layers()  # the library's reset keeps a length of zeros in older versions
        self.seen = self.real = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._change_rows(lambda x: x[beam_idx.to(x.device)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._change_rows(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens (a negative number, as in the library); softmax only."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give how many tokens to remove as a negative number")
        for layer in self.layers:  # before any layer is changed
            if isinstance(layer, StateLayer):
                layer.crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.seen is not None and self.real is not None:
            self.seen = self.seen - self.real[:, tokens_to_remove:].sum(1)
            self.real = self.real[:, :tokens_to_remove]
