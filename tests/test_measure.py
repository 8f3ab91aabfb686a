"""Perplexity, its parts by position, and which tokens need recall."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unsoftmax.convert.measure import measure, recall_mask, summarise, token_ids, token_rows


def recall_mask_by_definition(rows: torch.Tensor, gap: int) -> torch.Tensor:
    mask = torch.zeros(rows.shape, dtype=torch.bool)
    for r, row in enumerate(rows.tolist()):
        last: dict[tuple[int, int], int] = {}
        for t in range(1, len(row)):
            bigram = (row[t - 1], row[t])
            mask[r, t] = bigram in last and t - last[bigram] > gap
            last[bigram] = t
    return mask


RECALL_CASES = {  # rows, length, vocabulary, gap
    "many repeats near and far": (3, 400, 6, 20),
    "the default gap": (2, 600, 12, 128),
    "nothing repeats": (1, 50, 10**6, 0),
    "one token only": (2, 300, 1, 128),
    "row shorter than the gap": (2, 30, 3, 128),
}


@pytest.mark.parametrize("case", RECALL_CASES.values(), ids=RECALL_CASES)
def test_recall_tokens_are_those_of_the_definition(case):
    R, T, vocabulary, gap = case
    rows = torch.randint(vocabulary, (R, T), generator=torch.Generator().manual_seed(1))
    assert torch.equal(recall_mask(rows, gap), recall_mask_by_definition(rows, gap))


def test_a_bigram_repeated_just_outside_the_gap_counts_and_just_inside_does_not():
    for distance, counts in ((129, True), (128, False)):
        row = torch.arange(10, 310)
        row[50:52] = torch.tensor([1, 2])
        row[50 + distance : 52 + distance] = torch.tensor([1, 2])
        assert recall_mask(row[None])[0].nonzero().flatten().tolist() == ([51 + distance] if counts else [])


def test_rows_are_the_first_or_spaced_evenly():
    ids = list(range(100))
    assert token_rows(ids, 10, 3)[:, 0].tolist() == [0, 10, 20]
    assert token_rows(ids, 10, 3, spaced=True)[:, 0].tolist() == [0, 30, 60]
    assert token_rows(ids, 10, 99).shape == (10, 10)
    with pytest.raises(ValueError, match="has 9 tokens; at least 10"):
        token_rows(ids[:9], 10, 1)


def test_each_document_ends_with_eos():
    class Letters:
        eos_token_id = 0

        def __call__(self, text, add_special_tokens, verbose):
            return type("Encoded", (), {"input_ids": [ord(c) for c in text]})

    assert token_ids(Letters(), ["ab", "", "c"]) == [97, 98, 0, 0, 99, 0]
    assert token_ids(Letters(), ["ab", "c"], limit=4) == [97, 98, 0, 99]


def test_the_summary_adds_up():
    rows = torch.randint(5, (4, 300), generator=torch.Generator().manual_seed(2))
    nll = torch.rand(4, 299, generator=torch.Generator().manual_seed(3))
    m = summarise(nll, rows)
    assert m.tokens == 4 * 299 and m.rows == 4
    assert [(a, b) for a, b, _, _ in m.by_position] == [(1, 64), (64, 128), (128, 256), (256, 300)]
    assert sum(n for *_, n in m.by_position) == m.tokens
    assert sum(math.log(p) * n for _, _, p, n in m.by_position) / m.tokens == pytest.approx(m.nll)
    assert m.by_position[1][2] == pytest.approx(nll[:, 63:127].double().mean().exp().item())
    mask = recall_mask(rows)[:, 1:]
    assert m.recall_tokens == mask.sum() and m.recall_nll == pytest.approx(nll[mask].mean().item(), rel=1e-6)
    assert m.standard_error == pytest.approx(nll.mean(1).std().item() / 2, rel=1e-5)


def test_without_recall_tokens_the_record_says_null():
    m = summarise(torch.ones(1, 9), torch.arange(10)[None])
    assert math.isnan(m.recall_nll) and m.to_dict()["recall_nll"] is None
    assert m.to_dict()["standard_error"] is None
    assert m.line() == "ppl 2.72"  # one row has no spread between rows


def test_the_line_has_the_error_where_there_are_rows_to_tell_it():
    m = summarise(torch.tensor([[1.0] * 9, [2.0] * 9]), torch.arange(20).view(2, 10))
    assert m.line() == "ppl 4.48 ± 2.24"


def test_the_loss_is_the_model_s_own_and_the_mode_is_left_as_it_was():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = LlamaForCausalLM(config).train()
    rows = torch.randint(32, (3, 40))
    m = measure(model, rows, batch=2)
    assert model.training
    losses = [model.eval()(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    assert m.nll == pytest.approx(sum(losses) / 3, rel=1e-5)
