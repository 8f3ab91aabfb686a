"""What a language model knows of held-out text: perplexity, by position in the row, and recall.

Recall is the loss on tokens that only memory can predict: those whose bigram (the token before, the token)
occurred before in the row, but for the last time more than 128 tokens back, out of reach of a short window.
A conversion is good when it beats the window control there.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

RECALL_GAP = 128  # tokens; beyond twice the window of a 64-slot ring
FIRST_BUCKET = 64  # tokens; buckets double from here
HEAD_TOKENS = 1024  # logits of so many tokens exist at a time


@dataclasses.dataclass(frozen=True)
class Setting:
    """Which rows are scored: the first `rows` of `length` tokens, or as many spaced evenly over the text."""

    rows: int
    length: int
    spaced: bool


SETTINGS = {"2k": Setting(96, 2048, False), "640": Setting(12, 640, True)}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Losses in nats a token, over every token of a row but the first.

    ppl: exp(nll). standard_error: of nll, from the spread between rows (nan for one row).
    recall_nll: over the recall tokens (nan if there are none), recall_tokens of them.
    by_position: (first position, last position + 1, ppl, tokens) a bucket of target positions.
    """

    ppl: float
    nll: float
    standard_error: float
    tokens: int
    rows: int
    recall_nll: float
    recall_tokens: int
    by_position: tuple[tuple[int, int, float, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON values; what is not a number becomes None."""
        d = dataclasses.asdict(self)
        d["by_position"] = [
            {"from": a, "to": b, "ppl": ppl, "tokens": n} for a, b, ppl, n in self.by_position
        ]
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in d.items()}

    def line(self) -> str:
        error = "" if math.isnan(self.standard_error) else f" ± {self.ppl * self.standard_error:.2f}"
        recall = f"   recall nll {self.recall_nll:.3f} ({self.recall_tokens} tokens)"
        return f"ppl {self.ppl:.2f}{error}{recall if self.recall_tokens else ''}"


def token_ids(tokenizer: Any, documents: Iterable[str], limit: int | None = None) -> list[int]:
    """Token ids of the documents one after another, each followed by eos; stops at `limit` tokens."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token, which ends each document; set eos_token")
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document, add_special_tokens=False, verbose=False).input_ids
        ids.append(tokenizer.eos_token_id)
        if limit is not None and len(ids) >= limit:
            return ids[:limit]
    return ids


def token_rows(ids: Sequence[int], length: int, count: int, spaced: bool = False) -> torch.Tensor:
    """Cut ids into rows [at most count, length] int64: the first ones, or ones spaced evenly over all.

    ValueError if the ids do not fill one row.
    """
    whole = len(ids) // length
    if not whole:
        raise ValueError(f"the text has {len(ids)} tokens; at least {length} are needed for one row")
    step = max(1, whole // count) if spaced else 1
    starts = range(0, whole * length, step * length)[:count]
    return torch.stack([torch.as_tensor(ids[s : s + length], dtype=torch.int64) for s in starts])


def recall_mask(rows: torch.Tensor, gap: int = RECALL_GAP) -> torch.Tensor:
    """Where a token of rows [R, T] is a recall token, [R, T] bool; never at position 0.

    Position t is one if its bigram (token t - 1, token t) occurred before in the row, and the last time
    was more than `gap` positions earlier.
    """
    rows = rows.long()
    bigram = rows[:, :-1] * (int(rows.max()) + 1) + rows[:, 1:]
    value, place = bigram.sort(dim=1, stable=True)  # equal bigrams side by side, in order of position
    again = (value[:, 1:] == value[:, :-1]) & (place[:, 1:] - place[:, :-1] > gap)
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[:, 1:].scatter_(1, place[:, 1:], again)
    return mask


def measure(
    model: PreTrainedModel,
    rows: torch.Tensor,
    *,
    batch: int = 8,
    dtype: torch.dtype | None = None,
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Score a causal language model on rows [R, T] of whole tokens.

    Args:
        model: a Hugging Face causal model; put in eval mode while it runs.
        batch: rows a pass.
        dtype: autocast to it (bf16 over float32 weights); None computes in the weights' own.
        progress: called with one line every few seconds.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    losses, start, said = [], time.monotonic(), time.monotonic()
    try:
        for part in rows.split(batch):
            with (
                torch.no_grad(),
                torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None),
            ):
                losses.append(_token_nll(model, part.to(device)).cpu())
            if progress and time.monotonic() - said > 5:
                said, done = time.monotonic(), sum(map(len, losses))
                rate = done * rows.shape[1] / (said - start)
                left = (len(rows) - done) * rows.shape[1] / rate
                progress(f"scored {done} of {len(rows)} rows   {rate:,.0f} tok/s   {left:.0f} s left")
    finally:
        model.train(was_training)
    return summarise(torch.cat(losses), rows)


def _token_nll(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Loss of each token but the first, [B, T - 1] float32; the logits never exist all at once."""
    hidden = model.model(input_ids=ids, use_cache=False)[0][:, :-1].flatten(0, 1)
    target, head = ids[:, 1:].flatten(), model.get_output_embeddings()
    assert head is not None, f"{type(model).__name__} has no language model head"
    parts = zip(hidden.split(HEAD_TOKENS), target.split(HEAD_TOKENS))
    nll = [F.cross_entropy(head(h).float(), t, reduction="none") for h, t in parts]
    return torch.cat(nll).view(len(ids), -1)


def summarise(nll: torch.Tensor, rows: torch.Tensor) -> Measurement:
    """The measurement of losses nll [R, T - 1] of the tokens after the first in rows [R, T]."""
    nll, recall = nll.double(), recall_mask(rows.cpu())[:, 1:]
    mean, by_row = nll.mean().item(), nll.mean(1)
    error = by_row.std().item() / math.sqrt(len(by_row)) if len(by_row) > 1 else math.nan
    recall_nll = nll[recall].mean().item() if recall.any() else math.nan
    buckets, start, end = [], 1, FIRST_BUCKET  # position t is predicted from t tokens
    while start < rows.shape[1]:
        part = nll[:, start - 1 : min(end, rows.shape[1]) - 1]
        buckets.append((start, start + part.shape[1], _exp(part.mean().item()), part.numel()))
        start, end = end, 2 * end
    return Measurement(
        _exp(mean), mean, error, nll.numel(), len(rows), recall_nll, int(recall.sum()), tuple(buckets)
    )


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf
