"""Where a folder's contents come from: provenance.json, one entry a step, in the order the steps ran."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

NAME = "provenance.json"
PACKAGES = ("unsoftmax", "torch", "transformers", "deepspeed", "lm_eval")


def read(folder: str | Path) -> dict[str, Any]:
    """The provenance of `folder`: {"steps": [{"step", "time", "command", "versions", ...}, ...]}.

    A folder without the file has no steps. Raises ValueError naming a file that cannot be read.
    """
    path = Path(folder) / NAME
    if not path.exists():
        return {"steps": []}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); delete it to go on without the history") from None
    if not isinstance(record, dict) or not isinstance(record.get("steps"), list):
        raise ValueError(f'{path} has no list "steps"; delete it to go on without the history')
    return record


def teacher(folder: str | Path) -> str | None:
    """The checkpoint that the newest conversion in the provenance of `folder` began with, or None."""
    named = [step.get("source") for step in read(folder)["steps"] if step.get("step") == "convert"]
    return named[-1] if named else None


def extend(folder: str | Path, step: str, entry: dict[str, Any]) -> None:
    """Add one step to the provenance of `folder`, whole or not at all.

    entry: JSON values; "step", "time" (UTC), "command" and "versions" are added here.
    """
    record = read(folder)
    record["steps"].append(
        {
            "step": step,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "versions": versions(),
            **entry,
        }
    )
    write_json(Path(folder) / NAME, record)


def versions() -> dict[str, str]:
    """Version of Python and of each package that numbers depend on; a package not installed is left out."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}  # which says the build too, such as +cpu


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside `path` and move it there, so that a reader sees the old file or the new one."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
