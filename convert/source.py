"""The source checkpoint: opened from a hub id or a folder, checked, and read tensor by tensor.

Nothing here holds more than one tensor. Tensors are described by the shards' own headers, so that a missing,
truncated or mislabelled shard is found before any work is done.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig, MistralConfig, PretrainedConfig
from transformers.activations import ACT2FN

from unsoftmax.convert.config import CONVERTED_CONFIGS, ROPE_TYPES

SOURCE_CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "mistral": MistralConfig}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

DTYPES = {  # safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

PIECE_BYTES = 32 << 20  # what copying and hashing hold at a time
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_SINGLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
# What travels beside the weights; everything else in the folder is somebody's own.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True)
class Entry:
    """One tensor of the source: where it lies and what it is. `start` is None in a pickle."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int | None
    num_bytes: int


@dataclass(frozen=True)
class Source:
    """A checked Llama or Mistral checkpoint.

    name: as the user typed it. folder: where it lies. raw_config: config.json as written.
    entries: key to Entry, every tensor of every shard. companions: files to carry along untouched.
    """

    name: str
    folder: Path
    raw_config: dict[str, Any]
    entries: dict[str, Entry] = field(repr=False)
    companions: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def family(self) -> str:
        return self.raw_config["model_type"]

    @functools.cached_property
    def config(self) -> PretrainedConfig:
        """The source's configuration as transformers reads it."""
        known = SOURCE_CONFIGS | {config.model_type: config for config in CONVERTED_CONFIGS.values()}
        return known[self.family].from_pretrained(self.folder)

    @functools.cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the weight files, in order."""
        return tuple(sorted({entry.file for entry in self.entries.values()}))

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the weights are stored in."""
        size: dict[torch.dtype, int] = {}
        for entry in self.entries.values():
            size[entry.dtype] = size.get(entry.dtype, 0) + entry.num_bytes
        return max(size, key=lambda dtype: size[dtype])

    def read(self, key: str) -> torch.Tensor:
        """The tensor of `key`, in its own dtype, on the CPU."""
        entry = self.entries[key]
        if entry.start is None:
            return _unpickle(self.folder / entry.file)[key]
        with safe_open(self.folder / entry.file, framework="pt") as shard:
            return shard.get_tensor(key)

    def pieces(self, key: str) -> Iterator[torch.Tensor]:
        """The tensor of `key` as flat pieces of at most PIECE_BYTES, in order, in its own dtype."""
        entry = self.entries[key]
        if entry.start is None:
            yield from self.read(key).contiguous().view(-1).split(PIECE_BYTES // entry.dtype.itemsize)
            return
        with (self.folder / entry.file).open("rb") as shard:
            shard.seek(entry.start)
            left = entry.num_bytes
            while left:
                data = bytearray(shard.read(min(left, PIECE_BYTES)))
                if not data:
                    raise ValueError(f"{self.folder / entry.file}: ends inside {key}; fetch the file again")
                left -= len(data)
                yield torch.frombuffer(data, dtype=entry.dtype)

    def sha256(self, progress: Callable[[int], None] | None = None) -> str:
        """Hash of config.json and every weight file; `progress` is called with bytes read so far."""
        whole, done = hashlib.sha256(), 0
        for name in ("config.json", *self.files):
            one = hashlib.sha256()
            with (self.folder / name).open("rb") as f:
                while data := f.read(PIECE_BYTES):
                    one.update(data)
                    done += len(data)
                    if progress:
                        progress(done)
            whole.update(f"{name} {one.hexdigest()}\n".encode())
        return whole.hexdigest()


def open_source(name: str | Path, *, allow_pickle: bool = False, converted: bool = False) -> Source:
    """Open and check a source checkpoint.

    Args:
        name: a folder, or a hub id such as "HuggingFaceTB/SmolLM2-135M".
        allow_pickle: also read `.bin` files, weights only; without it they are refused.
        converted: it is a folder that we wrote ourselves, whose configuration is of the converted class.

    Raises:
        ValueError: for everything that makes it no Llama or Mistral checkpoint we can convert.
    """
    folder = _folder(str(name), allow_pickle)
    config = _json(folder / "config.json") if converted else read_config(folder)
    entries = _entries(folder, allow_pickle)
    companions = sorted({p.name for pattern in COMPANIONS for p in folder.glob(pattern) if p.is_file()})
    companions = [n for n in companions if not n.endswith(WEIGHT_SUFFIXES)]
    revision = folder.name if folder.parent.name == "snapshots" else None
    return Source(str(name), folder, config, entries, tuple(companions), revision)


def _folder(name: str, allow_pickle: bool) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{name} is a file; give the folder that holds config.json and model.safetensors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "~")):
        raise ValueError(f"{name}: there is no such folder (and a hub id looks like owner/name)")
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", INDEX, *COMPANIONS]
    patterns += ["*.bin", PICKLE_INDEX] if allow_pickle else []
    try:
        return Path(
            snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"])
        )
    except Exception as error:  # the hub client raises many kinds, and all mean the same to the user
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name}: there is no such folder, and it cannot be had from the hub: {first}"
        ) from error


