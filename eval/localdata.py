"""Local files in place of hub data sets, so that stock lm-eval task files run with no network.

Files are read straight into memory: no `datasets` cache is written, so none can serve rows that have since
changed. Layouts understood, for a data set with configurations (`anatomy`) and splits (`test`):
a README.md whose YAML header has `configs` (as on the hub), or files named `anatomy/test*.parquet`,
`test/anatomy.parquet`, or `test*.parquet` where there is one configuration; .jsonl likewise.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import yaml

from unsoftmax.eval.suites import find_folder, folder_names

SPLITS = ("train", "validation", "test", "dev")
FORMATS = ("json", "parquet", "csv", "text")  # load_dataset reads these from the files it is given


class MissingData(ValueError):
    """A data set that a task needs is not there; the message names it and where it was looked for."""


def read_file(path: Path) -> datasets.Dataset:
    """One .parquet or .jsonl file as an in-memory data set."""
    try:
        if path.suffix == ".parquet":
            return datasets.Dataset(pyarrow.parquet.read_table(path))
        with path.open(encoding="utf-8") as lines:
            return datasets.Dataset.from_list([json.loads(line) for line in lines if line.strip()])
    except (pyarrow.ArrowException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error


def _declared(folder: Path) -> dict[str, dict[str, str]]:
    """Configuration to split to file pattern, from the header of README.md; empty without one."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if not text.startswith("---"):
        return {}
    try:
        header = yaml.safe_load(text.split("---", 2)[1]) or {}
        return {
            config["config_name"]: {entry["split"]: entry["path"] for entry in config["data_files"]}
            for config in header.get("configs", ())
        }
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{readme}: its header's `configs` cannot be read: {error!r}") from error


def _patterns(folder: Path, config: str | None) -> dict[str, list[str]]:
    declared = _declared(folder)
    if declared:
        name = config if config in declared else "default"
        if name not in declared and config is None and len(declared) == 1:
            name = next(iter(declared))
        if name in declared:
            return {split: [pattern] for split, pattern in declared[name].items()}
    ends = (".parquet", ".jsonl")
    layouts = [f"{config}/{{0}}*{{1}}", f"{{0}}/{config}{{1}}"] if config else []
    layouts += (
        ["{0}*{1}", "data/{0}*{1}", "{0}/*{1}"] if config is None or not _has_config(folder, config) else []
    )
    return {split: [layout.format(split, end) for layout in layouts for end in ends] for split in SPLITS}


def _has_config(folder: Path, config: str) -> bool:
    return (folder / config).is_dir() or any(any(folder.glob(f"{split}/{config}.*")) for split in SPLITS)


def split_files(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """Split name to its files, for one configuration of the data set in `folder`."""
    found: dict[str, list[Path]] = {}
    for split, patterns in _patterns(folder, config).items():
        files = next((hits for p in patterns if (hits := sorted(folder.glob(p)))), [])
        if files:
            found[split] = files
    return found


def read(folder: Path, config: str | None = None) -> datasets.DatasetDict:
    """Every split of one configuration in memory.

    A split that task files commonly name but that is not there comes as an empty one, because lm-eval looks
    it up even where no example of it is used. Raises MissingData if no split is there at all.
    """
    files = split_files(folder, config)
    if not files:
        raise MissingData(
            f"{folder} holds no file for configuration {config or 'default'}; "
            f"put {folder / (config or '') / 'test.parquet'} there, or name the files in its README.md header"
        )
    splits = {
        split: datasets.concatenate_datasets([read_file(path) for path in paths])
        for split, paths in files.items()
    }
    empty = next(iter(splits.values())).select([])
    return datasets.DatasetDict({**dict.fromkeys(SPLITS, empty), **splits})


@contextlib.contextmanager
def local_datasets(data: Path | None) -> Iterator[dict[str, str]]:
    """Within the block, `datasets.load_dataset` reads hub ids from folders under `data` (None: from the hub).

    Yields a dict that fills with file path to SHA-256 for all that was read. A data set that cannot be had
    raises MissingData.
    """
    read_files: dict[str, str] = {}
    _sources.append((data, read_files))
    datasets.load_dataset = _load
    try:
        yield read_files
    finally:
        _sources.pop()
        datasets.load_dataset = _load if _sources else _stock


# A task module that says `from datasets import load_dataset` keeps what stood there when it was first
# imported, so one function serves all blocks, and acts as the stock one outside of them.
_stock = datasets.load_dataset
_sources: list[tuple[Path | None, dict[str, str]]] = []


def _load(path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
    data, read_files = _sources[-1] if _sources else (None, {})
    if not _sources or path in FORMATS:
        return _stock(path, name, *args, **options)
    if data is None:
        return _from_hub(path, name, *args, **options)
    folder = find_folder(data, path)
    if folder is None:
        looked = " or ".join(str(data / n) for n in folder_names(path))
        raise MissingData(f"the data set {path} is not under --data: no {looked}")
    for files in split_files(folder, name).values():
        for file in files:
            read_files[str(file.relative_to(data))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return read(folder, name)


def _from_hub(path: str, *args: Any, **options: Any) -> Any:
    try:
        return _stock(path, *args, **options)
    except Exception as error:  # the hub client raises many unrelated types when there is no network
        raise MissingData(
            f"the data set {path} could not be had from the hub ({type(error).__name__}: {error}); "
            f"give --data DIR with the folder DIR/{folder_names(path)[1]}"
        ) from error
