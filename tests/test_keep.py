"""Which slots tokens take: keep.py against the rule as a loop over one document, and its Triton form."""

import math

import pytest
import torch

from unsoftmax.kernels.gsa.keep import NEVER, Keep, choose_slots, ring_slots

SLOTS = (9, 4, 16)  # heads of one layer
SINKS, RECENT = 2, 5
BACKENDS = ("torch", pytest.param("triton", id="triton"))


def by_the_rule(importance, decay: float, slots: int, recent: int = RECENT) -> list[int]:
    """The slot of each token of one document and one head."""
    held: dict[int, int] = {}
    write = []
    for i in range(len(importance)):
        if i < slots:
            taken = i
        else:
            free = {m: j for m, j in held.items() if m >= SINKS and i - j >= min(recent, slots - SINKS)}
            taken = min(free, key=lambda m: importance[free[m]].item() - decay * math.log2(i - free[m]))
        held[taken] = i
        write.append(taken)
    return write


def draw(B: int, T: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    importance = 2 * torch.randn(B, T, len(SLOTS), device=device)
    return importance, torch.tensor([0.7, 0.0, 1.4], device=device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 3, 4, 17, 80])
def test_every_head_follows_the_rule(T, backend, device):
    importance, decay = draw(2, T, device)
    write, keep = choose_slots(importance, decay, SLOTS, sinks=SINKS, recent=RECENT, backend=backend)
    for b in range(2):
        for h, slots in enumerate(SLOTS):
            want = by_the_rule(importance[b, :, h], decay[h].item(), slots)
            assert write[b, :, h].tolist() == want
            last = {slot: i for i, slot in enumerate(want)}
            born, worth = (x.split(list(SLOTS), 1)[h][b] for x in keep)
            assert born.tolist() == [last.get(m, NEVER) for m in range(slots)]
            for m, i in last.items():
                assert worth[m] == (importance[b, i, h] if m >= SINKS else 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_with_padding_anywhere_choose_as_the_whole_does(backend, device):
    T, options = 60, {"sinks": SINKS, "recent": RECENT, "backend": backend}
    importance, decay = draw(1, T, device)
    want, end = choose_slots(importance, decay, SLOTS, **options)
    real = torch.ones(1, 90, dtype=torch.bool, device=device)
    real[0, torch.randperm(90)[:30]] = False
    padded = torch.full((1, 90, len(SLOTS)), 50.0, device=device)
    padded[real] = importance[0]
    state, found = None, []
    for part in torch.arange(90, device=device).split([1, 1, 30, 8, 50]):
        here = real[:, part]
        seen = 0 if state is None else int(real[:, : part[0]].sum())
        seen = torch.tensor([seen], device=device)
        kept = None if state is None else [x.clone() for x in state]
        write, new = choose_slots(padded[:, part], decay, SLOTS, real=here, seen=seen, state=state, **options)
        if state is not None:
            assert all(torch.equal(a, b) for a, b in zip(kept, state)), "the state given in was changed"
        assert (write[~here] == -1).all()
        found.append(write[here])
        state = new
    assert torch.equal(torch.cat(found), want[0])
    assert torch.equal(state.born, end.born)
    assert torch.equal(state.importance, end.importance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_choose_as_each_does_alone(backend, device):
    lengths = [0, 1, 40, 0, 17, 3, 25, 0]
    importance, decay = draw(1, sum(lengths), device)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    options = {"sinks": SINKS, "recent": RECENT, "backend": backend}
    write, keep = choose_slots(importance, decay, SLOTS, cu_seqlens=cu, **options)
    assert len(keep.born) == len(lengths)
    for n, (own, part) in enumerate(zip(importance.split(lengths, 1), write.split(lengths, 1))):
        alone, end = choose_slots(own, decay, SLOTS, **options)
        assert torch.equal(part, alone)
        assert torch.equal(keep.born[n], end.born[0])
        assert torch.equal(keep.importance[n], end.importance[0])


@pytest.mark.parametrize(
    "kind, recent", [("drawn", 16), ("drawn", 5), ("alike", 16), ("smooth", 16), ("rising", 16)]
)
def test_more_slots_than_a_warp_holds_make_the_same_choice(recent, kind, device):
    importance = 2 * torch.randn(1, 250, 2, device=device)
    slots, decay = (110, 28), torch.tensor([1.0, 0.3], device=device)
    if kind == "alike":  # ties in nearly every step
        importance, decay = importance.round(), torch.zeros_like(decay)
    elif kind == "smooth":
        importance = importance.cumsum(1) / 8
    elif kind == "rising":  # worth more with age
        decay = -decay
    found = []
    for backend in ("torch", "triton"):
        options = {"sinks": 4, "recent": recent, "backend": backend}
        write, state = choose_slots(importance[:, :200], decay, slots, **options)
        seen = torch.full((1,), 200, device=device)
        more, end = choose_slots(importance[:, 200:], decay, slots, seen=seen, state=state, **options)
        found.append((write, *state, more, *end))
    for name, want, ours in zip(("write", "born", "importance", "more", "last", "its"), *found):
        assert torch.equal(want, ours), name


def test_a_slot_out_of_sight_is_taken_when_it_is_worth_least(device):
    """Worth hangs on age, so that of 200 slots others come to be the least than those a warp holds."""
    importance, decay = torch.randn(1, 800, 1, device=device) / 2, torch.ones(1, device=device)
    options = {"sinks": 4, "recent": 16, "keep_state": False}
    want, ours = (
        choose_slots(importance, decay, (200,), backend=b, **options)[0] for b in ("torch", "triton")
    )
    assert torch.equal(want, ours)


@pytest.mark.parametrize("T", [1, 2, 3, 9, 50])
def test_with_all_slots_recent_it_is_the_ring(T, device):
    importance, decay = draw(2, T, device)
    want, end = choose_slots(importance, decay, SLOTS, sinks=SINKS, recent=max(SLOTS))
    index = torch.arange(T, device=device).expand(2, T)
    write, keep = ring_slots(index, torch.full((2,), T, device=device), SLOTS, SINKS, None)
    assert torch.equal(write, want)
    assert torch.equal(keep.born, end.born)


def test_a_later_token_changes_no_earlier_choice(device):
    importance, decay = draw(1, 60, device)
    options = {"sinks": SINKS, "recent": RECENT}
    whole = choose_slots(importance, decay, SLOTS, **options)[0]
    short = choose_slots(importance[:, :40], decay, SLOTS, **options)[0]
    assert torch.equal(whole[:, :40], short)


def test_no_tokens_leave_the_slots_as_they_are(device):
    importance, decay = draw(2, 30, device)
    options = {"sinks": SINKS, "recent": RECENT}
    state = choose_slots(importance, decay, SLOTS, **options)[1]
    seen = torch.full((2,), 30, device=device)
    write, after = choose_slots(importance[:, :0], decay, SLOTS, seen=seen, state=state, **options)
    assert write.shape == (2, 0, len(SLOTS))
    assert isinstance(after, Keep)
    assert all(torch.equal(a, b) for a, b in zip(state, after))


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_slots_worth_the_same_the_first_is_taken(backend, device):
    importance, decay = torch.zeros(1, 40, 1, device=device), torch.zeros(1, device=device)
    importance[:, ::3] = -0.0
    write, _ = choose_slots(importance, decay, (9,), sinks=SINKS, recent=1, backend=backend)
    assert write[0, :, 0].tolist() == by_the_rule(importance[0, :, 0], 0.0, 9, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_latest_token_alone_may_be_the_next_to_go(backend, device):
    importance, decay = draw(1, 60, device)
    write, _ = choose_slots(importance, decay, SLOTS, sinks=SINKS, recent=1, backend=backend)
    for h, slots in enumerate(SLOTS):
        assert write[0, :, h].tolist() == by_the_rule(importance[0, :, h], decay[h].item(), slots, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_wants_no_state_gets_none_and_the_same_choice(backend, device):
    importance, decay = draw(2, 40, device)
    options = {"sinks": SINKS, "recent": RECENT, "backend": backend}
    write, _ = choose_slots(importance, decay, SLOTS, **options)
    again, state = choose_slots(importance, decay, SLOTS, keep_state=False, **options)
    assert state is None and torch.equal(write, again)
