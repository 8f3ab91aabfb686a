"""Checkpoints of a run: written whole or not at all, checked before they are trusted, exact to the token.

    RUN/checkpoints/step-00000120/   DeepSpeed's files · rank-00000.pt: generators · data.pt: position in the
                                     data · manifest.json: step, recipe, and size and SHA-256 of each file
    RUN/checkpoints/latest           name of the newest one, written last

A folder is written under another name and renamed when its manifest stands, so a kill at any moment leaves
the previous checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from unsoftmax.recipes.schema import Recipe
from unsoftmax.train.engine import Engine, Place, barrier, gather

FULL_BYTES = 1e9  # free bytes below which an error says how many there are
FREE_KEYS = (  # keys that may change between two halves of a run: no weight depends on them
    "train.save_every_steps",
    "train.keep_checkpoints",
    "train.eval_every_steps",
    "train.log_every_steps",
    "train.eval_rows",
    "train.max_bad_steps",
    "eval.",
    "data.held_out",
)


class Resumed(NamedTuple):
    """What a checkpoint gives back beside the weights: steps done, tokens seen, position in the data.

    held_out: at the end of one of several stages, the held-out loss from which the next one continues.
    """

    step: int
    tokens: int
    position: dict[str, Any]
    held_out: float | None = None


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A recipe's keys as the user types them, such as train.peak_lr, to their values."""
    if isinstance(tree, dict):
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(v, dict | list) for v in tree):
        items = enumerate(tree)
    else:
        return {prefix.removesuffix("."): tree}
    return {k: v for key, value in items for k, v in flat(value, f"{prefix}{key}.").items()}


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def steps_saved(run: Path) -> list[int]:
    """Steps of the checkpoints in a run folder, newest first, whole or damaged."""
    names = [p.name for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdigit()]
    return sorted((int(name[5:]) for name in names), reverse=True)


# ---- writing


def save(engine: Engine, run: Path, recipe: Recipe, place: Place, resumed: Resumed) -> Path:
    """Write a checkpoint; every rank calls it. The oldest beyond train.keep_checkpoints are removed after."""
    final = folder_of(run, resumed.step)
    writing = final.with_name(f".writing-{final.name}")
    if place.first:
        shutil.rmtree(writing, ignore_errors=True)
    barrier()
    try:
        engine.save(writing)
        torch.save(_generators(), writing / f"rank-{place.rank:05d}.pt")
        if place.first:
            torch.save(resumed.position, writing / "data.pt")
        barrier()
        names = sorted(p.name for p in writing.iterdir())
        parts = gather({n: _fingerprint(writing / n) for n in names[place.rank :: place.world]})
        if place.first:
            files = {name: mark for part in parts for name, mark in part.items()}
            _publish(writing, final, recipe, place.world, resumed, files)
            _prune(run, recipe.train.keep_checkpoints)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a file cannot be written
        shutil.rmtree(writing, ignore_errors=True)
        free = shutil.disk_usage(run).free
        full = f" ({free / 1e9:.1f} GB free on that disk)" if free < FULL_BYTES else ""
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(
            f"checkpoint of step {resumed.step} not written{full}; earlier ones are whole, and --resume auto "
            f"goes on from them: {first}"
        ) from error
    barrier()
    return final


def _publish(
    writing: Path, final: Path, recipe: Recipe, world: int, resumed: Resumed, files: dict[str, Any]
) -> None:
    body = {
        "step": resumed.step,
        "tokens": resumed.tokens,
        "world_size": world,
        "recipe": recipe.to_dict(),
        "files": files,
    }
    if resumed.held_out is not None:
        body["held_out"] = resumed.held_out
    _write_text(writing / "manifest.json", json.dumps({"sha256": _digest(body), **body}, indent=1))
    if final.exists():
        shutil.rmtree(final)
    os.replace(writing, final)
    _sync(final.parent)
    _write_text(final.parent / "latest", final.name)


def _prune(run: Path, keep: int) -> None:
    for step in steps_saved(run)[keep:]:
        shutil.rmtree(folder_of(run, step))


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    with open(part, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _fingerprint(path: Path) -> dict[str, Any]:
    _sync(path)
    with open(path, "rb") as f:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _generators() -> dict[str, Any]:
    """State of every random generator of this process, as plain data."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
    }


def _restore_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


# ---- reading


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's manifest. ValueError if it is missing or damaged."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        digest = manifest.pop("sha256")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"manifest.json cannot be read: {error}") from None
    if digest != _digest(manifest):
        raise ValueError("manifest.json is not what was written")
    return manifest


def damage(folder: Path, rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None; looks at every `world`-th file from `rank` on."""
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return str(error)
    for name in sorted(files)[rank::world]:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != files[name]["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {files[name]['bytes']}"
        if _fingerprint(path) != files[name]:
            return f"{name} is not what was written (SHA-256 differs)"
    return None


def newest_whole(run: Path, place: Place | None, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint without damage, or None if there is none; says which ones it passes over."""
    for step in steps_saved(run):
        folder = folder_of(run, step)
        if place is None:
            found = [damage(folder)]
        else:
            found = gather(damage(folder, place.rank, place.world))
        wrong = next((w for w in found if w), None)
        if wrong is None:
            return folder
        say(f"{folder} is damaged: {wrong}; going back to the one before")
    return None


def changed_keys(manifest: dict[str, Any], recipe: Recipe, world: int) -> list[str]:
    """Lines such as `train.peak_lr: 0.0001 there, 0.0002 here` for every key on which the weights depend."""
    there, here = flat(manifest["recipe"]), flat(json.loads(json.dumps(recipe.to_dict())))
    there["world size"], here["world size"] = manifest["world_size"], world
    return [
        f"{key}: {there.get(key, 'absent')} there, {here.get(key, 'absent')} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key) and not key.startswith(FREE_KEYS)
    ]


def find(run: Path, recipe: Recipe, place: Place, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run; every rank calls it. None if the run has none.

    Raises:
        ValueError: it belongs to another recipe or number of processes, or every checkpoint is damaged.
    """
    folder = newest_whole(run, place, say)
    if folder is not None:
        check_same_run(folder, recipe, place.world)
    elif steps_saved(run):
        raise ValueError(f"{run}: every checkpoint is damaged; start anew in another folder")
    return folder


def resume(engine: Engine, folder: Path, place: Place, say: Callable[[str], None]) -> Resumed:
    """Load a checkpoint that `find` gave into the engine of its stage; every rank calls it."""
    manifest = read_manifest(folder)
    engine.load(folder)
    _restore_generators(torch.load(folder / f"rank-{place.rank:05d}.pt", weights_only=True))
    position = torch.load(folder / "data.pt", weights_only=True)
    say(f"resumed from {folder}, step {manifest['step']}")
    return Resumed(manifest["step"], manifest["tokens"], position, manifest.get("held_out"))


def check_same_run(folder: Path, recipe: Recipe, world: int) -> dict[str, Any]:
    """The manifest of `folder`. ValueError if that run had another recipe or number of processes."""
    manifest = read_manifest(folder)
    changed = changed_keys(manifest, recipe, world)
    if changed:
        raise ValueError(
            f"{folder} belongs to another run:\n  " + "\n  ".join(changed) + "\n"
            "Give the recipe and the number of processes it began with, or start another folder with --run."
        )
    return manifest