# ---- config.json


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


@dataclass(frozen=True)
class Rule:
    """What a field of config.json may hold: a test, in words what passes it, and whether null does too."""

    test: Callable[[Any], bool]
    must: str
    nullable: bool = False

    def check(self, path: Path, key: str, value: Any) -> None:
        if not (self.test(value) or (self.nullable and value is None)):
            raise ValueError(f"{path}: {key} is {value!r}; it must be {self.must}")


def _count(example: int, nullable: bool = False) -> Rule:
    end = ", or null" if nullable else ""
    return Rule(_is_count, f"a whole number of at least 1, such as {example}{end}", nullable)


def _positive(example: float) -> Rule:
    return Rule(_is_positive, f"a number above 0, such as {example}")


TRUTH = Rule(lambda value: isinstance(value, bool), "true or false")

FIELDS = {  # held against the rule where the field is there; absent ones have the family's defaults
    "hidden_size": _count(4096),
    "intermediate_size": _count(14336),
    "num_hidden_layers": _count(32),
    "num_attention_heads": _count(32),
    "num_key_value_heads": _count(8, nullable=True),
    "head_dim": Rule(
        lambda value: _is_count(value) and value % 2 == 0, "an even whole number, such as 128, or null", True
    ),
    "vocab_size": _count(32000),
    "max_position_embeddings": _count(2048),
    "sliding_window": _count(4096, nullable=True),
    "pad_token_id": Rule(lambda value: type(value) is int, "a whole number, such as 0, or null", True),
    "rms_norm_eps": _positive(1e-05),
    "rope_theta": _positive(10000.0),
    "hidden_act": Rule(
        lambda value: isinstance(value, str) and value in ACT2FN, f"one of {', '.join(sorted(ACT2FN))}"
    ),
    "tie_word_embeddings": TRUTH,
    "attention_bias": TRUTH,
    "mlp_bias": TRUTH,
}
ROPE_FIELDS = {
    "rope_theta": _positive(10000.0),
    "factor": Rule(lambda value: _is_number(value) and value >= 1, "a number of at least 1, such as 8.0"),
    "low_freq_factor": _positive(1.0),
    "high_freq_factor": _positive(4.0),
    "original_max_position_embeddings": _count(8192),
    "attention_factor": Rule(_is_positive, "a number above 0, such as 1.0, or null", True),
    "beta_fast": Rule(_is_positive, "a number above 0, such as 32.0, or null", True),
    "beta_slow": Rule(_is_positive, "a number above 0, such as 1.0, or null", True),
    "mscale": Rule(_is_number, "a number, such as 1.0, or null", True),
    "mscale_all_dim": Rule(_is_number, "a number, such as 1.0, or null", True),
}
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Llama or Mistral checkpoint, checked field by field; ValueError if it is none."""
    path = folder / "config.json"
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise ValueError(f"{folder} is no checkpoint: it has no config.json (it holds {there})")
    config = _json(path)
    _check_family(path, config)
    for key, rule in FIELDS.items():
        if key in config:
            rule.check(path, key, config[key])
    _check_heads(path, config)
    _check_rope(path, config)
    _check_padding(path, config)
    if config.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config is set; give a checkpoint in bf16, fp16 or fp32")
    return config


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}; it must be a JSON object")
    return value


def _check_family(path: Path, config: dict[str, Any]) -> None:
    family, known = config.get("model_type"), ", ".join(SOURCE_CONFIGS)
    if str(family).startswith("unsoftmax_"):
        raise ValueError(
            f"{path}: model_type is {family!r}: this checkpoint is converted already; give its source"
        )
    if family not in SOURCE_CONFIGS:
        raise ValueError(f"{path}: model_type is {family!r}, which cannot be converted; there are: {known}")
    named = config.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in named:
        raise ValueError(f"{path}: architectures is {named}; it must be [{ARCHITECTURES[family]!r}]")


def _check_heads(path: Path, config: dict[str, Any]) -> None:
    default = SOURCE_CONFIGS[config["model_type"]]()
    hidden, heads = (config.get(key, getattr(default, key)) for key in ("hidden_size", "num_attention_heads"))
    # Llama reads an absent num_key_value_heads as one a query head, Mistral as 8.
    kv = config.get("num_key_value_heads") or (heads if config["model_type"] == "llama" else 8)
    if heads % kv:
        raise ValueError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}")
    if config.get("head_dim") is not None:
        return
    if hidden % heads:
        raise ValueError(
            f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, without head_dim"
        )
    if hidden // heads % 2:
        raise ValueError(
            f"{path}: hidden_size {hidden} / num_attention_heads {heads} is a head of {hidden // heads}; "
            "rotary positions need an even one, such as 128"
        )


def _check_rope(path: Path, config: dict[str, Any]) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ValueError(f"{path}: {name} is {rope!r}; it must be a table or null")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise ValueError(f"{path}: {name}.rope_type is {kind!r}; there are: {', '.join(ROPE_TYPES)}")
        for key in ROPE_NEEDS[kind]:
            if key not in rope:
                must = ROPE_FIELDS[key].must
                raise ValueError(f"{path}: {name}.{key} is missing; rope_type {kind!r} needs it: {must}")
        for key, rule in ROPE_FIELDS.items():
            if key in rope:
                rule.check(path, f"{name}.{key}", rope[key])
        if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            raise ValueError(
                f"{path}: {name}.high_freq_factor is {high}; it must be above low_freq_factor {low}, such as "
                f"{4 * low}"
            )


def _check_padding(path: Path, config: dict[str, Any]) -> None:
    size = config.get("vocab_size", SOURCE_CONFIGS[config["model_type"]]().vocab_size)
    pad = config.get("pad_token_id")
    if pad is not None and not -size <= pad < size:  # old checkpoints have -1, the last row
        raise ValueError(
            f"{path}: pad_token_id is {pad}; it must be null or below vocab_size {size}, such as 0"
        )


# ---- weight files


def read_header(path: Path) -> dict[str, Entry]:
    """What a safetensors file holds, checked against the file's length; ValueError if it is damaged."""
    size = path.stat().st_size
    again = "fetch the file again"
    with path.open("rb") as f:
        first = f.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            if first.startswith(b"version "):
                raise ValueError(f"{path}: a Git LFS pointer, not the file itself; run git lfs pull")
            raise ValueError(f"{path}: not a safetensors file, or cut short ({size} bytes); {again}")
        try:
            header = json.loads(f.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path}: its header cannot be read; {again}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header is a {type(header).__name__}, not a table of tensors; {again}")
    notes = header.pop("__metadata__", None) or {}
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ValueError(f"{path}: __metadata__ of its header is {notes!r}, not a table of texts; {again}")
    entries = {key: _entry(path, key, item, 8 + length) for key, item in header.items()}
    at, before = 8 + length, "the header"
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start or 0, item[1].num_bytes)):
        if entry.start != at:
            raise ValueError(
                f"{path}: {key} starts at byte {entry.start}, but {before} ends at byte {at}; {again}"
            )
        at, before = at + entry.num_bytes, key
    if size != at:
        raise ValueError(f"{path}: is {size} bytes long and its header says {at}; {again}")
    return entries


