"""From documents to batches: mixed by weight, shuffled, tokenised, packed into rows, shared over ranks.

    sources --largest deficit of tokens--> shuffle buffer --> tokens + end of text --> rows of T tokens

The stream of rows depends on the seed and the sources alone. Every rank walks the whole of it and keeps its
share of each global batch, so neither the order nor a position in it depends on how many ranks there are;
tokenising everywhere costs a few percent of one core and buys exactness. Each token is an input exactly once,
and the label of a row's last token is the token that follows it.

A position is plain data (counts, and the documents in the buffer as tokens). It names the exact token.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

IGNORE = -100  # the label of a token that has nothing to predict
PIECE = 1 << 20  # characters tokenised at once; bounds the memory that an enormous document takes
READ_ATTEMPTS = 5


@dataclass(frozen=True)
class Source:
    """One text source.

    name: as the recipe spells it. open: starts reading the documents from the first one, always in the same
    order. weight: its share of the tokens, relative to the other sources.
    """

    name: str
    open: Callable[[], Iterator[str]]
    weight: float = 1.0


class Row(NamedTuple):
    """T consecutive tokens: tokens and labels int64 [T], and where documents start in it (always at 0)."""

    tokens: np.ndarray
    labels: np.ndarray
    starts: list[int]


class MicroBatch(NamedTuple):
    """What the model takes in one pass: rows [B, T]; with documents apart, [1, B*T] and cu_seqlens [N+1]."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor | None


class Batch(NamedTuple):
    """One rank's share of a global batch.

    targets and tokens count the whole global batch, all ranks and passes; position is where the stream stands
    after it.
    """

    passes: list[MicroBatch]
    targets: int
    tokens: int
    position: dict[str, Any]


