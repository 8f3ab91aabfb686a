"""Which tensor goes where: the plan, and the streamed copy that carries it out.

Parameter names of the source stay, so the plan is short: copy by name, and what is then missing must be
exactly what the mixers declare as new. Every source key, every target key and every field of config.json is
accounted for, or the conversion is refused with its name. Copying holds one piece of one tensor.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from unsoftmax.convert.config import HARMLESS_FIELDS
from unsoftmax.convert.source import DTYPE_NAMES, INDEX, PIECE_BYTES, SINGLE, Source
from unsoftmax.kernels.mixer import Mixer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Fields of config.json whose spelling may change while what they say stays.
RESPELT = {
    "torch_dtype": "dtype is its name now",
    "dtype": "written as it is stored",
    "rope_theta": "written in both spellings",
    "rope_scaling": "written in both spellings",
    "rope_parameters": "written in both spellings",
    "use_cache": "a state takes the cache's place",
    "_attn_implementation_autoset": "chosen on loading",
    "_attn_implementation": "chosen on loading",
    "attn_implementation": "chosen on loading",
}


@dataclass(frozen=True)
class New:
    """A tensor that the mixer of one layer adds."""

    layer: int
    name: str  # inside the mixer
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """Where every tensor and field comes from.

    copied: target keys that are source keys. derived: target key to the rule that gives it.
    new: target key to what a mixer adds. unused: source key to the reason it is not needed.
    files: output file to its keys, in the order they are written.
    fields_carried, fields_changed: config.json, field by field; changed maps to the reason.
    """

    copied: tuple[str, ...]
    derived: dict[str, str]
    new: dict[str, New]
    unused: dict[str, str]
    files: dict[str, tuple[str, ...]]
    shapes: dict[str, tuple[int, ...]]
    fields_carried: tuple[str, ...]
    fields_changed: dict[str, str]

    @property
    def num_new(self) -> int:
        return sum(torch.Size(new.shape).numel() for new in self.new.values())

    @property
    def new_bytes(self) -> int:
        return sum(torch.Size(new.shape).numel() * new.dtype.itemsize for new in self.new.values())

    def lines(self) -> list[str]:
        """The plan as a reader wants it: one line a kind of tensor, then the sums."""
        rows: Counter[tuple[str, str, str]] = Counter()
        for key in self.copied:
            rows[_kind(key), "copied", _by(self.shapes[key])] += 1
        for key, rule in self.derived.items():
            rows[_kind(key), "derived", rule] += 1
        for key, new in self.new.items():
            rows[_kind(key), "new", f"{_by(new.shape)} {str(new.dtype).removeprefix('torch.')}"] += 1
        for key, reason in self.unused.items():
            rows[_kind(key), "unused", reason] += 1
        width = max(len(kind) for kind, _, _ in rows)
        lines = [f"  {kind:{width}}  {n:4d} {how:8} {what}" for (kind, how, what), n in rows.items()]
        copied, derived, new, unused = map(len, (self.copied, self.derived, self.new, self.unused))
        carried, changed = len(self.fields_carried), len(self.fields_changed)
        return [
            *lines,
            f"  source keys  {copied + unused} = {copied} copied + {unused} unused",
            f"  target keys  {copied + derived + new} = {copied} copied + {derived} derived + {new} new",
            f"  config.json  {carried + changed} fields = {carried} carried + {changed} rewritten",
        ]


def _kind(key: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", key)


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def skeleton(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The model without memory: every tensor on the meta device."""
    with torch.device("meta"):
        return model_class(config)


def plan_weights(source: Source, config: PretrainedConfig, model: PreTrainedModel) -> Plan:
    """Match source tensors to the converted model's.

    Args:
        config: the converted configuration.
        model: the converted model, e.g. from `skeleton`; only names and shapes are read.

    Raises:
        ValueError: a source key nobody needs, a target key nobody gives, a shape that differs, a config field
            that the conversion would lose; the message has its name.
    """
    target = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    new = _declared_new(model)
    tied = bool(config.tie_word_embeddings) and HEAD in target
    derived = {HEAD: f"tied to {EMBEDDING}"} if tied else {}
    unused = {
        key: _reason_unused(source, key, tied)
        for key in source.entries
        if key not in target or key in derived
    }
    copied = tuple(key for key in source.entries if key not in unused)
    where = source.folder
    for key in target.keys() - set(copied) - derived.keys() - new.keys():
        raise ValueError(
            f"{where}: no shard holds {key}, which a {source.family} checkpoint of this config.json has"
        )
    for key in new.keys() & set(copied):
        raise ValueError(
            f"{where / source.entries[key].file}: holds {key}, which the mixer adds; is it converted?"
        )
    for key in copied:
        if source.entries[key].shape != target[key]:
            file, shape = where / source.entries[key].file, source.entries[key].shape
            raise ValueError(
                f"{file}: {key} is {_by(shape)}, and by config.json it must be {_by(target[key])}"
            )
    carried, changed = account_for_fields(source.folder / "config.json", source.raw_config, config.to_dict())
    files = _layout(source, copied, new)
    return Plan(copied, derived, new, unused, files, target, carried, changed)


def _declared_new(model: PreTrainedModel) -> dict[str, New]:
    new = {}
    for path, mixer in model.named_modules():
        if not isinstance(mixer, Mixer):
            continue
        layer = int(re.findall(r"\d+", path)[0])
        for name, tensor in mixer.new_tensors().items():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            new[f"{path}.{name}"] = New(layer, name, tuple(tensor.shape), dtype)
    return new


