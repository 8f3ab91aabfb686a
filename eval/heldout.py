"""Perplexity by position and recall on held-out text, and the check that a model is fit to be scored."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from unsoftmax.convert.measure import measure, token_ids, token_rows
from unsoftmax.eval.suites import Suite
from unsoftmax.recipes.text import documents

PROBE = (
    "The harbour was quiet that morning. Two boats had come in before dawn, and their crews were asleep. "
    "A list of numbers follows: 3, 1, 4, 1, 5, 9, 2, 6. Water boils at one hundred degrees Celsius at sea "
    "level, and lower on a mountain, because the pressure of the air is less there."
)
PYTHON_DOCS = "python-docs"
TOKENS_AT_ONCE = 16_384  # in one forward pass, so that long rows go one by one


def held_out_rows(text: str, tokenizer: Any, suite: Suite, limit: int | None = None) -> torch.Tensor:
    """Rows of held-out tokens, [rows, row_tokens] int64, as the suite asks; fewer if the text is short.

    text: what `unsoftmax.recipes.text.documents` reads; of "python-docs" the tenth that is set aside, of any
    other all. Documents are joined by the end-of-text token.
    Raises ValueError if the text does not fill one row.
    """
    count = suite.rows if limit is None else min(limit, suite.rows)
    ids = filler_tokens(text, tokenizer, None if suite.spaced else count * suite.row_tokens)
    if len(ids) < suite.row_tokens:
        raise ValueError(
            f"--text {text} has {len(ids):,} tokens to score, fewer than one row of "
            f"{suite.row_tokens:,}; give a longer text"
        )
    return token_rows(ids, suite.row_tokens, count, spaced=suite.spaced)


def filler_tokens(text: str, tokenizer: Any, tokens: int | None) -> list[int]:
    """The first so many held-out tokens of a text, or as many as there are; None: all."""
    # A text that is named for scoring is held out as a whole; Python's own text is also trained on.
    apart = True if text == PYTHON_DOCS else None
    return token_ids(tokenizer, documents(text, held_out=apart), limit=tokens)


def measure_rows(
    model: Any, rows: torch.Tensor, *, batch_size: int = 8, progress: Any = None
) -> dict[str, Any]:
    """`unsoftmax.convert.measure.measure` as a dict, with fewer rows at once where they are long."""
    batch = max(1, min(batch_size, TOKENS_AT_ONCE // rows.shape[1]))
    return measure(model, rows, batch=batch, progress=progress).to_dict()


@torch.no_grad()
def check_fit(model: Any, tokenizer: Any, name: str) -> None:
    """Raise ValueError if scores cannot mean anything: weights not finite, collapsed, a foreign tokenizer."""
    for key, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if value.is_floating_point() and not value.isfinite().all():
            bad = int((~value.isfinite()).sum())
            raise ValueError(
                f"{name}: {key} has {bad:,} of {value.numel():,} values that are not finite; "
                "scores of such a model mean nothing. Take an earlier checkpoint of the run."
            )
    ids = torch.tensor([tokenizer(PROBE)["input_ids"]], device=model.device)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= vocabulary:
        raise ValueError(
            f"{name}: the tokenizer makes token {int(ids.max())}, but the model knows only {vocabulary}; "
            "copy the tokenizer files of the source checkpoint into the folder"
        )
    logits = model(ids).logits[0].float()
    if not logits.isfinite().all():
        raise ValueError(f"{name}: its outputs are not finite on plain text, though its weights are")
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).item()
    if loss > math.log(vocabulary) + 1:
        raise ValueError(
            f"{name} has collapsed: its loss on plain English is {loss:.1f} nats a token, worse than "
            f"guessing among its {vocabulary:,} tokens ({math.log(vocabulary):.1f})"
        )
    if torch.allclose(logits, logits[:1].expand_as(logits), atol=1e-6):
        raise ValueError(f"{name} has collapsed: it predicts the same whatever the text")


def text_lines(measured: dict[str, Any]) -> dict[str, float | None]:
    """Label to figure of a measurement's dict: perplexity, its error, recall, perplexity by position."""
    error = measured["standard_error"]
    lines: dict[str, float | None] = {
        "perplexity": measured["ppl"],
        "perplexity, standard error": None if error is None else measured["ppl"] * error,
        "recall nll": measured["recall_nll"],
    }
    for bucket in measured["by_position"]:
        lines[f"perplexity at {bucket['from']:,}-{bucket['to'] - 1:,}"] = bucket["ppl"]
    return lines


def paired_lines(ours: dict[str, Any], theirs: dict[str, Any] | None) -> list[tuple[str, Any, Any]]:
    """Label, our figure, the teacher's (None without one)."""
    other = {} if theirs is None else text_lines(theirs)
    return [(label, value, other.get(label)) for label, value in text_lines(ours).items()]