class _Reader:
    """Documents of one source, over and over, from any document on; a failed read is tried again."""

    def __init__(self, source: Source) -> None:
        self.source, self.document, self.epoch, self.tokens = source, 0, 0, 0
        self._documents: Iterator[str] | None = None

    def read(self) -> str:
        for attempt in itertools.count(1):
            try:
                return self._read()
            except OSError as error:
                self._documents = None
                if attempt == READ_ATTEMPTS:
                    raise OSError(
                        f"{self.source.name}: document {self.document} failed {attempt} times: {error}"
                    ) from error
                time.sleep(0.1 * 2**attempt)
        raise AssertionError("unreachable")

    def _read(self) -> str:
        if self._documents is None:
            self._documents = itertools.islice(self.source.open(), self.document, None)
        text = next(self._documents, None)
        if text is None and self.document == 0:
            raise ValueError(
                f"{self.source.name} holds no documents; data.sources must name text that has some"
            )
        if text is None:
            self.document, self.epoch, self._documents = 0, self.epoch + 1, None
            return self._read()
        self.document += 1
        return text

    def state(self) -> dict[str, Any]:
        return {
            "name": self.source.name,
            "document": self.document,
            "epoch": self.epoch,
            "tokens": self.tokens,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.document, self.epoch, self.tokens = state["document"], state["epoch"], state["tokens"]
        self._documents = None


class TokenRows:
    """An endless iterator of rows that can say where it is and go back there.

    Args:
        sources: mixed so that each one's share of the tokens follows its weight.
        tokenizer: its end-of-text token is added to every document.
        row_tokens: T, tokens a row.
        apart: documents do not see each other: a document's last token has no label, and starts are given.
            Otherwise rows are the plain concatenation.
        shuffle_documents: documents held back to draw the next one from; 1 keeps the sources' order.
        seed: of the draws.

    Raises:
        ValueError: a tokenizer without an end-of-text token, or a source without text.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        *,
        row_tokens: int,
        apart: bool,
        shuffle_documents: int = 1,
        seed: int = 0,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end-of-text token (eos_token); set one in tokenizer_config.json"
            )
        self.tokenizer, self.row_tokens, self.apart = tokenizer, row_tokens, apart
        self.shuffle_documents, self.seed = max(1, shuffle_documents), seed
        self._readers = [_Reader(source) for source in sources]
        self._buffer: list[np.ndarray] = []
        self._draws = 0
        self._pending: deque[np.ndarray] = deque()
        self._ready = 0  # tokens in _pending
        self._fresh = True  # whether _pending begins with a document's first token

    def __iter__(self) -> TokenRows:
        return self

    def __next__(self) -> Row:
        while self._ready <= self.row_tokens:  # one more than a row, for the label of its last token
            document = self._draw()
            self._pending.append(document)
            self._ready += len(document)
        return self._cut()

    def _encode(self, text: str) -> np.ndarray:
        ids: list[int] = []
        for i in range(0, len(text), PIECE):
            piece = self.tokenizer(text[i : i + PIECE], add_special_tokens=i == 0, verbose=False)
            ids += piece.input_ids  # with the beginning-of-text token where the model is used to one
        if ids and ids[-1] != self.tokenizer.eos_token_id:
            ids.append(self.tokenizer.eos_token_id)  # type: ignore[arg-type]
        return np.asarray(ids, dtype=np.int32)

    def _read(self) -> np.ndarray:
        total = sum(r.tokens for r in self._readers)
        weights = sum(r.source.weight for r in self._readers)
        reader = max(self._readers, key=lambda r: (total + 1) * r.source.weight / weights - r.tokens)
        epoch = reader.epoch
        while True:
            document = self._encode(reader.read())
            if len(document):
                reader.tokens += len(document)
                return document
            if reader.epoch > epoch + 1:
                raise ValueError(f"{reader.source.name}: every document is empty")

    def _draw(self) -> np.ndarray:
        while len(self._buffer) < self.shuffle_documents:
            self._buffer.append(self._read())
        at = random.Random(f"{self.seed}:{self._draws}").randrange(len(self._buffer))
        self._draws += 1
        document, self._buffer[at] = self._buffer[at], self._buffer[-1]
        self._buffer.pop()
        return document

    def _cut(self) -> Row:
        pieces, starts, taken = [], [], 0
        while taken < self.row_tokens:
            piece, rest = np.split(self._pending[0], [min(self.row_tokens - taken, len(self._pending[0]))])
            if self._fresh:
                starts.append(taken)
            pieces.append(piece)
            taken += len(piece)
            self._fresh = len(rest) == 0
            if self._fresh:
                self._pending.popleft()
            else:
                self._pending[0] = rest
        self._ready -= taken
        tokens = np.concatenate(pieces).astype(np.int64)
        labels = np.append(tokens[1:], np.int64(self._pending[0][0]))
        if self.apart:
            labels[[s - 1 for s in starts if s > 0]] = IGNORE
            if self._fresh:
                labels[-1] = IGNORE
        return Row(tokens, labels, [0, *(s for s in starts if s > 0)])

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain data and tensors (views: nothing here is changed later)."""
        return {
            "sources": [reader.state() for reader in self._readers],
            "buffer": [torch.from_numpy(d) for d in self._buffer],
            "draws": self._draws,
            "pending": [torch.from_numpy(d) for d in self._pending],
            "fresh": self._fresh,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave, also that of another process."""
        names = [s["name"] for s in state["sources"]]
        if names != [r.source.name for r in self._readers]:
            raise ValueError(f"data.sources changed: the position is one in {', '.join(names)}")
        for reader, saved in zip(self._readers, state["sources"], strict=True):
            reader.restore(saved)
        self._buffer = [d.numpy() for d in state["buffer"]]
        self._draws, self._fresh = state["draws"], state["fresh"]
        self._pending = deque(d.numpy() for d in state["pending"])
        self._ready = sum(len(d) for d in self._pending)


def collate(rows: Sequence[Row], *, apart: bool) -> MicroBatch:
    """Rows as the model takes them; with documents apart, one long row whose cu_seqlens mark rows too."""
    tokens = torch.from_numpy(np.stack([r.tokens for r in rows]))
    labels = torch.from_numpy(np.stack([r.labels for r in rows]))
    if not apart:
        return MicroBatch(tokens, labels, None)
    T = tokens.shape[1]
    bounds = [i * T + s for i, r in enumerate(rows) for s in r.starts] + [tokens.numel()]
    return MicroBatch(tokens.view(1, -1), labels.view(1, -1), torch.tensor(bounds, dtype=torch.int32))


def batches(rows: TokenRows, *, batch_rows: int, micro_rows: int, rank: int, world: int) -> Iterator[Batch]:
    """One rank's share of each global batch of `batch_rows` rows.

    Pass i of a rank takes `micro_rows` rows from row (i world + rank) micro_rows on.
    """
    while True:
        block = [next(rows) for _ in range(batch_rows)]
        passes = [
            collate(block[i : i + micro_rows], apart=rows.apart)
            for i in range(rank * micro_rows, batch_rows, world * micro_rows)
        ]
        targets = sum(int((r.labels != IGNORE).sum()) for r in block)
        yield Batch(passes, targets, batch_rows * rows.row_tokens, rows.state_dict())


class Prefetch:
    """Runs an iterator in a thread, `ahead` items ahead; `next` says how long the caller had to wait.

    An exception of the iterator comes out of `next`. Use as a context manager, or call `close`.
    """

    def __init__(self, items: Iterator[Batch], ahead: int = 2) -> None:
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), daemon=True)
        self._thread.start()

    def _fill(self, items: Iterator[Batch]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def next(self) -> tuple[Batch, float]:
        """The next item, and the seconds waited for it."""
        began = time.perf_counter()
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item, time.perf_counter() - began

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
