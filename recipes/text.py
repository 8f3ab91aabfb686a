"""Where text comes from: one word in a recipe to a stream of documents.

    python-docs               the language reference and docstrings that come with Python itself: no network
    corpus/train.jsonl        a file: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, or .txt (one document a file)
    corpus/   corpus/*.txt    every such file under a folder, or those of a pattern, by name
    owner/name[:config][@revision]     a data set on the Hugging Face hub, its split "train", streamed

A source always gives the same documents in the same order. Documents without text are skipped and counted.
"""

from __future__ import annotations

import ast
import glob
import gzip
import hashlib
import importlib
import io
import json
import logging
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

PYTHON_DOCS = "python-docs"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w.-]+))?")
HELD_OUT_ONE_IN = 10
NOT_PROSE = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
}

NEWLINE = b"\n"

log = logging.getLogger(__name__)


class Documents(Iterator[str]):
    """The documents of a source, one by one; `empty` counts those skipped so far for holding no text."""

    def __init__(self, spec: str, found: Iterator[tuple[str, str]], held_out: bool | None) -> None:
        self.spec, self.held_out, self.empty = spec, held_out, 0
        self._found = found

    def __next__(self) -> str:
        for where, text in self._found:
            raw = _as_bytes(text, where)
            if not text.strip():
                self.empty += 1
            elif self.held_out is None or is_held_out(raw) == self.held_out:
                return text
        if self.empty:
            log.warning("%s: %d documents without text skipped", self.spec, self.empty)
        raise StopIteration


def documents(spec: str, *, held_out: bool | None = None, text_field: str = "text") -> Documents:
    """Stream the documents of a source.

    Args:
        spec: see the module's docstring.
        held_out: True gives only the tenth of all documents that is set aside for scoring, chosen by a hash
            of their text; False gives the others; None gives all.
        text_field: field or column that holds a document's text (jsonl, parquet and hub data sets).

    Raises:
        ValueError: there is no such source, or, while reading, a file that is not text; names file and line.
        OSError: reading failed, for example the network; reading again may help.
    """
    return Documents(spec, _open(spec, text_field), held_out)


def check_text(key: str, spec: str, *, held_out: bool | None = None, text_field: str = "text") -> None:
    """Read the first document of a source, before any work that needs it.

    key: the recipe's key that names the source. The rest is as for `documents`.

    Raises:
        ValueError: the source is not there, cannot be read or holds no document; names key and source.
        OSError: reading failed, for example the network.
    """
    try:
        first = next(documents(spec, held_out=held_out, text_field=text_field), None)
    except (ValueError, PermissionError) as error:
        raise ValueError(f"{key}: {error}") from None
    if first is None:
        part = "" if held_out is None else f" that is {'' if held_out else 'not '}set aside for scoring"
        raise ValueError(
            f"{key}: {spec} holds no document with text{part}; "
            f"name a text of many documents, or {PYTHON_DOCS}"
        )


def is_held_out(text: str | bytes) -> bool:
    """Whether a document belongs to the tenth that is set aside for scoring."""
    raw = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(raw).digest()[:8]) % HELD_OUT_ONE_IN == 0


def _as_bytes(text: str, where: str) -> bytes:
    if "\0" in text:
        raise ValueError(f"{where} holds NUL characters: binary data, not text; remove it from the corpus")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds {text[error.start]!r}, half of a character, which is no text; repair or remove it"
        ) from None


def _open(spec: str, field: str) -> Iterator[tuple[str, str]]:
    """(Where it stands, text) of each document. Says at once whether the source exists."""
    if spec == PYTHON_DOCS:
        return _python_docs()
    path = Path(spec)
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if _reader(p) and p.is_file() and not _hidden(p, path)]
        return _read_files(files, field, f"{spec} is a folder without files that can be read")
    if path.is_file():
        return _read_files([path], field, "")
    if any(c in spec for c in "*?["):
        files = [Path(p) for p in sorted(glob.glob(spec, recursive=True)) if Path(p).is_file()]
        return _read_files(files, field, f"{spec} matches no file")
    hub = HUB_ID.fullmatch(spec)
    if hub and not spec.endswith(SUFFIXES):
        return _hub(spec, hub["name"], hub["config"], hub["revision"], field)
    raise ValueError(
        f"{spec} does not exist; text is a file ({', '.join(SUFFIXES)}), a folder or pattern of such files, "
        f"a hub data set owner/name, or {PYTHON_DOCS}"
    )


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _reader(path: Path) -> Callable[[Path, str], Iterator[tuple[str, str]]] | None:
    if path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return _jsonl
    return {".parquet": _parquet, ".txt": _txt}.get(path.suffix)


def _read_files(files: list[Path], field: str, none: str) -> Iterator[tuple[str, str]]:
    if not files:
        raise ValueError(f"{none}; it may hold {', '.join(SUFFIXES)}")
    unknown = [p for p in files if _reader(p) is None]
    if unknown:
        raise ValueError(f"{unknown[0]} is of no kind that can be read; it may be {', '.join(SUFFIXES)}")
    return (found for path in files for found in _reader(path)(path, field))  # type: ignore[misc]


# ---- kinds of files


