"""A Llama or a Mistral whose layers have mixers; the only file that knows the library's calling convention.

Every layer keeps the source's norms and MLP. A layer named "softmax" keeps the source's attention module
too, any other has a Mixer in its place, under the same parameter names. Importing this file registers the
classes with AutoConfig, AutoModel and AutoModelForCausalLM.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.mistral.modeling_mistral import (
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralPreTrainedModel,
    MistralRMSNorm,
    MistralRotaryEmbedding,
)
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from unsoftmax.convert.cache import StateCache
from unsoftmax.convert.config import (
    CONVERTED_CONFIGS,
    UnsoftLlamaConfig,
    UnsoftMistralConfig,
    attention_shape,
    mixer_options,
)
from unsoftmax.convert.remote_code import write_remote_code
from unsoftmax.kernels.mixer import Mixer, Rotary, packed, token_index
from unsoftmax.kernels.registry import MIXERS

# transformers renamed this argument and output field from past_key_values to cache between 5.17 and 5.24.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
PASSED_ON = frozenset(TransformersKwargs.__annotations__) | {"cache_position", "return_dict"}


class ConvertedRotary(nn.Module):
    """Mixin of the rotary tables: they stay float32 when the model is cast to another dtype."""

    def _apply(self, fn, recurse: bool = True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, table in before.items():
            after = self._buffers[name]
            if table is not None and after is not None and after.dtype != table.dtype:
                self._buffers[name] = table.to(after.device)
        return self


class ConvertedLayer(nn.Module):
    """Mixin of the decoder layers: the source's layer, with the mixer that the config names for it."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        entry = config.layer_mixers[layer_idx]
        options = mixer_options(entry, f"layer_mixers[{layer_idx}]")
        if options is not None:
            self.self_attn = MIXERS[entry["name"]](attention_shape(config), options)
            for new in self.self_attn.new_tensors().values():
                if new.is_floating_point():
                    new.data = new.data.float()  # and loads so: in bfloat16 gates lose every long half-life

    def _apply(self, fn, recurse: bool = True):
        """What the mixer adds never gets narrower than float32, whatever the model is cast to."""
        if not isinstance(self.self_attn, Mixer):
            return super()._apply(fn, recurse)
        before = {
            name: (x.data, x.grad)
            for name, x in self.self_attn.new_tensors().items()
            if x.is_floating_point()
        }
        super()._apply(fn, recurse)
        for name, x in self.self_attn.new_tensors().items():
            if name in before and x.dtype.itemsize < torch.float32.itemsize:
                value, gradient = before[name]
                x.grad = None  # or its dtype would have to be that of x, which changes here
                x.data = value.to(x.device, torch.float32)
                x.grad = None if gradient is None else gradient.to(x.device, torch.float32)
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """attention_mask is what softmax needs, token_mask [B, T] and cu_seqlens what mixers need."""
        y = self.mix(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            token_mask=token_mask,
            cu_seqlens=cu_seqlens,
            cache=past_key_values if cache is None else cache,
            **kwargs,
        )
        return self.after_mixing(hidden_states, y)

    def mix(
        self,
        x: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: StateCache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What attention makes of its normed input x [B, T, hidden], before it joins the residual stream."""
        if isinstance(self.self_attn, Mixer):
            kept: Any = None if cache is None else cache.layers[self.layer_idx]
            y, state = self.self_attn(
                x,
                rotary=Rotary(*position_embeddings),
                mask=token_mask,
                cu_seqlens=cu_seqlens,
                state=None if kept is None else kept.state,
                keep_state=kept is not None,
            )
            if kept is not None:
                kept.store(state, x.shape[1])
        else:
            y, _ = self.self_attn(
                hidden_states=x,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **{CACHE: cache},
                **kwargs,
            )
        return y

    def after_mixing(self, hidden_states: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The residual stream after the layer, from that before it and the attention's y."""
        hidden_states = hidden_states + y
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class ConvertedWeights(PreTrainedModel):
    """Mixin in front of every converted model class: starts what a checkpoint lacks, and only that."""

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, Mixer):
            super()._init_weights(module)
            return
        new = module.new_tensors()
        loaded = {
            name: x.detach().clone() for name, x in new.items() if getattr(x, "_is_hf_initialized", False)
        }
        if len(loaded) == len(new) or any(x.is_meta for x in new.values()):
            return
        module.reset_new_parameters()
        for name, value in loaded.items():
            new[name].data.copy_(value)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # the library's shortcut for code outside it passes over a module whose parameters sit in children
        super()._initialize_weights(module, False)


