"""What a converted model is: the source's own configuration, and for every layer the mixer it now has."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from unsoftmax.kernels.mixer import AttentionShape, MixerOptions
from unsoftmax.kernels.registry import MIXERS

SOFTMAX = "softmax"
_Mixin = PreTrainedConfig if TYPE_CHECKING else object  # as a base it would undo Llama's own defaults
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

# Written into config.json by tools on the way; they change nothing about the forward pass.
HARMLESS_FIELDS = frozenset(
    {"_name_or_path", "architectures", "auto_map", "is_llama_config", "model_type", "pretraining_tp"}
    | {"torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version"}
)


def _nearest(name: object, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
    return f"did you mean {close[0]!r}? There are: {', '.join(known)}" if close else "there are none"


def mixer_options(entry: dict[str, Any], where: str = "mixer") -> MixerOptions | None:
    """Options of one layer's entry {"name": ..., option: value ...}; None for a layer that keeps softmax.

    Raises ValueError naming the entry (`where`), the key and the nearest right name.
    """
    if not isinstance(entry, dict) or "name" not in entry:
        raise ValueError(f'{where} is {entry!r}; it must be a mapping with a name, as {{"name": "softmax"}}')
    options = {key: value for key, value in entry.items() if key != "name"}
    name = entry["name"]
    if name == SOFTMAX:
        if options:
            raise ValueError(f"{where}.{next(iter(options))}: a layer that keeps softmax has no options")
        return None
    if name not in MIXERS:
        raise ValueError(f"{where}.name is {name!r}, which is no mixer; {_nearest(name, [*MIXERS, SOFTMAX])}")
    known = {field.name for field in dataclasses.fields(MIXERS[name].Options)}
    for key in options:
        if key not in known:
            raise ValueError(f"{where}.{key} is not an option of {name}; {_nearest(key, known)}")
    return MIXERS[name].Options(**options)


def complete_layer_mixers(layer_mixers: list[dict] | None, num_layers: int) -> list[dict]:
    """One checked entry a layer with every option spelt out; None means that all layers keep softmax."""
    if layer_mixers is None:
        return [{"name": SOFTMAX} for _ in range(num_layers)]
    if len(layer_mixers) != num_layers:
        raise ValueError(
            f"layer_mixers has {len(layer_mixers)} entries; the model has num_hidden_layers {num_layers}"
        )
    complete = []
    for i, entry in enumerate(layer_mixers):
        options = mixer_options(entry, f"layer_mixers[{i}]")
        known = {} if options is None else dataclasses.asdict(options)
        as_json = {key: list(value) if isinstance(value, tuple) else value for key, value in known.items()}
        complete.append({"name": entry["name"]} | as_json)
    return complete


def attention_shape(config: PreTrainedConfig) -> AttentionShape:
    """The geometry of a Llama's or Mistral's attention layers."""
    bias = bool(getattr(config, "attention_bias", False))  # Mistral has no such field
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        qkv_bias=bias,
        o_bias=bias,
    )


class ConvertedConfig(_Mixin):
    """Mixin of the converted families: checks `layer_mixers`, writes the rotary fields in both spellings."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.layer_mixers = complete_layer_mixers(self.layer_mixers, self.num_hidden_layers)

    @property
    def softmax_layers(self) -> list[int]:
        """Indices of the layers that keep the source's attention."""
        return [i for i, entry in enumerate(self.layer_mixers) if entry["name"] == SOFTMAX]

    def to_dict(self) -> dict[str, Any]:
        """The library's dictionary, plus rope_theta and rope_scaling, all that older readers know."""
        fields = super().to_dict()
        rope = dict(fields.get("rope_parameters") or {})
        if rope:
            fields["rope_theta"] = rope.pop("rope_theta")
            fields["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        return fields


class UnsoftLlamaConfig(ConvertedConfig, LlamaConfig):
    """A Llama whose layers have the mixers in `layer_mixers`: one {"name": ..., option: value} a layer."""

    model_type = "unsoftmax_llama"
    layer_mixers: list[dict] | None = None


class UnsoftMistralConfig(ConvertedConfig, MistralConfig):
    """A Mistral whose layers have the mixers in `layer_mixers`; `sliding_window` binds softmax layers."""

    model_type = "unsoftmax_mistral"
    layer_mixers: list[dict] | None = None


CONVERTED_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": UnsoftLlamaConfig,
    "mistral": UnsoftMistralConfig,
}


def convert_config(source: PreTrainedConfig, layer_mixers: list[dict]) -> PreTrainedConfig:
    """The converted model's config: every field of the source, and `layer_mixers` (one entry a layer).

    Raises ValueError, naming the field, for what would be lost or changed: another architecture, an unknown
    rotary type, quantised weights, a field that the family's maths does not have.
    """
    if source.model_type not in CONVERTED_CONFIGS:
        known = " and ".join(CONVERTED_CONFIGS)
        raise ValueError(f"model_type is {source.model_type!r}; {known} can be converted")
    target = CONVERTED_CONFIGS[source.model_type]
    layer_mixers = complete_layer_mixers(layer_mixers, source.num_hidden_layers)
    fields = source.to_dict()
    _check_rotary(fields)
    _check_extra_fields(source, fields)
    if fields["attention_dropout"] and any(entry["name"] != SOFTMAX for entry in layer_mixers):
        raise ValueError(f"attention_dropout is {fields['attention_dropout']}; only 0.0 can be converted")
    for key in ("model_type", "auto_map", "transformers_version", "rope_theta", "rope_scaling"):
        fields.pop(key, None)
    return target(**fields | {"layer_mixers": layer_mixers, "architectures": None})


def _check_rotary(fields: dict[str, Any]) -> None:
    rope = fields.get("rope_parameters") or {}
    if rope.get("rope_type") not in ROPE_TYPES:
        raise ValueError(f"rope_type is {rope.get('rope_type')!r}; known are {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor is {rope['partial_rotary_factor']}; only 1.0 can be converted"
        )
    if len(set(fields.get("layer_types") or [])) > 1:
        raise ValueError(
            "layer_types mixes kinds of attention; all layers must be of one kind to be converted"
        )


def _check_extra_fields(source: PreTrainedConfig, fields: dict[str, Any]) -> None:
    declared = {field.name for field in dataclasses.fields(source)} | set(PreTrainedConfig().to_dict())
    if fields.get("quantization_config"):
        raise ValueError("quantization_config is set; convert the checkpoint before it was quantised")
    for key, value in fields.items():
        if key not in declared | HARMLESS_FIELDS and value:
            raise ValueError(
                f"config.json has {key} = {value!r}, which {source.model_type} does not know; "
                f"delete the key if the model does not depend on it"
            )