def _entry(path: Path, key: str, item: Any, data: int) -> Entry:
    """One tensor of a header, checked alone; `data` is the byte of the file that offsets count from."""
    again = "fetch the file again"
    item = item if isinstance(item, dict) else {"dtype": None}
    dtype, shape, offsets = (item.get(name) for name in ("dtype", "shape", "data_offsets"))
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"{path}: {key} is stored as {dtype}; it must be one of {', '.join(DTYPES)}")
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{path}: its header does not say dtype, shape and data_offsets of {key} rightly; {again}"
        )
    begin, end = offsets
    if end - begin != DTYPES[dtype].itemsize * math.prod(shape):
        raise ValueError(f"{path}: {key} of shape {shape} takes {end - begin} bytes; {again}")
    return Entry(path.name, DTYPES[dtype], tuple(shape), data + begin, end - begin)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _entries(folder: Path, allow_pickle: bool) -> dict[str, Entry]:
    if (folder / INDEX).is_file():
        return _indexed(folder, folder / INDEX, read_header)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    pickles = sorted(p.name for p in folder.glob("*.bin"))
    if (folder / PICKLE_INDEX).is_file() or PICKLE_SINGLE in pickles:
        if not allow_pickle:
            raise ValueError(
                f"{folder}: the weights are pickles ({', '.join(pickles[:3])}), which can run code; "
                "pass --allow-pickle to read them weights-only, or give a safetensors checkpoint"
            )
        if (folder / PICKLE_INDEX).is_file():
            return _indexed(folder, folder / PICKLE_INDEX, _pickle_header)
        return _pickle_header(folder / PICKLE_SINGLE)
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if found:
        raise ValueError(f"{folder}: has {', '.join(found[:3])} but neither {SINGLE} nor {INDEX}")
    raise ValueError(f"{folder}: has config.json but no weights; {SINGLE} or {INDEX} must be there")


