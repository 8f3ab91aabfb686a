"""Facts planted in text and asked for at its end: how far back a model recalls, and how many at once.

A row is held-out text with sentences " The KEY is kept with the VALUE." put into it, and at its end the same
sentences once more, in another order; a fact is found if every token of VALUE is the likeliest where it is
due. needle: one fact a row, its place moving from the row's start to its end over the rows. keys: KEYS facts
a row, spread evenly, all asked for (multi-query associative recall in words, Arora et al. 2023,
arXiv:2312.04927). Words and places come from a seed: the same rows for every model with the same tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

KEYS = 8  # facts of a row of "keys"
SEED = 20_240_911
THINGS = """
anchor apple arrow basket bell blanket boat book bottle bowl box bridge broom brush bucket button
candle carpet chair clock coat coin compass cup curtain diamond door drum engine feather flag flute
fork garden glass glove guitar hammer hat helmet horse kettle key knife ladder lamp lantern letter
lock map mirror needle painting pen piano pillow plate ring rope saddle shirt shovel spoon statue
table tent towel train umbrella vase violin wagon wallet wheel whistle window
""".split()  # noqa: SIM905


class Row(NamedTuple):
    """tokens [length] int64; for every answer, where its tokens stand."""

    tokens: torch.Tensor
    answers: list[range]


def planted_rows(tokenizer: Any, filler: Sequence[int], length: int, facts: int, count: int) -> list[Row]:
    """`count` rows of `length` tokens with so many facts each, filled from the tokens of `filler`.

    Raises ValueError if the facts leave no room for text.
    """
    chance, rows = random.Random(f"{SEED} {length} {facts}"), []
    for n in range(count):
        words = chance.sample(THINGS, 2 * facts)
        pairs = list(zip(words[:facts], words[facts:]))
        told = [_ids(tokenizer, f" The {key} is kept with the {value}.") for key, value in pairs]
        asked: list[int] = []
        answers = []
        for key, value in chance.sample(pairs, facts):
            asked += _ids(tokenizer, f" The {key} is kept with the")
            wanted = _ids(tokenizer, f" {value}")
            answers.append((len(asked), len(wanted)))
            asked += [*wanted, *_ids(tokenizer, ".")]
        room = length - len(asked) - sum(map(len, told))
        if room < facts:
            raise ValueError(f"rows of {length} tokens have no room for {facts} facts; use {4 * length}")
        start = chance.randrange(max(1, len(filler) - room))
        text = [filler[(start + t) % len(filler)] for t in range(room)]
        for place, sentence in sorted(zip(_places(n, count, facts, room), told), reverse=True):
            text[place:place] = sentence
        first = len(text)
        spans = [range(first + at, first + at + size) for at, size in answers]
        rows.append(Row(torch.tensor(text + asked), spans))
    return rows


def _places(n: int, count: int, facts: int, room: int) -> list[int]:
    """Where in a row's text its facts go: one moves with the row's number, several are spread."""
    shares = [(n + 0.5) / count] if facts == 1 else [(f + 0.5) / facts for f in range(facts)]
    return [int(share * room) for share in shares]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


@torch.no_grad()
def found(model: Any, row: Row) -> tuple[list[bool], list[float]]:
    """Of each answer in a row: whether all its tokens are the likeliest, and its loss in nats."""
    due = torch.tensor([place - 1 for span in row.answers for place in span], device=model.device)
    tokens = row.tokens.to(model.device)
    logits = model(tokens[None], use_cache=False, logits_to_keep=due).logits[0].float()
    wanted = tokens[due + 1]
    right = (logits.argmax(-1) == wanted).tolist()
    losses = F.cross_entropy(logits, wanted, reduction="none").tolist()
    hits, nlls, at = [], [], 0
    for span in row.answers:
        hits.append(all(right[at : at + len(span)]))
        nlls.append(sum(losses[at : at + len(span)]))
        at += len(span)
    return hits, nlls


def planted_tasks(
    model: Any,
    tokenizer: Any,
    filler: Sequence[int],
    lengths: Sequence[int],
    count: int,
    limit: int | None,
    not_run: dict[str, str],
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Task name to its result, as lm-eval's tasks have it: shares found and losses, by length and kind.

    Rows too short for their facts, as with a tokenizer of bytes, go into `not_run` with the reason.
    """
    results = {}
    rows = count if limit is None else min(count, limit)
    for length in lengths:
        for kind, facts in (("needle", 1), (f"{KEYS} keys", KEYS)):
            name = f"{kind} in {length:,} tokens"
            try:
                planted = planted_rows(tokenizer, filler, length, facts, rows)
            except ValueError as error:
                not_run[name] = f"{name}: {error}"
                continue
            hits: list[float] = []
            nlls: list[float] = []
            for row in planted:
                ours, losses = found(model, row)
                hits.append(sum(ours) / len(ours))
                nlls.append(sum(losses) / len(losses))
            scores = (("found", hits, True), ("nll", nlls, False))
            results[name] = {
                "metrics": [_metric(metric, values, higher) for metric, values, higher in scores],
                "version": 1,
                "shots": [0],
                "items": rows * facts,
                "items_in_full": count * facts,
                "members": {},
                "letters": None,
                "generated": None,
            }
            say(f"{name}: found {results[name]['metrics'][0]['score']:.3f}")
    return results


def _metric(name: str, values: list[float], higher_is_better: bool) -> dict[str, Any]:
    """Mean over rows and its standard error."""
    x = torch.tensor(values, dtype=torch.float64)
    error = (x.std() / len(x) ** 0.5).item() if len(x) > 1 else None
    score = {"metric": name, "filter": "none", "score": x.mean().item(), "stderr": error}
    return score | {"higher_is_better": higher_is_better}