def _txt(path: Path, field: str) -> Iterator[tuple[str, str]]:
    raw = path.read_bytes()

    def line(at: int) -> str:
        return f"{path}, line {1 + raw.count(NEWLINE, 0, at)}"

    nul = raw.find(0)
    yield (str(path) if nul < 0 else line(nul)), _decode(raw, line).removeprefix("\ufeff")


def _jsonl(path: Path, field: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as raw:
        for number, line in enumerate(_lines(raw, path), 1):
            where = f"{path}, line {number}"
            if line.strip():
                yield where, _text_of(_json(line, where), field, where)


def _lines(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    if path.suffix == ".gz":
        opened: Any = gzip.GzipFile(fileobj=raw)
    elif path.suffix == ".zst":
        opened = io.BufferedReader(_Frames(raw, _zstd(path).ZstdDecompressor()), 1 << 20)
    else:
        opened = raw
    number = 0
    try:
        for line in opened:
            yield line
            number += 1
    except (EOFError, gzip.BadGzipFile) as error:
        raise _damaged(path, number, error) from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise _damaged(path, number, error) from None


class _Frames(io.RawIOBase):
    """What zstandard frames hold, one after another; EOFError where the last is cut off, which the package's
    own reader takes for the end."""

    def __init__(self, raw: BinaryIO, package: Any) -> None:
        self.raw, self.package, self.frame, self.held = raw, package, None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self.held:
            data = self.frame.unused_data if self.frame is not None and self.frame.eof else b""
            data = data or self.raw.read(1 << 20)
            if not data:
                if self.frame is None or self.frame.eof:
                    return 0
                raise EOFError("the file ends inside a zstandard frame")
            if self.frame is None or self.frame.eof:
                self.frame = self.package.decompressobj()
            self.held = self.frame.decompress(data)
        given, self.held = self.held[: len(into)], self.held[len(into) :]
        into[: len(given)] = given
        return len(given)


def _damaged(path: Path, lines: int, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged after line {lines} ({error}); replace the file")


def _zstd(path: Path) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise ValueError(f"reading {path} needs the package zstandard: pip install zstandard") from None


def _decode(raw: bytes, where: Callable[[int], str]) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise ValueError(
            f"{where(at)} is not text in UTF-8 (byte 0x{raw[at]:02x}); convert the file, or take it out"
        ) from None


def _json(line: bytes, where: str) -> Any:
    text = _decode(line, lambda at: where).removeprefix("\ufeff")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); each line must be an object") from None


def _text_of(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise ValueError(f'{where} is not a JSON object; write lines such as {{"{field}": "..."}}')
    if field not in row:
        raise ValueError(f"{where} has no field {field!r}, but {_names(row)}; set text_field to one of them")
    if row[field] is None:
        return ""
    if not isinstance(row[field], str):
        raise ValueError(f"{where}: field {field!r} holds a {type(row[field]).__name__}, not text")
    return row[field]


def _names(row: Any) -> str:
    return ", ".join(repr(str(name)) for name in row) or "none at all"


def _parquet(path: Path, field: str) -> Iterator[tuple[str, str]]:
    parquet = importlib.import_module("pyarrow.parquet")
    arrow = importlib.import_module("pyarrow")
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file, or a damaged one ({error})") from None
    with file:
        names = file.schema_arrow.names
        if field not in names:
            raise ValueError(f"{path} has no column {field!r}, but {_names(names)}; set text_field to one")
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            for value in batch.column(0).to_pylist():
                number += 1
                where = f"{path}, row {number}"
                yield where, _text_of({field: value}, field, where)


# ---- the hub


def _hub(
    spec: str, name: str, config: str | None, revision: str | None, field: str
) -> Iterator[tuple[str, str]]:
    datasets = importlib.import_module("datasets")
    try:
        rows = datasets.load_dataset(name, config, split="train", streaming=True, revision=revision)
    except (FileNotFoundError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{spec} is neither a file or folder here nor a hub data set with a split 'train': {reason}"
        ) from None
    return _hub_rows(spec, rows, field)


def _hub_rows(spec: str, rows: Any, field: str) -> Iterator[tuple[str, str]]:
    try:
        for number, row in enumerate(rows, 1):
            where = f"{spec}, row {number}"
            yield where, _text_of(row, field, where)
    except (ValueError, OSError):
        raise
    except Exception as error:  # network errors of several libraries; the reader tries an OSError again
        raise OSError(f"{spec}: {error}") from error


# ---- text that comes with Python


def _python_docs() -> Iterator[tuple[str, str]]:
    topics = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield f"{PYTHON_DOCS}: topic {name}", topics[name]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not NOT_PROSE & set(parts):
            name = ".".join(parts).removesuffix(".__init__")
            text = _docstrings(path, name)
            if text:
                yield f"{PYTHON_DOCS}: module {name}", text


def _docstrings(path: Path, module: str) -> str:
    """The docstrings of one module in order, each under its name; "" for a module that cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    parts = [f"{name}\n\n{text}" for name, text in _walk(tree, module) if len(text) > 80]
    return "\n\n\n".join(parts)


def _walk(node: Any, name: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")
