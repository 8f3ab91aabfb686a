"""Planted facts stand where they are said to, and are found by who remembers and by nobody else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from test_model import KEPT, RING, converted
from tiny import VOCABULARY, tiny_model, tiny_tokenizer
from unsoftmax.eval.harness import score_model
from unsoftmax.eval.planted import KEYS, found, planted_rows, planted_tasks
from unsoftmax.eval.suites import SUITES, Suite

WORDS = tiny_tokenizer()
FILLER = WORDS(
    "Long ago there was a town by the sea, where nothing was ever kept with anything. " * 40
).input_ids


class Reader:
    """A model that looks up, in the last `reach` tokens, what followed the same 24 tokens before."""

    device = torch.device("cpu")

    def __init__(self, reach: int) -> None:
        self.reach = reach

    def __call__(self, ids: torch.Tensor, use_cache: bool, logits_to_keep: torch.Tensor) -> SimpleNamespace:
        text, logits = ids[0].tolist(), torch.zeros(1, len(logits_to_keep), VOCABULARY)
        for n, at in enumerate(logits_to_keep.tolist()):
            asked = text[at - 23 : at + 1]
            for start in range(max(0, at - self.reach), at - 24):
                if text[start : start + 24] == asked:
                    logits[0, n, text[start + 24]] = 9.0
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("facts", [1, KEYS])
def test_rows_are_as_long_as_asked_and_hold_every_fact_twice(facts):
    for row in planted_rows(WORDS, FILLER, 1500, facts, 6):
        assert row.tokens.shape == (1500,) and len(row.answers) == facts
        text = WORDS.decode(row.tokens)
        for span in row.answers:
            value = WORDS.decode(row.tokens[span.start : span.stop])
            sentence = text[: text.rfind(f"with the{value}.")].rsplit(" The ", 1)[1] + f"with the{value}."
            assert text.count(f" The {sentence}") == 2, sentence


def test_one_fact_moves_from_the_start_to_the_end():
    rows = planted_rows(WORDS, FILLER, 1500, 1, 5)
    places = [WORDS.decode(row.tokens).find(" The ") for row in rows]
    assert places == sorted(places) and places[0] < 200 and places[-1] > 1200


def test_rows_are_the_same_every_time_and_others_at_another_length():
    first, second, other = (planted_rows(WORDS, FILLER, n, 1, 2) for n in (500, 500, 501))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second))
    assert not torch.equal(first[0].tokens[:90], other[0].tokens[:90])


def test_who_remembers_finds_all_and_who_does_not_finds_what_is_near():
    tasks = planted_tasks(Reader(10_000), WORDS, FILLER, [1500], 8, None, {}, say=lambda line: None)
    assert [t["metrics"][0]["score"] for t in tasks.values()] == [1.0, 1.0]
    short = planted_tasks(Reader(500), WORDS, FILLER, [1500], 8, None, {}, say=lambda line: None)
    needle = short["needle in 1,500 tokens"]["metrics"][0]
    assert needle["score"] == pytest.approx(2 / 8) and needle["stderr"] > 0
    blind = planted_tasks(Reader(0), WORDS, FILLER, [1500], 8, None, {}, say=lambda line: None)
    assert [t["metrics"][0]["score"] for t in blind.values()] == [0.0, 0.0]


def test_one_wrong_token_is_a_miss():
    row = planted_rows(WORDS, FILLER, 800, 1, 1)[0]

    class Almost(Reader):
        def __call__(self, ids, use_cache, logits_to_keep):
            seen = super().__call__(ids, use_cache, logits_to_keep)
            seen.logits[0, -1] = torch.eye(VOCABULARY)[0] * 99
            return seen

    assert found(Reader(10_000), row)[0] == [True]
    assert found(Almost(10_000), row)[0] == [False]


def test_a_suite_scores_them_beside_its_tasks_and_says_what_is_too_long():
    model = converted(tiny_model(max_position_embeddings=800), [RING, KEPT, RING])
    suite = Suite("planted", rows=0, planted=(100, 768, 1024), planted_rows=3)
    result = score_model(model, WORDS, "tiny", suite=suite, limit=2, say=lambda line: None)
    rows = {(row["task"], row["metric"]): row for row in result["rows"]}
    names = ("needle in 100 tokens", "needle in 768 tokens", "8 keys in 768 tokens")
    assert set(rows) == {(name, metric) for name in names for metric in ("found", "nll")}
    assert "rows of 100 tokens have no room for 8 facts" in str(result["not_run"])
    assert rows["needle in 768 tokens", "nll"]["score"] > 1
    assert rows["needle in 768 tokens", "found"]["items"] == 2
    assert "max_position_embeddings of config.json is 800" in str(result["not_run"])


def test_a_row_without_room_is_refused():
    with pytest.raises(ValueError, match="rows of 64 tokens have no room for 8 facts"):
        planted_rows(WORDS, FILLER, 64, KEYS, 1)


def test_the_suites_reach_from_256_to_16_384():
    assert {256, 1024, 4096} <= set(SUITES["recall"].planted) and 16_384 in SUITES["long"].planted
