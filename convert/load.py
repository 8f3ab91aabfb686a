"""Open a checkpoint, converted or not, as a model or its tokenizer."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as library_logging

from unsoftmax.convert.config import CONVERTED_CONFIGS, convert_config
from unsoftmax.convert.model import CONVERTED_MODELS, ConvertedLayer
from unsoftmax.kernels.mixer import Mixer

CONVERTED_TYPES = {config.model_type for config in CONVERTED_CONFIGS.values()}
CONVERT_AGAIN = (
    "If another version of unsoftmax converted it, convert its source again: convert-checkpoint SOURCE OUT "
    "--recipe RECIPE (provenance.json there names both)"
)
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def load(
    path: str | os.PathLike,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    layer_mixers: list[dict] | None = None,
) -> PreTrainedModel:
    """The model in a folder or under a hub id, in eval mode.

    Args:
        path: a converted checkpoint, or a plain Llama or Mistral; safetensors only.
        dtype: of the weights; what a mixer adds stays float32.
        layer_mixers: for a plain checkpoint, put it into the converted class with these mixers (one entry a
            layer); what they add starts as each mixer documents it. Nothing is written.

    Raises:
        ValueError: nothing there to load, another architecture, or weights that do not fit the config.
    """
    config = read_config(path)
    model_class: type = AutoModelForCausalLM
    if layer_mixers is not None:
        if config.model_type in CONVERTED_TYPES:
            raise ValueError(f"{path} is converted already; its layer_mixers are in its config.json")
        model_class = CONVERTED_MODELS.get(config.model_type, AutoModelForCausalLM)
        config = convert_config(config, layer_mixers)
    try:
        with _quiet():
            model, report = model_class.from_pretrained(
                path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    expected = set() if layer_mixers is None else new_parameter_names(model)
    converted = layer_mixers is None and config.model_type in CONVERTED_TYPES
    _check_report(path, report, expected, converted=converted)
    return model.to(device).eval()


def tokenizer(path: str | os.PathLike) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint's folder or under its hub id. Raises ValueError if there is none."""
    _folder_or_hub_id(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} has no tokenizer that can be loaded: {error}") from error


def named_device(device: str | None) -> str:
    """`device` if torch has it; for None the GPU where there is one. Else ValueError, as of --device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return "cuda" if count else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device is {device!r}; it must be cpu, cuda or cuda:N, such as cpu")
    if device != "cpu" and int(device.partition(":")[2] or 0) >= count:
        there = f"GPUs 0 to {count - 1}" if count else "no GPU"
        raise ValueError(f"--device is {device!r}, and torch can use {there} here; cpu works")
    return device


def named_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype:
    """`dtype` by its name; None is bfloat16 on a GPU, float32 on a CPU. Else ValueError, as of --dtype."""
    if dtype is None:
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def read_config(path: str | os.PathLike) -> PreTrainedConfig:
    """The config in a folder or under a hub id. Raises ValueError if there is none or it cannot be read."""
    _folder_or_hub_id(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        again = f". {CONVERT_AGAIN}" if "layer_mixers" in str(error) else ""
        raise ValueError(f"{path} is no checkpoint that can be read: {error}{again}") from error


def _folder_or_hub_id(path: str | os.PathLike) -> None:
    """What is neither is refused at once; the hub's client would try for a while."""
    if not os.path.isdir(path) and not re.fullmatch(r"[\w.-]+/[\w.-]+", os.fspath(path)):
        raise ValueError(f"{path}: there is no such folder (and a hub id looks like owner/name)")


def new_parameter_names(model: PreTrainedModel) -> set[str]:
    """State dict keys that the mixers declare as new."""
    return {
        f"{layer_name}.self_attn.{name}"
        for layer_name, layer in model.named_modules()
        if isinstance(layer, ConvertedLayer) and isinstance(layer.self_attn, Mixer)
        for name in layer.self_attn.new_tensors()
    }


def _check_report(
    path: str | os.PathLike, report: dict, expected_missing: set[str], *, converted: bool
) -> None:
    missing = sorted(set(report["missing_keys"]) - expected_missing)
    mismatched = sorted(key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])
    for keys, problem in (
        (missing, "lacks"),
        (sorted(report["unexpected_keys"]), "has, beyond what its config asks for,"),
        (mismatched, "has in another shape than its config says"),
    ):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            again = f". {CONVERT_AGAIN}" if converted else ""
            raise ValueError(f"{path} {problem} {', '.join(keys[:3])}{more}{again}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The library reports every missing key as a warning; ours are checked right after."""
    level = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
