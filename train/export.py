"""A run's Hugging Face folder: the start's files with the trained weights in place of its own.

Configuration, tokenizer and remote code are copied from the checkpoint the run began with; each tensor keeps
the name and the dtype it has there, so that the two folders differ in numbers alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open

from unsoftmax.convert import provenance
from unsoftmax.train import checkpoint
from unsoftmax.train.engine import saved_weights

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf")
NAME_START = "start.txt in the run's folder must name the checkpoint that the run began with"


def export(run: Path, out: Path, *, say: Callable[[str], None] = print) -> Path:
    """Write the newest whole checkpoint of `run` as a Hugging Face folder `out`, whole or not at all.

    Raises:
        ValueError: `out` exists, `run` has no whole checkpoint, or its start folder is gone or other.
    """
    if out.exists():
        raise ValueError(f"{out} exists; name a folder that does not")
    return _write(run, out, say)


def export_newest(run: Path, out: Path, step: int, *, say: Callable[[str], None] = print) -> Path:
    """`export`, also where `out` is an export of an earlier step: then it gives way. One of `step` is kept.

    Raises:
        ValueError: `out` exists and is no export; else as `export`.
    """
    if not out.exists():
        return _write(run, out, say)
    found = exported_step(out)
    if found is None:
        raise ValueError(
            f"{out} exists and is no export, so it is left as it is; the weights of step {step} are whole: "
            f"unsoftmax export {run} FOLDER"
        )
    if found == step:
        return out
    say(f"{out} holds step {found}; it is replaced by step {step}")
    return _write(run, out, say)


def exported_step(folder: Path) -> int | None:
    """The optimizer step whose weights an exported folder holds; None if it is no export."""
    steps = provenance.read(folder)["steps"] if folder.is_dir() else []
    return next((s.get("optimizer_steps") for s in reversed(steps) if s.get("step") == "train"), None)


def _write(run: Path, out: Path, say: Callable[[str], None]) -> Path:
    folder = checkpoint.newest_whole(run, None, say)
    if folder is None:
        raise ValueError(
            f"{run} has no whole checkpoint to export; train it first: unsoftmax-train RECIPE --run {run}"
        )
    manifest = checkpoint.read_manifest(folder)
    start = start_folder(run)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(start, part, ignore=lambda _, names: [n for n in names if n.endswith(WEIGHTS)])
        weights = saved_weights(folder, manifest["recipe"]["train"]["zero_stage"])
        save_torch_state_dict(_as_in(start, weights), part, metadata={"format": "pt"})
        provenance.extend(part, "train", _entry(manifest))
        _put(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return out


def _put(part: Path, out: Path) -> None:
    """Give the whole folder `part` the name `out`; what is there goes only once that is done."""
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    try:
        os.replace(part, out)
    except BaseException:
        if old.exists():
            os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def start_folder(run: Path) -> Path:
    """The checkpoint folder that a run began with. ValueError if it is unknown or gone."""
    record = run / "start.txt"
    if not record.exists():
        raise ValueError(f"{run} is no run folder: start.txt is missing")
    start = Path(record.read_text().strip())
    if not start.is_dir():
        raise ValueError(
            f"{record} names {start}, which is gone; write there where the converted checkpoint is now"
        )
    return start


def _as_in(start: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trained weights under the names and in the dtypes that the start's files have."""
    files = sorted(start.glob("*.safetensors"))
    state: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name not in weights:
                    raise ValueError(f"{file} holds {name}, which the trained model does not have")
                state[name] = _own(_fitting(weights[name], tensors.get_tensor(name), f"{file}: {name}"))
    if not state:
        raise ValueError(f"{start} holds no .safetensors file")
    kept = {weights[name].data_ptr() for name in state if weights[name].numel()}  # tied ones among them
    lost = sorted(n for n in weights.keys() - state.keys() if weights[n].data_ptr() not in kept)
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise ValueError(
            f"{start} does not hold {', '.join(lost[:3])}{more}, which the trained model has; {NAME_START}"
        )
    return state


def _fitting(trained: torch.Tensor, there: torch.Tensor, where: str) -> torch.Tensor:
    if trained.shape != there.shape:
        raise ValueError(
            f"{where} has shape {list(there.shape)} there, {list(trained.shape)} in the trained model; "
            f"{NAME_START}"
        )
    return trained.to(there.dtype)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a storage of its own size; DeepSpeed hands out views of one large buffer."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)


def _entry(manifest: dict[str, Any]) -> dict[str, Any]:
    kept = {key: manifest[key] for key in ("tokens", "world_size", "recipe")}
    return {"optimizer_steps": manifest["step"], **kept}