class ConvertedModel(ConvertedWeights):
    """Mixin of the two inner models: embeddings, layers, last norm."""

    layer_class: type[nn.Module]
    norm_class: type[nn.Module]
    rotary_class: type[nn.Module]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = self.rotary_class(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: StateCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: StateCache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, hidden] of tokens input_ids [B, T], or of inputs_embeds [B, T, hidden].

        Args:
            attention_mask: [B, T] or [B, earlier tokens + T], 0 at padding, which may be anywhere.
            position_ids: [B or 1, T]. Left out, they count the real tokens of each row, or of each document,
                on from where the cache stands. Given for one row without cache or mask, a position that
                does not follow the one before starts a document.
            cache, past_key_values: one thing under its two names.
            cu_seqlens: [N + 1], documents packed in one row (B = 1); excludes cache and attention_mask.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        _refuse_unknown(kwargs)
        cache = past_key_values if cache is None else cache
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cu_seqlens = kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
        if cu_seqlens is None and cache is None and attention_mask is None and position_ids is not None:
            cu_seqlens = _documents(position_ids, x.shape[1])
        if cu_seqlens is not None:
            _check_packed(x, attention_mask, cache)
            cu_seqlens = packed(cu_seqlens, x.shape[1], x.device)
            use_cache = False
        if use_cache and cache is None:
            cache = StateCache(self.config)
        if cache is not None and not isinstance(cache, StateCache):
            raise ValueError(
                f"the cache is a {type(cache).__name__}; a converted model needs a StateCache(config)"
            )

        past = 0 if cache is None else cache.get_seq_length()
        mask = _mask_of_step(attention_mask, past, x)
        if position_ids is None:
            position_ids = self._positions(x, mask, cu_seqlens, cache, past)
        if cache is not None:
            cache.count(mask, (x.shape[0], x.shape[1]), x.device)
        given = self._given(x, mask, cu_seqlens, position_ids, cache)
        for layer in self.layers:
            x = layer(x, use_cache=use_cache, **{CACHE: cache}, **given, **kwargs)
        kept: dict[str, Any] = {CACHE: cache if use_cache else None}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **kept)

    def attention_calls(
        self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        """Each layer's attention over tokens input_ids [B, T], as the model runs, one layer after another.

        cu_seqlens: as in forward. Gives the normed input x and the output y, both [B, T, hidden], and what
        another model's layer.mix(x, **what) needs for the same call, with rotary factors in float32.
        """
        x = self.embed_tokens(input_ids)
        if cu_seqlens is not None:
            _check_packed(x, None, None)
            cu_seqlens = packed(cu_seqlens, x.shape[1], x.device)
        position_ids = self._positions(x, None, cu_seqlens, None, 0)
        given = self._given(x, None, cu_seqlens, position_ids, None)
        wide = {**given, "position_embeddings": self.rotary_emb(x.float(), position_ids=position_ids)}
        for layer in self._layers():
            normed = layer.input_layernorm(x)
            y = layer.mix(normed, **given)
            yield normed, y, wide
            x = layer.after_mixing(x, y)

    def _layers(self) -> Iterator[ConvertedLayer]:
        for layer in self.layers:
            assert isinstance(layer, ConvertedLayer)
            yield layer

    def _given(self, x, mask, cu_seqlens, position_ids, cache) -> dict[str, Any]:
        """What every layer is called with beside its input and the cache."""
        kept = self.config.softmax_layers
        return {
            "position_embeddings": self.rotary_emb(x, position_ids=position_ids),
            "attention_mask": self._softmax_mask(x, mask, cu_seqlens, position_ids, cache) if kept else None,
            "token_mask": mask,
            "cu_seqlens": cu_seqlens,
            "position_ids": position_ids,
        }

    def _positions(self, x, mask, cu_seqlens, cache, past: int) -> torch.Tensor:
        if mask is None and cu_seqlens is None and (cache is None or cache.seen is None):
            return (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)
        seen = None if cache is None else cache.seen
        if seen is None and past:
            seen = torch.full((x.shape[0],), past, device=x.device)
        return token_index(mask, cu_seqlens, seen, x.shape[:2], x.device).clamp_min(0)

    def _softmax_mask(self, x, mask, cu_seqlens, position_ids, cache) -> torch.Tensor | None:
        """The library's mask for layers that keep softmax: causal, sliding window, padding, documents."""
        if cu_seqlens is not None:
            # the library finds documents where positions start anew
            position_ids = token_index(None, cu_seqlens, None, x.shape[:2], x.device)
        elif cache is not None:
            mask = cache.real
        window = getattr(self.config, "sliding_window", None)
        create = create_causal_mask if window is None else create_sliding_window_causal_mask
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": position_ids, CACHE: cache}
        if window is not None and mask is not None:  # the library's window counts padding, so it is widened
            index = mask.cumsum(1)
            given["or_mask_function"] = lambda b, head, q, k: (k <= q) & (index[b, q] - index[b, k] < window)
        return create(config=self.config, inputs_embeds=x, **given)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    unknown = set(kwargs) - PASSED_ON
    if unknown:
        raise TypeError(f"forward() got an argument it does not know: {', '.join(sorted(unknown))}")


def _documents(position_ids: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """cu_seqlens of the documents that given positions tell of; None if they tell of one."""
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not starts.any():
        return None
    if position_ids.shape[0] != 1:
        raise ValueError("position_ids start anew inside a row; packed documents need one row (B = 1)")
    inner = starts[0].nonzero().squeeze(1) + 1
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), tokens)])


