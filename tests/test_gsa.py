"""Gated slot attention: the operation, and what is its own in the layer. The laws are in test_mixer_laws."""

import math

import pytest
import torch

from tolerance import assert_all_as_good_as, assert_as_good_as
from unsoftmax.kernels.gsa import chunked
from unsoftmax.kernels.gsa import layer as layer_module
from unsoftmax.kernels.gsa.chunked import gsa
from unsoftmax.kernels.gsa.layer import GatedSlotAttention, GSAOptions
from unsoftmax.kernels.gsa.reference import GSAState, gsa_reference
from unsoftmax.kernels.mixer import AttentionShape, Rotary
from unsoftmax.kernels.window.layer import WindowAttention, WindowOptions

GATES = {  # log_gate, drawn for each token and slot
    "soft": lambda z: -z.abs(),
    "half-lives to a million tokens": lambda z: -math.log(2) / 10 ** (3 + 1.5 * z).clamp(0, 6),
    "saturated logits": lambda z: torch.nn.functional.logsigmoid(z.mul(2).round().mul(20)) / 8,
    "kept, -1e-6, -5, -50 and -1e4 in one chunk": lambda z: pick(z, [0.0, -1e-6, -5.0, -50.0, -1e4]),
    "one slot overwritten a token": lambda z: torch.where(z == z.amax(-1, keepdim=True), -9.0, 0.0),
    "strong everywhere": lambda z: -10 - z.abs(),
}
SHAPES = {  # B, T, HQ, H, D, E, M
    "plain": (2, 33, 4, 2, 8, 8, 16),
    "odd sizes": (1, 37, 3, 1, 5, 7, 3),
    "more slots than tokens": (1, 17, 2, 2, 4, 4, 48),
    "one slot": (1, 20, 2, 1, 4, 4, 1),
}


def pick(z: torch.Tensor, values: list[float]) -> torch.Tensor:
    """Each of z's entries as one of the values."""
    table = torch.tensor(values, dtype=z.dtype, device=z.device)
    return table[(z.abs() * 97).long() % len(values)]


def inputs(
    shape: tuple[int, ...], gates: str, device: torch.device, dtype=torch.float64
) -> list[torch.Tensor]:
    """q, k, v, log_gate in float64, q, k, v already rounded to dtype and the gates to float32."""
    B, T, HQ, H, D, E, M = shape
    sizes = (B, T, HQ, D), (B, T, H, D), (B, T, H, E), (B, T, H, M)
    q, k, v, z = (torch.randn(size, dtype=torch.float64, device=device) for size in sizes)
    return [*(x.to(dtype).double() for x in (q, k, v)), GATES[gates](z).float().double()]