def _indexed(folder: Path, index: Path, header: Callable[[Path], dict[str, Entry]]) -> dict[str, Entry]:
    """The tensors of every shard, held against what the index says of them."""
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is missing or empty")
    for key, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ValueError(f"{index}: weight_map names {shard!r} for {key}; it must be a shard's file name")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or shard.startswith("."):
            raise ValueError(f"{index}: weight_map names {shard!r}; a shard must lie beside the index")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}"
        )
    found: dict[str, Entry] = {}
    for shard in shards:
        for key, entry in header(folder / shard).items():
            if weight_map.get(key) != shard:
                says = weight_map.get(key, "nothing")
                raise ValueError(f"{folder / shard}: holds {key}, for which {index.name} names {says}")
            found[key] = entry
    absent = [key for key in weight_map if key not in found]
    if absent:
        raise ValueError(f"{index}: names {absent[0]} in {weight_map[absent[0]]}, which does not hold it")
    return found


@functools.lru_cache(maxsize=1)
def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    for mmap in (True, False):  # files older than torch 1.6 cannot be mapped
        with contextlib.suppress(RuntimeError):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            if not isinstance(state, dict):
                raise ValueError(f"{path}: holds a {type(state).__name__}; it must be a table of tensors")
            return state
    raise ValueError(f"{path}: cannot be read as a table of tensors; fetch the file again")


def _pickle_header(path: Path) -> dict[str, Entry]:
    try:
        state = _unpickle(path)
    except ValueError:
        raise
    except Exception as error:  # unpickling raises many kinds, and all mean the same to the user
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: cannot be read weights-only: {first}") from error
    entries = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPE_NAMES:
            raise ValueError(f"{path}: {key} is no dense tensor; only tables of tensors can be converted")
        entries[key] = Entry(
            path.name, value.dtype, tuple(value.shape), None, value.numel() * value.dtype.itemsize
        )
    return entries


def available_memory() -> int:
    """Bytes that can be used without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 1 << 62  # no way to know: let it run
