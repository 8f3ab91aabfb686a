"""Slot attention with one-hot writes: the operation. In the layer it is tested by test_gsa and the laws."""

import math

import pytest
import torch

from tolerance import assert_all_as_good_as, assert_as_good_as
from unsoftmax.kernels.gsa import onehot
from unsoftmax.kernels.gsa.chunked import gsa
from unsoftmax.kernels.gsa.onehot import slot_attention
from unsoftmax.kernels.gsa.onehot_reference import SlotState, slot_attention_reference, slots_of

SHAPES = {  # B, T, HQ, H, D, E, M (or one a head), W
    "plain": (2, 130, 4, 2, 8, 8, 16, 2),
    "a number of slots for each head": (2, 140, 8, 4, 8, 8, (70, 3, 16, 3), 2),
    "a token, a number of slots for each head": (2, 1, 4, 2, 4, 4, (5, 2), 1),
    "one write a token, odd sizes": (1, 100, 3, 1, 5, 7, 3, 1),
    "more slots than a chunk has tokens": (1, 150, 2, 2, 4, 4, 100, 2),
    "two slots": (1, 70, 2, 1, 4, 4, 2, 1),
    "a chunk and one token": (1, 65, 2, 1, 4, 4, 5, 2),
    "a token": (2, 1, 4, 2, 4, 4, 5, 2),
}


def inputs(shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """q, k, v, bias in float64, and writes of which some are none and some name one slot twice."""
    B, T, HQ, H, D, E, M, W = shape
    q, k, v, bias = (
        torch.randn(B, T, *size, dtype=torch.float64, device=device)
        for size in ((HQ, D), (H, D), (H, E), (H, W))
    )
    write = torch.stack([torch.randint(-1, m, (B, T, W), device=device) for m in slots_of(M, H)], 2)
    write[:, ::7] = write[:, ::7, :, :1]
    return {"q": q, "k": k, "v": v, "write": write, "bias": bias}


def slots(N: int, shape: tuple[int, ...], device: torch.device) -> SlotState:
    """Random slots, a third of them empty."""
    _, _, _, H, D, E, M, _ = shape
    S = sum(slots_of(M, H))
    k, v, bias, z = (
        torch.randn(N, S, *size, dtype=torch.float64, device=device) for size in ((D,), (E,), (), ())
    )
    return SlotState(k, v, bias.masked_fill(z < -0.4, -torch.inf))


def everything(op, tensors: dict[str, torch.Tensor], *, state: SlotState | None = None, **more):
    """o, the final slots, and every gradient of a loss on all of them, by name."""
    named = {n: x for n, x in tensors.items() if n != "write"}
    named |= {} if state is None else {f"state {n}": x for n, x in state._asdict().items()}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in named.items()}
    given = {n: leaves.get(n, x) for n, x in tensors.items()}
    old = None if state is None else SlotState(*(leaves[f"state {n}"] for n in SlotState._fields))
    o, end = op(**given, state=old, **more)
    loss = o.double().sin().sum() + end.k.double().cos().sum() + end.v.double().sin().sum()
    loss = loss + end.bias.double().exp().sum()
    found = dict(zip((f"d{n}" for n in leaves), torch.autograd.grad(loss, list(leaves.values()))))
    weight = end.bias.exp()  # a bias of -inf is right, but no number
    return {"o": o.detach(), "K": end.k.detach(), "V": end.v.detach(), "weight": weight.detach()} | found


