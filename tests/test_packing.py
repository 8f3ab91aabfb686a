import io
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from unsoftmax.train import packing
from unsoftmax.train.packing import IGNORE, Prefetch, Source, TokenRows, batches, collate

EOS = 0


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id = EOS

    def __call__(self, text, *, add_special_tokens, verbose):
        return SimpleNamespace(input_ids=[ord(c) for c in text])


def texts(seed, count=40):
    r = random.Random(seed)
    return ["".join(r.choice("abcdefgh") for _ in range(r.choice([0, 1, 3, 17, 60]))) for _ in range(count)]


def source(name, seed, weight=1.0):
    return Source(name, lambda: iter(texts(seed)), weight)


def stream(*, apart=True, shuffle=5, row=16, seed=0, sources=None):
    sources = sources or [source("a", 1, 3.0), source("b", 2, 1.0)]
    return TokenRows(sources, Letters(), row_tokens=row, apart=apart, shuffle_documents=shuffle, seed=seed)


def take(rows, count):
    return [(r.tokens.tolist(), r.labels.tolist(), r.starts) for r in itertools.islice(rows, count)]


def test_rows_hold_every_token_of_every_document_once_and_in_order():
    documents = [t for t in texts(1) if t]
    rows = TokenRows([source("a", 1)], Letters(), row_tokens=16, apart=True)
    wanted = [c for t in documents for c in [*map(ord, t), EOS]]
    found = np.concatenate([r.tokens for r in itertools.islice(rows, len(wanted) // 16)])
    assert found.tolist() == wanted[: len(found)]


def test_a_shuffled_epoch_holds_each_document_once():
    documents = [t for t in texts(1) if t]
    rows = stream(sources=[source("a", 1)], shuffle=7)
    drawn = [bytes(rows._draw()[:-1].tolist()).decode() for _ in range(len(documents) - 7)]
    again = [bytes(d[:-1].tolist()).decode() for d in rows._buffer]
    ahead = sum(r.epoch for r in rows._readers)
    assert drawn != documents[: len(drawn)]
    assert ahead == 0
    assert sorted(drawn + again) == sorted(documents[: len(drawn) + len(again)])


@pytest.mark.parametrize("apart", [True, False], ids=["documents apart", "plain stream"])
def test_a_label_is_the_next_token_of_the_same_document(apart):
    rows = itertools.islice(stream(apart=apart), 30)
    for row, after in itertools.pairwise(rows):
        following = [*row.tokens[1:], after.tokens[0]]
        for token, label, nxt in zip(row.tokens, row.labels, following, strict=True):
            assert label == (IGNORE if apart and token == EOS else nxt)


def test_starts_are_the_tokens_after_an_end_of_text():
    for tokens, _, starts in take(stream(), 30):
        assert starts == [0, *(i + 1 for i, t in enumerate(tokens[:-1]) if t == EOS)]


def test_collated_rows_mark_documents_and_rows():
    rows = list(itertools.islice(stream(), 3))
    apart, plain = collate(rows, apart=True), collate(rows, apart=False)
    assert apart.input_ids.shape == (1, 48)
    assert plain.input_ids.shape == (3, 16)
    assert torch.equal(apart.input_ids.view(3, 16), plain.input_ids)
    assert plain.cu_seqlens is None
    bounds = apart.cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == 48
    assert {16, 32} <= set(bounds)
    assert bounds == sorted(set(bounds))


def order(world, micro, count=3):
    """The rows of `count` global batches in the order of passes, put together from all ranks."""
    shares = [
        list(itertools.islice(batches(stream(), batch_rows=8, micro_rows=micro, rank=r, world=world), count))
        for r in range(world)
    ]
    return [
        row.tolist()
        for number in range(count)
        for passes in zip(*(share[number].passes for share in shares), strict=True)
        for p in passes
        for row in p.input_ids.view(-1, 16)
    ]


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (2, 2), (4, 1), (8, 1)])
def test_ranks_share_the_same_rows_whatever_their_number(world, micro):
    assert order(world, micro) == order(1, 8) == [t for t, _, _ in take(stream(), 24)]


def test_every_rank_counts_the_targets_of_the_whole_batch():
    first, second = (next(batches(stream(), batch_rows=8, micro_rows=2, rank=r, world=2)) for r in (0, 1))
    labels = [p.labels for batch in (first, second) for p in batch.passes]
    assert first.targets == second.targets == sum(int((x != IGNORE).sum()) for x in labels)
    assert first.tokens == 8 * 16


@pytest.mark.parametrize("at", [0, 1, 3, 5, 7, 29])
def test_a_restored_stream_goes_on_at_the_exact_token_also_the_second_time(at):
    whole = take(stream(), at + 40)
    once = stream()
    take(once, at)
    file = io.BytesIO()
    torch.save(once.state_dict(), file)
    take(once, 9)  # a state does not follow the stream it was taken from
    file.seek(0)
    twice = stream()
    twice.load_state_dict(torch.load(file, weights_only=True))
    assert take(twice, 11) == whole[at : at + 11]
    thrice = stream()
    thrice.load_state_dict(twice.state_dict())
    assert take(thrice, 29) == whole[at + 11 : at + 40]


def test_the_seed_alone_changes_the_order():
    assert take(stream(seed=1), 20) == take(stream(seed=1), 20)
    assert take(stream(seed=1), 20) != take(stream(seed=2), 20)


def test_sources_are_mixed_by_weight_in_tokens():
    rows = stream(sources=[source("a", 1, 3.0), source("b", 2, 1.0)])
    take(rows, 300)
    a, b = (r.tokens for r in rows._readers)
    assert a / (a + b) == pytest.approx(0.75, abs=0.03)


def test_a_read_that_fails_is_tried_again_and_nothing_is_lost_or_repeated(monkeypatch):
    monkeypatch.setattr(packing.time, "sleep", lambda _: None)
    failed = set()

    def flaky():
        for number, text in enumerate(texts(1)):
            if number % 10 == 9 and number not in failed:
                failed.add(number)
                raise ConnectionError("the network is away")
            yield text

    assert take(stream(sources=[Source("a", flaky)]), 60) == take(stream(sources=[source("a", 1)]), 60)


def test_a_source_that_stays_away_is_named(monkeypatch):
    monkeypatch.setattr(packing.time, "sleep", lambda _: None)

    def dead():
        raise ConnectionError("the network is away")
        yield ""

    with pytest.raises(OSError, match="corpus: document 0 failed 5 times: the network is away"):
        next(stream(sources=[Source("corpus", dead)]))


@pytest.mark.parametrize("documents", [[], ["", ""]], ids=["no documents", "empty documents"])
def test_a_source_without_text_is_named(documents):
    with pytest.raises(ValueError, match="corpus"):
        next(stream(sources=[Source("corpus", lambda: iter(documents))]))


def test_other_sources_are_refused():
    with pytest.raises(ValueError, match=r"data\.sources changed: the position is one in a, b"):
        stream(sources=[source("c", 1)]).load_state_dict(stream().state_dict())


def test_prefetched_batches_are_the_same_and_errors_come_through():
    plain = list(itertools.islice(batches(stream(), batch_rows=4, micro_rows=2, rank=0, world=1), 5))
    with Prefetch(batches(stream(), batch_rows=4, micro_rows=2, rank=0, world=1)) as ahead:
        found = [ahead.next()[0] for _ in range(5)]
    for ours, theirs in zip(found, plain, strict=True):
        assert torch.equal(ours.passes[1].input_ids, theirs.passes[1].input_ids)
        assert ours.position["draws"] == theirs.position["draws"]

    def broken():
        raise ValueError("bad text")
        yield

    with Prefetch(broken()) as ahead, pytest.raises(ValueError, match="bad text"):
        ahead.next()