def everything(op, tensors: list[torch.Tensor], **more) -> dict[str, torch.Tensor]:
    """o, the final state, and every gradient of a loss on both."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    o, state = op(*tensors, **more)
    loss = o.double().sin().sum() + state.k.double().cos().sum() + state.v.double().sin().sum()
    loss = loss + state.log_kept.double().exp().sum()
    grads = torch.autograd.grad(loss, tensors)
    names = ("o", "K", "V", "log_kept", "dq", "dk", "dv", "dlog_gate")
    return dict(zip(names, (x.detach() for x in (o, *state, *grads))))


def in_dtype(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    gate = dtype if dtype == torch.float64 else torch.float32
    return [*(x.to(dtype) for x in tensors[:3]), tensors[3].to(gate)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mass", [False, True], ids=["published read", "mass"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output_state_and_gradients_equal_the_definition(shape, gates, mass, dtype, device):
    tensors = inputs(shape, gates, device, dtype)
    gold = everything(gsa_reference, tensors, mass=mass)
    ours, plain = (everything(op, in_dtype(tensors, dtype), mass=mass) for op in (gsa, gsa_reference))
    assert_all_as_good_as(ours, plain, gold, dtype)
    assert ours["o"].dtype == dtype
    assert ours["K"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("T", [*range(1, 18), 31, 32, 63, 64, 65])
def test_any_length_equals_the_definition(T, device):
    tensors = inputs((1, T, 4, 2, 4, 4, 5), "soft", device)
    gold, ours = (everything(op, tensors, mass=True) for op in (gsa_reference, gsa))
    assert_all_as_good_as(ours, gold, gold, torch.float64)


def test_no_tokens_give_no_output_and_the_state_as_it_was(device):
    q, k, v, g = inputs(SHAPES["plain"], "soft", device)
    _, state = gsa(q, k, v, g)
    o, after = gsa(q[:, :0], k[:, :0], v[:, :0], g[:, :0], state=state)
    assert o.shape == (2, 0, 4, 8)
    assert all(torch.equal(a, b) for a, b in zip(state, after))


@pytest.mark.parametrize("mass", [False, True], ids=["published read", "mass"])
def test_gradients_are_those_of_finite_differences(mass, device):
    q, k, v, g = (x.requires_grad_() for x in inputs((1, 7, 2, 1, 3, 2, 3), "soft", device))
    state = GSAState(*(torch.rand(1, 1, 3, *s, dtype=q.dtype, device=device) for s in ((3,), (2,), ())))
    state = GSAState(state.k, state.v, -state.log_kept)
    for s in state:
        s.requires_grad_()

    def flat(q, k, v, g, *state):
        o, end = gsa(q, k, v, g, scale=0.7, mass=mass, state=GSAState(*state), chunk=4)
        return o, *end

    assert torch.autograd.gradcheck(flat, (q, k, v, g, *state))


@pytest.mark.parametrize("scale", [1.0, 1.0 + 2**-20, 0.3, None], ids=str)
def test_scale_multiplies_the_scores(scale, device):
    q, k, v, g = inputs(SHAPES["plain"], "soft", device)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    ours, gold = gsa(q, k, v, g, scale=scale)[0], gsa_reference(q * factor, k, v, g, scale=1.0)[0]
    assert_as_good_as("o", ours, gold, gold)


def test_a_later_token_changes_no_bit_before_it_and_nor_does_its_absence(device):
    tensors = in_dtype(inputs((2, 70, 4, 2, 8, 8, 16), "soft", device), torch.float32)
    before = gsa(*tensors, mass=True)[0]
    other = [x.clone() for x in tensors]
    for x in other:
        x[:, 50:] *= 3
    assert torch.equal(gsa(*other, mass=True)[0][:, :50], before[:, :50])
    assert torch.equal(gsa(*(x[:, :50] for x in tensors), mass=True)[0], before[:, :50])


@pytest.mark.parametrize("mass", [False, True], ids=["published read", "mass"])
@pytest.mark.parametrize("size", [1, 3, 4, 64, 65])
def test_pieces_with_a_state_equal_the_whole_in_gradients_too(size, mass, device):
    tensors = inputs((1, 160, 4, 2, 4, 4, 6), "soft", device)

    def in_pieces(*tensors, mass):
        state, out = None, []
        for piece in zip(*(x.split(size, 1) for x in tensors)):
            o, state = gsa(*piece, mass=mass, state=state)
            out.append(o)
        return torch.cat(out, 1), state

    gold, ours = everything(gsa, tensors, mass=mass), everything(in_pieces, tensors, mass=mass)
    assert_all_as_good_as(ours, gold, gold, torch.float64)


@pytest.mark.parametrize("segment", [1, 1 << 30], ids=["a chunk a segment", "all in one segment"])
@pytest.mark.parametrize("lengths", [[100], [1, 0, 47, 16, 1, 35, 0]], ids=["one row", "packed"])
def test_how_the_work_is_cut_changes_no_bit(lengths, segment, device, monkeypatch):
    tensors = in_dtype(inputs((1, 100, 4, 2, 4, 4, 6), "soft", device), torch.float32)
    cu = None if len(lengths) == 1 else torch.tensor([0, *lengths], device=device).cumsum(0)
    gold = everything(gsa, tensors, mass=True, cu_seqlens=cu)
    monkeypatch.setattr(chunked, "SEGMENT_BYTES", segment)
    ours = everything(gsa, tensors, mass=True, cu_seqlens=cu)
    for name in gold:
        assert torch.equal(ours[name], gold[name]), name


def test_packed_documents_with_states_equal_separate_calls(device):
    lengths = [0, 1, 21, 0, 1, 16, 61, 0]
    q, k, v, g = inputs((1, sum(lengths), 4, 2, 4, 4, 6), "soft", device)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    _, state = gsa(*(x.expand(len(lengths), -1, -1, -1)[:, :9] for x in (q, k, v, g)))
    state = GSAState(*(x * torch.rand_like(x) for x in state))
    o, end = gsa(q, k, v, g, mass=True, state=state, cu_seqlens=cu)
    for n, parts in enumerate(zip(*(x.split(lengths, 1) for x in (q, k, v, g, o)))):
        alone, gold = gsa(*parts[:4], mass=True, state=GSAState(*(s[n : n + 1] for s in state)))
        if lengths[n]:
            assert_as_good_as(f"o of document {n}", parts[4], alone, alone)
        for ours, theirs in zip(end, gold):
            assert_as_good_as(f"state of document {n}", ours[n : n + 1], theirs, theirs)


def test_a_state_given_in_is_not_changed(device):
    q, k, v, g = in_dtype(inputs(SHAPES["plain"], "soft", device), torch.float32)
    _, state = gsa(q, k, v, g)
    kept = [x.clone() for x in state]
    for T in (1, 20):
        first = gsa(*(x[:, :T] for x in (q, k, v, g)), state=state)[0]
        again = gsa(*(x[:, :T] for x in (q, k, v, g)), state=state)[0]
        assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(kept, state))


@pytest.mark.parametrize("gates", GATES)
def test_with_mass_ones_in_the_values_come_out_as_ones(gates, device):
    q, k, v, g = inputs((2, 40, 4, 2, 8, 8, 7), gates, device)
    o, _ = gsa(q, k, torch.ones_like(v), g, mass=True)
    written = (g != 0).cumsum(1).any(-1).repeat_interleave(2, -1)
    assert_as_good_as("o", o, o, written[..., None].double().expand_as(o).contiguous())


@pytest.mark.parametrize("op", [gsa, gsa_reference])
def test_slots_never_written_take_no_part_and_pass_no_gradient(op, device):
    q, k, v, g = in_dtype(inputs((1, 20, 2, 1, 4, 4, 5), "soft", device), torch.float32)
    g[..., 3:] = 0
    ours = everything(op, [q, k, v, g], mass=True)
    few = everything(op, [q, k, v, g[..., :3]], mass=True)
    for name in ("o", "dq", "dk", "dv"):
        assert torch.allclose(ours[name], few[name], atol=1e-6), name

    q, k, v, g = (x.requires_grad_() for x in (q, k, v, torch.zeros_like(g)))
    o, state = op(q, k, v, g, mass=True)
    assert not o.any() and not any(s.any() for s in state)
    assert not any(d.any() for d in torch.autograd.grad(o.sum(), (q, k, v, g)))


@pytest.mark.parametrize("end", [-1e4, -1e30, -math.inf], ids=str)
def test_a_gate_that_keeps_nothing_starts_afresh(end, device):
    q, k, v, g = inputs((1, 40, 2, 1, 4, 4, 5), "soft", device)
    g[:, 21] = end
    whole = everything(gsa, [q, k, v, g], mass=True)
    o = gsa(*(x[:, 21:] for x in (q, k, v, g)), mass=True)[0]
    assert_as_good_as("o", whole["o"][:, 21:], o, o)
    assert all(x.isfinite().all() for x in whole.values())


def test_a_long_half_life_is_written_even_with_bfloat16_inputs(device):
    T, gate = 400, torch.tensor(5.0, dtype=torch.float64).sigmoid().log().item() / 8  # half-life 826 tokens
    k = torch.ones(1, T, 1, 4, device=device)
    g = torch.full((1, T, 1, 3), gate, device=device)
    _, state = gsa(k.bfloat16(), k.bfloat16(), k.bfloat16(), g)
    want = torch.full_like(state.k, -math.expm1(gate * T)).double()
    assert_as_good_as("K", state.k, state.k, want)


def test_a_long_sequence_stays_finite_and_exact(device):
    tensors = inputs((1, 3000, 1, 1, 4, 4, 3), "half-lives to a million tokens", device)
    gold, plain = (
        gsa_reference(*tensors, mass=True)[0],
        gsa_reference(*in_dtype(tensors, torch.float32), mass=True)[0],
    )
    assert_as_good_as("o", gsa(*in_dtype(tensors, torch.float32), mass=True)[0], plain, gold)


BAD = {
    "heads that do not divide": (lambda q, k, v, g: (q[:, :, :3], k, v, g), "3 heads"),
    "gates of another length": (lambda q, k, v, g: (q, k, v, g[:, :5]), "log_gate"),
    "values of other heads": (lambda q, k, v, g: (q, k, v[:, :, :1], g), "v is"),
}


@pytest.mark.parametrize(("spoil", "named"), BAD.values(), ids=BAD)
def test_shapes_that_do_not_fit_are_named(spoil, named, device):
    with pytest.raises(ValueError, match=named):
        gsa(*spoil(*inputs(SHAPES["plain"], "soft", device)))


# The layer.

LAYER = AttentionShape(24, 4, 2, 8)


def layer_of(device: torch.device, **options) -> GatedSlotAttention:
    return GatedSlotAttention(LAYER, GSAOptions(**options)).to(device, torch.float64)


def rows(T: int, device: torch.device) -> tuple[torch.Tensor, Rotary]:
    angle = torch.arange(T, device=device).double()[None, :, None] / torch.tensor(
        [1, 7, 50, 400] * 2, device=device
    )
    return torch.randn(2, T, LAYER.hidden_size, dtype=torch.float64, device=device), Rotary(
        angle.cos(), angle.sin()
    )


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_ring_starts_as_softmax_in_a_window_with_sinks(sinks, device):
    ring = layer_of(device, num_slots=12 + sinks, sinks=sinks)
    window = WindowAttention(LAYER, WindowOptions(window=12, sinks=sinks)).to(device, torch.float64)
    window.load_state_dict(ring.state_dict())
    x, rotary = rows(80, device)
    y, want = ring(x, rotary=rotary)[0], window(x, rotary=rotary)[0]
    assert_as_good_as("y", y, want, want)


@pytest.mark.parametrize("num_slots", [12, (12, 7)], ids=["even", "a number for each head"])
def test_each_head_attends_to_the_tokens_that_its_slots_hold(num_slots, device):
    layer = layer_of(device, num_slots=num_slots, sinks=2, recent=4)
    x, rotary = rows(70, device)
    y, state = layer(x, rotary=rotary, keep_state=True)

    q, k, v = (t.transpose(1, 2) for t in layer.project(x, rotary))
    write = layer.writes(x)[0]
    there = torch.zeros(2, 2, 70, 70, dtype=torch.bool, device=device)
    for b in range(2):
        for h in range(2):
            held: dict[int, int] = {}
            for i in range(70):
                held[int(write[b, i, h])] = i
                there[b, h, i, list(held.values())] = True
            assert len(held) == layer.slots[h]
            assert set(range(2)) | set(range(66, 70)) <= set(held.values()), "sinks and the latest stay"
            mine = state.born.split(list(layer.slots), 1)[h][b]
            assert mine.tolist() == [held[m] for m in range(layer.slots[h])]
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=there.repeat_interleave(2, 1), enable_gqa=True
    )
    want = layer.o_proj(o.transpose(1, 2).flatten(2))
    assert_as_good_as("y", y, want, want)
    assert state.k.shape == (2, sum(layer.slots), 8)


def test_uneven_slots_pass_gradients_and_take_pieces_as_the_whole(device):
    layer = layer_of(device, num_slots=(12, 7), sinks=2, recent=4)
    x, rotary = rows(70, device)
    whole = layer(x, rotary=rotary)[0]
    y, state, out = None, None, []
    for a, b in ((0, 33), (33, 34), (34, 70)):
        part = Rotary(rotary.cos[:, a:b], rotary.sin[:, a:b])
        y, state = layer(x[:, a:b], rotary=part, state=state, keep_state=True)
        out.append(y)
    assert_as_good_as("y", torch.cat(out, 1), whole, whole)
    x.requires_grad_()
    layer(x, rotary=rotary)[0].square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()
    assert layer.importance.weight.grad is None, "importance is fitted, not trained"


def test_fit_finds_what_draws_attention_and_how_it_falls_with_distance(device):
    layer = layer_of(device, num_slots=12, sinks=2, recent=4)
    x, _ = rows(400, device)
    still = Rotary(torch.ones(1, 400, 8, device=device), torch.zeros(1, 400, 8, device=device))
    with torch.no_grad():  # keys that depend on x[0] alone; queries that all ask for it
        x[..., 1] = 1
        for p in (layer.q_proj, layer.k_proj):
            p.weight.zero_()
        layer.q_proj.weight[::8, 1] = 1.0
        layer.k_proj.weight[::8, 0] = 3.0
    report = layer.fit([(x, still)])
    assert report["explained"] > 0.8
    score = layer.importance(x)
    assert torch.corrcoef(torch.stack([score[0, :, 0].double(), x[0, :, 0]]))[0, 1] > 0.99
    # Attention over all tokens so far falls as 1 / i, and the row's later queries are the farther ones.
    assert 0 < layer.importance.decay[0] < 1.0


def test_attention_from_afar_is_counted_by_distance(device):
    layer, (x, rotary), T = layer_of(device, num_slots=12, sinks=2, recent=4), rows(600, device), 600
    got: dict[int, torch.Tensor] = {}

    class Spy(layer_module._Bands):
        def add(self, near, received, queries, usable):
            got[near] = received / queries.clamp_min(1)

    mean, usable = layer._far_attention(x, rotary, Spy())
    q, k, _ = (t.transpose(1, 2) for t in layer.project(x, rotary))
    i = torch.arange(T, device=device)
    scores = (q @ k.repeat_interleave(2, 1).mT * layer.scale).masked_fill(i[:, None] < i, -torch.inf)
    p = scores.softmax(-1).unflatten(1, (2, 2)).sum(2)
    age = i[:, None] - i
    for near, received in got.items():
        inside = (age >= near) & (age < 2 * near)
        want = (p * inside).sum(2) / inside.sum(0).clamp_min(1)
        assert_as_good_as(f"from {near}", received, want, want)
    far = age >= layer_module.FAR
    want = ((p * far).sum(2) / far.sum(0).clamp_min(1) + 1e-6).log().transpose(1, 2)
    assert_as_good_as("log mean", mean[:, usable], want[:, usable], want[:, usable])


def test_fit_measures_a_known_fall_with_distance(device):
    bands = layer_module._Bands()
    queries = torch.full((50,), 99, device=device)
    for n, (near, _) in enumerate(bands.edges(200)):
        received = torch.stack([torch.full((3, 50), 99 * math.exp(-a * n)) for a in (0.5, 1.5)], 1)
        bands.add(near, received.to(device), queries, queries > 0)
    assert bands.slope().tolist() == pytest.approx([0.5, 1.5], abs=1e-3)


def test_fit_refuses_rows_too_short_to_see_far(device):
    layer = layer_of(device, num_slots=40, recent=8)
    with pytest.raises(ValueError, match=r"rows have 20 tokens.*use rows of"):
        layer.fit([rows(20, device)])


def test_slots_of_another_number_of_heads_are_refused(device):
    with pytest.raises(ValueError, match=r"3 heads, and the layer has 2"):
        layer_of(device, num_slots=(12, 7, 7), recent=4)


BAD_OPTIONS = {
    "num_slots": {"num_slots": 0},
    "start": {"start": "rnig"},
    "num_slots is \\[8, 0\\]": {"num_slots": (8, 0)},
    "sinks": {"sinks": -1},
    "leaves no slot": {"num_slots": (60, 4), "sinks": 4},
    "recent is 0": {"recent": 0},
    "leaves 60 slots beside mixer.sinks 4; fewer, such as 8": {"recent": 61},
    "mixer.start 'paper' has": {"start": "paper", "recent": 4},
    "one num_slots": {"start": "paper", "num_slots": (4, 4)},
}


@pytest.mark.parametrize(("named", "options"), BAD_OPTIONS.items(), ids=BAD_OPTIONS)
def test_an_option_out_of_range_is_named_with_one_that_works(named, options):
    with pytest.raises(ValueError, match=named):
        GSAOptions(**options)


def test_a_backward_pass_inside_autocast_is_the_one_outside(device):
    layer = layer_of(device, num_slots=(12, 7), sinks=2, recent=4).float()
    x, rotary = rows(70, device)
    x, rotary = x.float(), Rotary(rotary.cos.float(), rotary.sin.float())
    grads = []
    for inside in (True, False):
        mine = x.clone().requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = layer(mine, rotary=rotary)[0].square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append(mine.grad)
    assert torch.equal(*grads)