def _check_packed(x: torch.Tensor, attention_mask, cache) -> None:
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs one row; the batch has {x.shape[0]}")
    if attention_mask is not None or cache is not None:
        raise ValueError("cu_seqlens excludes attention_mask and cache")


def _mask_of_step(attention_mask: torch.Tensor | None, past: int, x: torch.Tensor) -> torch.Tensor | None:
    """Which of the tokens at hand are real, [B, T] bool; None if all are."""
    if attention_mask is None:
        return None
    B, T = x.shape[:2]
    if (
        attention_mask.dim() != 2
        or attention_mask.shape[0] != B
        or attention_mask.shape[1] not in (T, past + T)
    ):
        wanted = f"[{B}, {T}]" if past == 0 else f"[{B}, {T}] or [{B}, {past + T}]"
        raise ValueError(f"attention_mask is {list(attention_mask.shape)}; it must be {wanted}")
    mask = attention_mask[:, -T:].to(device=x.device, dtype=torch.bool)
    return None if mask.all() else mask


class ConvertedForCausalLM(ConvertedWeights):
    """Mixin of the two language models."""

    model_class: type[ConvertedModel]
    pretrained_class: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        self.pretrained_class.__init__(
            self, config
        )  # not the source class's, which would build its own layers
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: StateCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: StateCache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, kept, vocab], and the mean loss where labels [B, T] are given (-100: not counted).

        logits_to_keep: the last so many positions, 0 for all; or the indices of positions. The rest: see the
        inner model's forward. In training mode no cache is kept unless use_cache asks for one.
        """
        if use_cache is None and self.training:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            cache=past_key_values if cache is None else cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode: GenerationMode, *sizes: int
    ) -> None:
        """Put a StateCache where generate looks for its cache; the library's own kinds hold no states."""
        if self.config.softmax_layers != list(range(self.config.num_hidden_layers)):
            if generation_mode == GenerationMode.ASSISTED_GENERATION:
                raise ValueError(
                    "assistant_model and prompt_lookup_num_tokens need a cache that can be cropped; "
                    "a mixer's state cannot. Leave them out"
                )
            if generation_config.cache_implementation not in (None, "dynamic", "hybrid"):
                raise ValueError(
                    f"cache_implementation is {generation_config.cache_implementation!r}; a converted model "
                    f"has its own cache. Leave it out"
                )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE] = StateCache(self.config)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """As the library's, plus the code that a machine without this package needs to open the folder."""
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            write_remote_code(save_directory)


class UnsoftLlamaRotaryEmbedding(ConvertedRotary, LlamaRotaryEmbedding):
    """Llama's rotary tables, always float32."""


class UnsoftLlamaDecoderLayer(ConvertedLayer, LlamaDecoderLayer):
    """Llama's decoder layer with a mixer."""


class UnsoftLlamaModel(ConvertedModel, LlamaPreTrainedModel):
    """A converted Llama without its head."""

    config_class = UnsoftLlamaConfig
    layer_class, norm_class = UnsoftLlamaDecoderLayer, LlamaRMSNorm
    rotary_class = UnsoftLlamaRotaryEmbedding
    _no_split_modules = ["UnsoftLlamaDecoderLayer"]  # noqa: RUF012


class UnsoftLlamaForCausalLM(ConvertedForCausalLM, LlamaForCausalLM):
    """A converted Llama."""

    config_class = UnsoftLlamaConfig
    model_class, pretrained_class = UnsoftLlamaModel, LlamaPreTrainedModel
    _no_split_modules = ["UnsoftLlamaDecoderLayer"]  # noqa: RUF012


class UnsoftMistralRotaryEmbedding(ConvertedRotary, MistralRotaryEmbedding):
    """Mistral's rotary tables, always float32."""


class UnsoftMistralDecoderLayer(ConvertedLayer, MistralDecoderLayer):
    """Mistral's decoder layer with a mixer."""


class UnsoftMistralModel(ConvertedModel, MistralPreTrainedModel):
    """A converted Mistral without its head."""

    config_class = UnsoftMistralConfig
    layer_class, norm_class = UnsoftMistralDecoderLayer, MistralRMSNorm
    rotary_class = UnsoftMistralRotaryEmbedding
    _no_split_modules = ["UnsoftMistralDecoderLayer"]  # noqa: RUF012


class UnsoftMistralForCausalLM(ConvertedForCausalLM, MistralForCausalLM):
    """A converted Mistral."""

    config_class = UnsoftMistralConfig
    model_class, pretrained_class = UnsoftMistralModel, MistralPreTrainedModel
    _no_split_modules = ["UnsoftMistralDecoderLayer"]  # noqa: RUF012


CONVERTED_MODELS: dict[str, type[ConvertedForCausalLM]] = {
    "llama": UnsoftLlamaForCausalLM,
    "mistral": UnsoftMistralForCausalLM,
}

for _family, _config in CONVERTED_CONFIGS.items():
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, CONVERTED_MODELS[_family].model_class, exist_ok=True)
    AutoModelForCausalLM.register(_config, CONVERTED_MODELS[_family], exist_ok=True)