def in_dtype(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    types = {"q": dtype, "k": dtype, "v": dtype, "bias": wide}
    return {n: x.to(types.get(n, x.dtype)) for n, x in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output_slots_and_gradients_equal_the_definition(shape, dtype, device):
    tensors = inputs(shape, device)
    tensors = {n: x.to(torch.float64) if n != "write" else x for n, x in in_dtype(tensors, dtype).items()}
    gold = everything(slot_attention_reference, tensors, num_slots=shape[6])
    ours, plain = (
        everything(op, in_dtype(tensors, dtype), num_slots=shape[6])
        for op in (slot_attention, slot_attention_reference)
    )
    assert_all_as_good_as(ours, plain, gold, dtype)
    assert ours["o"].dtype == ours["K"].dtype == ours["V"].dtype == dtype


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_slots_given_in_equal_the_definition_with_their_gradients(shape, device):
    tensors, state = inputs(shape, device), slots(shape[0], shape, device)
    gold, ours = (
        everything(op, tensors, state=state, num_slots=shape[6], scale=0.7)
        for op in (slot_attention_reference, slot_attention)
    )
    assert_all_as_good_as(ours, gold, gold, torch.float64)


@pytest.mark.parametrize("T", [*range(1, 18), 63, 64, 65, 127, 128, 129])
def test_any_length_equals_the_definition(T, device):
    tensors = inputs((1, T, 4, 2, 4, 4, 5, 2), device)
    gold, ours = (everything(op, tensors, num_slots=5) for op in (slot_attention_reference, slot_attention))
    assert_all_as_good_as(ours, gold, gold, torch.float64)


@pytest.mark.parametrize("op", [slot_attention, slot_attention_reference])
def test_it_is_softmax_over_the_tokens_that_are_still_alive(op, device):
    B, T, HQ, H, _, _, M, W = shape = SHAPES["plain"]
    tensors = inputs(shape, device)
    q, k, v, write, bias = tensors.values()
    weight = torch.zeros(B, H, T, T, dtype=torch.float64, device=device)
    for b in range(B):
        for h in range(H):
            holds = [(-1, -math.inf)] * M  # who is in each slot, and its bias
            for t in range(T):
                for w in range(W):
                    if write[b, t, h, w] >= 0:
                        holds[write[b, t, h, w]] = (t, bias[b, t, h, w].item())
                for j, copy in holds:
                    if j >= 0:
                        weight[b, h, t, j] += math.exp(copy)
    mask = weight.log().repeat_interleave(HQ // H, 1)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    seen = weight.sum(-1).transpose(1, 2).repeat_interleave(HQ // H, 2) > 0
    want = torch.where(seen.unsqueeze(-1), want, 0.0)
    o, _ = op(**tensors, num_slots=M)
    assert_as_good_as("o", o, want, want)


def test_it_is_gated_slot_attention_whose_gates_keep_nothing(device):
    shape = SHAPES["plain"]
    tensors = inputs(shape, device)
    del tensors["bias"]
    gate = torch.zeros(*tensors["write"].shape[:3], shape[6] + 1, dtype=torch.float64, device=device)
    gate = gate.scatter(-1, tensors["write"] + 1, -1e4)[..., 1:]
    want, held = gsa(tensors["q"], tensors["k"], tensors["v"], gate, mass=True)
    o, state = slot_attention(**tensors, num_slots=shape[6])
    assert_as_good_as("o", o, want, want)
    assert_as_good_as("K", state.k, held.k.flatten(1, 2), held.k.flatten(1, 2))
    assert torch.equal(state.bias == 0, held.log_kept.flatten(1, 2) < 0)


def test_gradients_are_those_of_finite_differences(device):
    shape = (1, 67, 2, 1, 2, 2, 4, 2)
    q, k, v, write, bias = inputs(shape, device).values()
    state = SlotState(*slots(1, shape, device)[:2], torch.randn(1, 4, dtype=q.dtype, device=device))
    leaves = [x.requires_grad_() for x in (q, k, v, bias, *state)]

    def flat(q, k, v, bias, *state):
        o, end = slot_attention(q, k, v, write, bias, num_slots=4, scale=0.7, state=SlotState(*state))
        return o, *end

    assert torch.autograd.gradcheck(flat, leaves, fast_mode=True)


def test_a_write_of_weight_zero_empties_its_slot(device):
    tensors = inputs(SHAPES["plain"], device)
    tensors["bias"][:, ::5] = -torch.inf
    gold, ours = (everything(op, tensors, num_slots=16) for op in (slot_attention_reference, slot_attention))
    assert_all_as_good_as(ours, gold, gold, torch.float64)
    tensors["bias"].fill_(-torch.inf)
    assert not everything(slot_attention, tensors, num_slots=16)["o"].any()


def test_of_two_writes_to_one_slot_the_second_holds(device):
    shape = (1, 80, 2, 1, 4, 4, 3, 2)
    tensors = inputs(shape, device)
    tensors["write"][..., 1] = tensors["write"][..., 0]
    one = tensors | {"write": tensors["write"][..., 1:], "bias": tensors["bias"][..., 1:]}
    two, gold = (everything(slot_attention, x, num_slots=3) for x in (tensors, one))
    assert not two["dbias"][..., 0].any()
    for name in ("o", "K", "V", "weight", "dq", "dk", "dv"):
        assert_as_good_as(name, two[name], gold[name], gold[name])


def test_a_later_token_changes_no_bit_before_it_and_nor_does_its_absence(device):
    tensors = in_dtype(inputs((2, 200, 4, 2, 8, 8, 16, 2), device), torch.float32)
    before = slot_attention(**tensors, num_slots=16)[0]
    other = {n: x.clone() for n, x in tensors.items()}
    for n, x in other.items():
        x[:, 90:] = x[:, 90:].flip(1) if n == "write" else 3 * x[:, 90:]
    assert torch.equal(slot_attention(**other, num_slots=16)[0][:, :90], before[:, :90])
    fewer = {n: x[:, :90] for n, x in tensors.items()}
    assert torch.equal(slot_attention(**fewer, num_slots=16)[0], before[:, :90])


@pytest.mark.parametrize("size", [1, 3, 64, 65])
@pytest.mark.parametrize("num_slots", [20, (7, 30)], ids=["even", "uneven"])
def test_pieces_with_a_state_equal_the_whole_in_gradients_too(num_slots, size, device):
    shape = (1, 150, 4, 2, 4, 4, num_slots, 2)
    tensors = inputs(shape, device)

    def in_pieces(q, k, v, write, bias, *, state, num_slots):
        out = []
        for *tokens, w, b in zip(*(x.split(size, 1) for x in (q, k, v, write, bias))):
            o, state = slot_attention(*tokens, w, b, num_slots=num_slots, state=state)
            out.append(o)
        return torch.cat(out, 1), state

    gold, ours = (everything(op, tensors, num_slots=num_slots) for op in (slot_attention, in_pieces))
    assert_all_as_good_as(ours, gold, gold, torch.float64)


@pytest.mark.parametrize("num_slots", [10, (4, 13)], ids=["even", "uneven"])
@pytest.mark.parametrize("with_state", [False, True], ids=["from empty slots", "from slots given in"])
def test_packed_documents_equal_separate_calls(with_state, num_slots, device):
    lengths = [0, 1, 80, 0, 1, 64, 129, 0]
    shape = (1, sum(lengths), 4, 2, 4, 4, num_slots, 2)
    tensors = inputs(shape, device)
    state = slots(len(lengths), shape, device) if with_state else None
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    o, end = slot_attention(**tensors, num_slots=num_slots, state=state, cu_seqlens=cu)
    for n, parts in enumerate(zip(*(x.split(lengths, 1) for x in (*tensors.values(), o)))):
        own = None if state is None else SlotState(*(s[n : n + 1] for s in state))
        alone, gold = slot_attention(*parts[:5], num_slots=num_slots, state=own)
        assert torch.equal(parts[5], alone) or lengths[n] == 1
        assert_as_good_as(f"o of document {n}", parts[5], alone, alone)
        for ours, theirs in zip(end, gold):
            assert torch.equal(ours[n : n + 1], theirs)
    gold, ours = (
        everything(op, tensors, state=state, num_slots=num_slots, cu_seqlens=cu)
        for op in (slot_attention_reference, slot_attention)
    )
    assert_all_as_good_as(ours, gold, gold, torch.float64)


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_who_wants_no_state_gets_none_and_the_same_output_and_gradients(backend, T, device):
    tensors = in_dtype(inputs((2, T, 4, 2, 8, 8, (16, 5), 1), device), torch.float32)
    leaves = [tensors[n].requires_grad_() for n in ("q", "k", "v", "bias")]
    found = []
    for keep_state in (True, False):
        o, state = slot_attention(**tensors, num_slots=(16, 5), keep_state=keep_state, backend=backend)
        assert (state is not None) == keep_state
        found.append([o, *torch.autograd.grad(o.sin().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("op", [slot_attention, slot_attention_reference])
def test_no_tokens_give_no_output_and_the_slots_as_they_were(op, device):
    shape = SHAPES["plain"]
    none, state = {n: x[:, :0] for n, x in inputs(shape, device).items()}, slots(2, shape, device)
    o, after = op(**none, num_slots=16, state=state)
    assert o.shape == (2, 0, 4, 8)
    assert torch.equal(after.bias, state.bias)
    live = (state.bias > -torch.inf).unsqueeze(-1)
    assert torch.equal(after.k * live, state.k * live)
    o, after = op(**none, num_slots=16)
    assert o.shape == (2, 0, 4, 8) and not after.k.any() and (after.bias == -torch.inf).all()


@pytest.mark.parametrize("T", [1, 70])
def test_a_state_given_in_is_not_changed(T, device):
    shape = (2, T, 4, 2, 8, 8, 16, 2)
    tensors, state = inputs(shape, device), slots(2, shape, device)
    kept = [x.clone() for x in state]
    first, again = (slot_attention(**tensors, num_slots=16, state=state)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(kept, state))


def test_how_the_work_is_cut_changes_no_bit(device, monkeypatch):
    tensors = in_dtype(inputs(SHAPES["plain"], device), torch.float32)
    gold = everything(slot_attention, tensors, num_slots=16)
    monkeypatch.setattr(onehot, "BLOCK_BYTES", 1)
    ours = everything(slot_attention, tensors, num_slots=16)
    for name in gold:
        assert torch.equal(ours[name], gold[name]), name


BAD = {
    "heads that do not divide": (lambda x: x | {"q": x["q"][:, :, :3]}, "3 heads"),
    "writes of another length": (lambda x: x | {"write": x["write"][:, :5]}, "write is"),
    "three writes a token": (lambda x: x | {"write": x["write"].repeat(1, 1, 1, 2)}, "4 slots a token"),
    "biases of other heads": (lambda x: x | {"bias": x["bias"][:, :, :1]}, "bias is"),
}


def test_a_number_of_slots_for_another_number_of_heads_is_named(device):
    with pytest.raises(ValueError, match="of 3 heads, and k has 2"):
        slot_attention(**inputs(SHAPES["plain"], device), num_slots=(16, 16, 16))


@pytest.mark.parametrize(("spoil", "named"), BAD.values(), ids=BAD)
def test_shapes_that_do_not_fit_are_named(spoil, named, device):
    with pytest.raises(ValueError, match=named):
        slot_attention(**spoil(inputs(SHAPES["plain"], device)), num_slots=16)