def _reason_unused(source: Source, key: str, tied: bool) -> str:
    if key.endswith("rotary_emb.inv_freq"):
        return "computed from config.json"
    if key == HEAD and tied:
        if EMBEDDING in source.entries and _same(source.pieces(HEAD), source.pieces(EMBEDDING)):
            return f"equal to {EMBEDDING}, to which it is tied"
        path = source.folder / "config.json"
        raise ValueError(
            f"{path}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; set it to false"
        )
    file = source.folder / source.entries[key].file
    hint = "; set attention_bias or mlp_bias to true in config.json" if key.endswith("_proj.bias") else ""
    raise ValueError(f"{file}: {key} has no place in a {source.family} model of this config.json{hint}")


def _same(a: Iterator[torch.Tensor], b: Iterator[torch.Tensor]) -> bool:
    """Whether two streams of pieces hold the same bits."""
    none = torch.empty(0, dtype=torch.uint8)  # what the shorter stream is filled up with
    pairs = itertools.zip_longest(a, b, fillvalue=none)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def account_for_fields(
    path: Path, raw: Mapping[str, Any], converted: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """config.json's fields: carried, and rewritten with the reason; ValueError names a lost one."""
    carried, changed = [], {}
    for name, value in raw.items():
        if name in RESPELT:
            changed[name] = RESPELT[name]
        elif name in HARMLESS_FIELDS:
            changed[name] = "says how the file was written"
        elif name in converted and converted[name] == value:
            carried.append(name)
        elif value is None:
            changed[name] = "null, which means the default"
        else:
            got = repr(converted[name]) if name in converted else "nothing"
            raise ValueError(
                f"{path}: {name} is {value!r}, and the converted model would have {got}; remove the field"
            )
    return tuple(carried), changed


def _layout(source: Source, copied: tuple[str, ...], new: dict[str, New]) -> dict[str, tuple[str, ...]]:
    """Output file to keys. Shards stay as they are; a layer's new tensors go where its q_proj is."""
    names = {file: _output_name(file, len(source.files)) for file in source.files}
    keys: dict[str, list[str]] = {names[file]: [] for file in source.files}
    for key in copied:
        keys[names[source.entries[key].file]].append(key)
    for key, item in new.items():
        neighbour = key.removesuffix(item.name) + "q_proj.weight"
        keys[names[source.entries[neighbour].file]].append(key)

    def order(key: str) -> tuple[int, int, str]:
        # Wide dtypes first keeps every tensor aligned; file order within keeps reading sequential.
        if key in new:
            return -new[key].dtype.itemsize, 0, key
        entry = source.entries[key]
        return -entry.dtype.itemsize, entry.start or 0, key

    return {name: tuple(sorted(each, key=order)) for name, each in keys.items() if each}


def _output_name(file: str, how_many: int) -> str:
    if how_many == 1:
        return SINGLE
    return re.sub(r"^pytorch_model", "model", file.removesuffix(".bin")) + (
        ".safetensors" if file.endswith(".bin") else ""
    )


def write_weights(
    source: Source,
    plan: Plan,
    new: Mapping[str, torch.Tensor],
    folder: Path,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Write every shard of the plan into `folder`, and an index if there is more than one.

    Args:
        new: target key to tensor, for exactly the keys of `plan.new`.
        progress: called with the file's name and the bytes written since the last call.

    Raises:
        ValueError: a tensor holds NaN or inf; the message has its name.
    """
    assert new.keys() == plan.new.keys(), sorted(new.keys() ^ plan.new.keys())
    total = 0
    for name, keys in plan.files.items():
        items = [(key, *_item(source, key, new)) for key in keys]
        for written in _write_safetensors(folder / name, items):
            total += written
            if progress:
                progress(name, written)
    if len(plan.files) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {key: name for name, keys in sorted(plan.files.items()) for key in sorted(keys)},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _item(
    source: Source, key: str, new: Mapping[str, torch.Tensor]
) -> tuple[str, torch.dtype, tuple[int, ...], Iterator[torch.Tensor]]:
    if key in new:
        tensor = new[key].detach().cpu().contiguous()
        pieces = iter(tensor.view(-1).split(PIECE_BYTES // tensor.dtype.itemsize))
        return "the mixer's start", tensor.dtype, tuple(tensor.shape), pieces
    entry = source.entries[key]
    return str(source.folder / entry.file), entry.dtype, entry.shape, source.pieces(key)


def _write_safetensors(path: Path, items: list[tuple]) -> Iterator[int]:
    """Write a safetensors file piece by piece; yields the bytes of each piece once written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, _, dtype, shape, _ in items:
        end = at + dtype.itemsize * torch.Size(shape).numel()
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for key, origin, _, _, pieces in items:
            for piece in pieces:
                if piece.is_floating_point() and not _finite(piece):
                    raise ValueError(
                        f"{origin}: {key} holds NaN or inf; a checkpoint must be finite to be converted"
                    )
                yield f.write(memoryview(piece.view(torch.uint8).numpy()))
        f.flush()
        os.fsync(f.fileno())


def _finite(piece: torch.Tensor) -> bool:
    low, high = piece.aminmax()  # NaN wins in both; twenty times faster than isfinite on bf16
    return math.isfinite(low.item()) and math.isfinite(high.item())


def differing_copies(source: Source, plan: Plan, written: Source) -> list[str]:
    """Keys whose bits on disk are not the source's. `written` is the output folder, opened as a source."""
    return [key for key in plan.copied if not _same(source.pieces(key), written.pieces(key))]
