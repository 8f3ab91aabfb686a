"""The code a converted folder carries, so that torch and transformers alone can open it.

The bundle is the import closure of the model's module, each file flat beside the weights under its dotted
name (unsoftmax.kernels.mixer becomes kernels_mixer.py) with its imports of ours made relative: the one shape
that trust_remote_code can follow. This file is in the bundle too, and there it copies its neighbours.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
from pathlib import Path

PACKAGE = "unsoftmax"
ROOT = f"{PACKAGE}.convert.model"
BUNDLED = not __name__.startswith(f"{PACKAGE}.")
OURS = re.compile(rf"^(\s*)from {PACKAGE}\.([\w.]+) import ", re.MULTILINE)
AUTO_CLASSES = {
    "unsoftmax_llama": ("UnsoftLlamaConfig", "UnsoftLlamaModel", "UnsoftLlamaForCausalLM"),
    "unsoftmax_mistral": ("UnsoftMistralConfig", "UnsoftMistralModel", "UnsoftMistralForCausalLM"),
}


def flat_name(module: str) -> str:
    """unsoftmax.kernels.gsa.layer -> kernels_gsa_layer."""
    return module.removeprefix(f"{PACKAGE}.").replace(".", "_")


@functools.cache  # parsing takes a second
def bundle() -> dict[str, str]:
    """File name to text, for every file that a converted model needs of ours.

    Raises ValueError naming the file whose import of ours is not of the form `from unsoftmax.a.b import c`.
    """
    if BUNDLED:
        neighbours = Path(__file__).parent.glob("*_*.py")
        return {file.name: file.read_text(encoding="utf-8") for file in neighbours if file.stem != "__init__"}
    files: dict[str, str] = {}
    waiting = [ROOT]
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if name in files:
            continue
        source = _source(module)
        imported = _imports_of_ours(source, name)
        files[name] = OURS.sub(lambda m: f"{m[1]}from .{m[2].replace('.', '_')} import ", source)
        waiting += sorted(imported)
    return files


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module} is no file; only modules can go into a bundle, not folders")
    return Path(spec.origin).read_text(encoding="utf-8")


def _imports_of_ours(source: str, name: str) -> set[str]:
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(f"{name}, line {node.lineno}: relative imports cannot go into a bundle")
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            imported.add(node.module)
        if isinstance(node, ast.Import) and any(a.name.partition(".")[0] == PACKAGE for a in node.names):
            raise ValueError(f"{name}, line {node.lineno}: write it as from {PACKAGE}.a.b import c")
    return imported


def write_remote_code(folder: str | os.PathLike) -> None:
    """Put the bundle and its auto_map into a folder that holds a converted model's config.json."""
    folder = Path(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if config.get("model_type") not in AUTO_CLASSES:
        raise ValueError(
            f"{config_file}: model_type is {config.get('model_type')!r}, not a converted model's"
        )
    for name, text in bundle().items():
        (folder / name).write_text(text, encoding="utf-8")
    config_class, model_class, causal_class = AUTO_CLASSES[config["model_type"]]
    config["auto_map"] = {
        "AutoConfig": f"convert_config.{config_class}",
        "AutoModel": f"convert_model.{model_class}",
        "AutoModelForCausalLM": f"convert_model.{causal_class}",
    }
    new = config_file.with_suffix(".json.new")
    new.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(config_file)
