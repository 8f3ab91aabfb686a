"""What only PolySketch promises; the laws that it shares with every mixer are in test_mixer_laws.py."""

import math
from unittest.mock import patch

import pytest
import torch

from tolerance import assert_as_good_as
from unsoftmax.kernels.mixer import AttentionShape, Rotary
from unsoftmax.kernels.polysketch.chunked import polysketch
from unsoftmax.kernels.polysketch.layer import PolySketchAttention, PolySketchOptions
from unsoftmax.kernels.polysketch.reference import polysketch_reference
from unsoftmax.kernels.polysketch.sketch import (
    LearnedSketch,
    RandomSketch,
    append,
    features,
    num_features,
    squared_norms,
)

C = 8  # tokens a block in these tests
HQ, H, D, E, R = 4, 2, 5, 6, 12
LENGTHS = {"one token": 1, "almost a block": C - 1, "a block": C, "and one more": C + 1, "several": 3 * C + 7}
RULES = {
    "power": {"local": "power"},
    "power, published normaliser": {"local": "power", "normaliser": 1.0},
    "power, two blocks": {"local": "power", "window": 2 * C, "sinks": 2},
    "softmax": {"local": "softmax"},
    "softmax, window and sinks": {"local": "softmax", "window": 3 * C, "sinks": 3},
    "softmax, normaliser": {"local": "softmax", "sinks": 1, "normaliser": 0.5},
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def inputs(T: int, device, B: int = 2, r: int = R, dtype=torch.float64) -> list[torch.Tensor]:
    """q, k, v, phi_q, phi_k."""
    heads = ((HQ, D), (H, D), (H, E), (HQ, r), (H, r))
    return [torch.randn(B, T, h, size, dtype=torch.float64).to(device, dtype) for h, size in heads]


def extras(rule: dict, T: int, device, B: int = 2) -> dict[str, torch.Tensor]:
    """A gate, far factors, and an offset where there may be one."""
    found = {
        "log_gate": -torch.rand(B, T, H, dtype=torch.float64),
        "far_scale": torch.randn(B, T, HQ, dtype=torch.float64),
    }
    if rule["local"] == "power":
        found["offset"] = torch.randn(HQ, dtype=torch.float64)
    return {name: x.to(device) for name, x in found.items()}


def output_and_gradients(
    form, tensors: list, more: dict, do: torch.Tensor, **rule
) -> dict[str, torch.Tensor]:
    names = ("q", "k", "v", "phi_q", "phi_k", *more)
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *more.values())]
    o, _ = form(*leaves[:5], **dict(zip(more, leaves[5:])), block=C, **rule)
    grads = torch.autograd.grad(o, leaves, do.to(o.dtype), allow_unused=True)
    # a gradient may be missing in the definition where no key is far yet
    found = {f"d {n}": torch.zeros_like(x) if g is None else g for n, x, g in zip(names, leaves, grads)}
    return {"o": o.detach()} | found


@every_rule
@pytest.mark.parametrize("T", LENGTHS.values(), ids=LENGTHS)
def test_output_and_every_gradient_equal_the_definition(T, rule, device):
    tensors, more = inputs(T, device), extras(rule, T, device)
    do = torch.randn(2, T, HQ, E, dtype=torch.float64, device=device)
    gold = output_and_gradients(polysketch_reference, tensors, more, do, **rule)
    exact = output_and_gradients(polysketch, tensors, more, do, **rule)
    single, single_more = [x.float() for x in tensors], {n: x.float() for n, x in more.items()}
    plain = output_and_gradients(polysketch_reference, single, single_more, do, **rule)
    ours = output_and_gradients(polysketch, single, single_more, do, **rule)
    for key in gold:
        if not gold[key].norm() > 1e-12:  # one key alone: its weight does not matter, up to rounding
            assert ours[key].abs().max() < 1e-5
            continue
        assert_as_good_as(key, exact[key], gold[key], gold[key])
        assert_as_good_as(key, ours[key], plain[key], gold[key])


@pytest.mark.parametrize("degree", [2, 4, 6, 8])
def test_a_block_as_long_as_the_document_is_exact_polynomial_attention(degree, device):
    q, k, v, phi_q, phi_k = inputs(21, device)
    offset = torch.rand(HQ, dtype=torch.float64, device=device)
    o, _ = polysketch(q, k, v, phi_q, phi_k, degree=degree, block=21, offset=offset)
    score = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) + offset[:, None, None]
    w = (score**degree).tril()
    gold = torch.einsum("bhij,bjhe->bihe", w / w.sum(-1, keepdim=True), v.repeat_interleave(2, 2))
    assert_as_good_as("o", o, gold, gold)


@pytest.mark.parametrize("local", ["power", "softmax"])
def test_every_input_and_the_sketchs_parameters_pass_gradcheck(local, device):
    T, width = 7, D + 1
    q, k, v, _, _ = inputs(T, device, B=1)
    sketch = LearnedSketch(4, width, 3, H).to(device, torch.float64)
    maps = [torch.randn_like(sketch.query), torch.randn_like(sketch.key)]
    rule = {"local": local, "block": 2, "window": 4, "sinks": 1, "normaliser": 0.3}
    more = extras(rule, T, device, B=1)

    def run(q, k, v, query, key, *rest):
        phi_q, phi_k = torch.func.functional_call(
            sketch, {"query": query, "key": key}, (append(q, 1.0), append(k, 1.0))
        )
        return polysketch(q, k, v, phi_q, phi_k, **dict(zip(more, rest)), **rule)[0]

    leaves = [x.clone().requires_grad_() for x in (q, k, v, *maps, *more.values())]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", ["gaussian", "hadamard"])
def test_gradients_reach_q_and_k_through_a_random_sketch(kind, device):
    q, k, v, _, _ = inputs(6, device, B=1)
    sketch = RandomSketch(kind, 8, D, 4).to(device, torch.float64)
    sketch.reset()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: polysketch(q, k, v, *sketch(q / 3, k / 3), block=2, degree=8)[0],
        leaves,
        fast_mode=True,
    )


@every_rule
def test_gates_of_every_size_may_meet_in_a_block(rule, device):
    T = 3 * C + 7
    tensors, more = inputs(T, device), extras(rule, T, device)
    sizes = torch.tensor([0.0, -1e-6, -0.1, -5.0, -50.0, -1e4], dtype=torch.float64, device=device)
    more["log_gate"] = sizes[torch.randint(6, (2, T, H), device=device)]
    do = torch.randn(2, T, HQ, E, dtype=torch.float64, device=device)
    gold = output_and_gradients(polysketch_reference, tensors, more, do, **rule)
    ours = output_and_gradients(polysketch, tensors, more, do, **rule)
    for key in gold:
        assert_as_good_as(key, ours[key], gold[key], gold[key])


@every_rule
def test_packed_documents_are_as_if_alone(rule, device):
    sizes = [3, 0, C, 1, 2 * C + 3, 0, C + 1]
    T = sum(sizes)
    cu = torch.tensor([0, *sizes], device=device).cumsum(0)
    tensors, more = inputs(T, device, B=1), extras(rule, T, device, B=1)
    o, state = polysketch(*tensors, **more, block=C, cu_seqlens=cu, **rule)
    for n, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        if a == b:
            assert not any(x[n].any() for x in state)
            continue
        mine = {name: x if name == "offset" else x[:, a:b] for name, x in more.items()}
        gold, _ = polysketch_reference(*(x[:, a:b] for x in tensors), **mine, block=C, **rule)
        assert_as_good_as("o", o[:, a:b], gold, gold)
        _, alone = polysketch(*(x[:, a:b] for x in tensors), **mine, block=C, **rule)
        for name, ours, theirs in zip(state._fields, state, alone):
            assert_as_good_as(name, ours[n].double(), theirs[0].double(), theirs[0].double())


@every_rule
def test_a_split_at_every_point_gives_the_same_outputs_and_the_same_state(rule, device):
    T = 3 * C + 3
    tensors, more = inputs(T, device), extras(rule, T, device)
    whole, end = polysketch(*tensors, **more, block=C, **rule)

    def piece(a, b, state):
        mine = {name: x if name == "offset" else x[:, a:b] for name, x in more.items()}
        return polysketch(*(x[:, a:b] for x in tensors), **mine, block=C, state=state, **rule)

    for cut in range(1, T):
        first, state = piece(0, cut, None)
        kept = [x.clone() for x in state]
        second, last = piece(cut, T, state)
        assert all(torch.equal(x, y) for x, y in zip(kept, state))
        assert_as_good_as("o", torch.cat((first, second), 1), whole, whole)
        for name, ours, gold in zip(end._fields, last, end):
            assert_as_good_as(name, ours.double(), gold.double(), gold.double())


@pytest.mark.parametrize("window", [C, 3 * C])
def test_a_key_turns_far_exactly_when_its_block_ends(window, device):
    T, sinks = 5 * C + 3, 2
    q, k, v, phi_q, phi_k = inputs(T, device)
    rule = {"local": "softmax", "block": C, "window": window, "sinks": sinks}
    o, _ = polysketch(q, k, v, torch.zeros_like(phi_q), phi_k, **rule)  # far keys weigh nothing
    state, steps = None, []
    for t in range(T):
        now = (x[:, t : t + 1] for x in (q, k, v, torch.zeros_like(phi_q), phi_k))
        step, state = polysketch(*now, **rule, state=state)
        steps.append(step)
    for i in (0, C - 1, C, 2 * C - 1, 3 * C, 4 * C - 1, T - 1):
        oldest = (i // C + 1) * C - window
        near = [j for j in range(i + 1) if j >= oldest or j < sinks]
        score = torch.einsum("bhd,bjhd->bhj", q[:, i], k[:, near].repeat_interleave(2, 2))
        gold = torch.einsum("bhj,bjhe->bhe", score.softmax(-1), v[:, near].repeat_interleave(2, 2))
        assert_as_good_as("prefill", o[:, i], gold, gold)
        assert_as_good_as("decode", steps[i][:, 0], gold, gold)


@every_rule
def test_weights_add_up_to_one_in_every_head_and_block(rule, device):
    T = 3 * C + 5
    tensors, more = inputs(T, device), extras(rule, T, device)
    tensors[2] = torch.ones_like(tensors[2])
    o, _ = polysketch(*tensors, **more, block=C, **rule)
    if rule.get("normaliser"):
        assert (o > 0).all() and (o < 1).all()
    else:
        assert (o - 1).abs().max() < 1e-12


@pytest.mark.parametrize("scale", [1e-2, 0.3, 1.0, 7.0, 100.0])
def test_a_factor_on_q_cancels_when_nothing_is_added_to_the_sum(scale, device):
    q, k, v, phi_q, phi_k = inputs(3 * C, device)
    gold, _ = polysketch(q, k, v, phi_q, phi_k, block=C)
    ours, _ = polysketch(scale * q, k, v, scale**2 * phi_q, phi_k, block=C)
    assert_as_good_as("o", ours, gold, gold)


def test_heads_do_not_meet(device):
    T = 2 * C + 3
    q, k, v, phi_q, phi_k = inputs(T, device)
    gate, far = -torch.rand(2, T, H, device=device).double(), torch.randn(HQ, device=device).double()
    o, _ = polysketch(q, k, v, phi_q, phi_k, block=C, log_gate=gate, far_scale=far)
    swap = [2, 3, 0, 1]  # the two groups of query heads
    mine, theirs = (x[:, :, swap] for x in (q, phi_q)), (x.flip(2) for x in (k, v, phi_k))
    (q2, phi_q2), (k2, v2, phi_k2) = mine, theirs
    o2, _ = polysketch(q2, k2, v2, phi_q2, phi_k2, block=C, log_gate=gate.flip(2), far_scale=far[swap])
    assert torch.equal(o2, o[:, :, swap])
    each = [x.repeat_interleave(2, 2) for x in (k, v, phi_k, gate)]
    o3, _ = polysketch(q, each[0], each[1], phi_q, each[2], block=C, log_gate=each[3], far_scale=far)
    assert_as_good_as("o", o3, o, o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("local", ["power", "softmax"])
def test_rows_without_weight_give_zero_and_finite_gradients(local, dtype, device):
    T = 2 * C + 2
    tensors = inputs(T, device, dtype=dtype)
    q, k, _, phi_q, phi_k = tensors
    q[:, ::3], phi_q[:, ::3] = 0, 0  # nothing asked
    k[:, : C + 1], phi_k[:, : C + 1] = 0, 0  # nothing to be found
    q[..., 1:], k[..., :1] = 0, 0  # q orthogonal to all keys
    phi_q[..., R // 2 :], phi_k[..., : R // 2] = 0, 0
    leaves = [x.requires_grad_() for x in tensors]
    o, _ = polysketch(*leaves, block=C, local=local)
    gold, _ = polysketch_reference(*(x.detach().double() for x in tensors), block=C, local=local)
    assert_as_good_as("o", o.detach(), gold, gold)
    for g in torch.autograd.grad(o.square().sum(), leaves):
        assert g.isfinite().all()


def test_far_mass_that_is_only_rounding_counts_as_none(device):
    T, r = 1024 + C, 64
    q, k, v, _, _ = inputs(T, device, B=1, dtype=torch.float32)
    basis = torch.linalg.qr(torch.randn(r, r, dtype=torch.float64))[0].float().to(device)
    phi_q = torch.randn(1, T, HQ, r // 2, device=device) @ basis[: r // 2]
    phi_k = torch.randn(1, T, H, r // 2, device=device) @ basis[r // 2 :]
    o, _ = polysketch(torch.zeros_like(q), k, v, phi_q, phi_k, block=C)
    assert not o.any()


def test_one_key_among_many_is_seen_even_when_all_others_are_orthogonal(device):
    T, r = 1024 + C, 16
    q, k, v, phi_q, phi_k = inputs(T, device, B=1, r=r, dtype=torch.float32)
    phi_q[..., 1:], phi_k[..., 0] = 0, 0
    phi_k[:, 5, :, 0] = 1.0
    o, _ = polysketch(torch.zeros_like(q), k, v, phi_q, phi_k, block=C)
    gold = v[:, 5].repeat_interleave(2, 1).expand(C, -1, -1)
    assert (o[0, -C:] - gold).abs().max() < 1e-4


def test_constant_keys_keep_their_count_over_eight_thousand_tokens(device):
    T, size = 8192, 16
    q = torch.full((1, T, 1, size), 1.0, device=device)
    v = torch.arange(T, device=device, dtype=torch.float32).view(1, T, 1, 1) / T
    o, state = polysketch(q, q, v, q / 4, q / 4, block=256, offset=torch.zeros(1, device=device), degree=4)
    exact, far = 16.0**4, 1.0
    i = torch.arange(T, dtype=torch.float64, device=device)
    old = (i // 256) * 256
    near = i - old + 1
    total = far * old * (old - 1) / 2 + exact * (i * (i + 1) / 2 - old * (old - 1) / 2)
    gold = total / (far * old + exact * near) / T
    assert ((o.flatten() - gold) / gold.clamp(min=1e-3)).abs().max() < 1e-4
    mass = state.S[0, 0, squared_norms(size, device), -1].sum()  # |phi|^2 is 1 a key
    assert abs(mass / T - 1) < 1e-5


@pytest.mark.parametrize(("size", "far"), [(200, -150.0), (200, 30.0), (1, 150.0), (1, -150.0)])
def test_extreme_weights_stay_finite_and_equal_the_definition(size, far, device):
    T = 3 * C
    tensors = inputs(T, device)
    tensors[3] = tensors[3] * 100  # far products of some ten thousand
    tensors[0] = tensors[0] * size  # logits of some hundreds, of both signs
    rule = {"local": "softmax", "block": C, "sinks": 2, "far_scale": torch.full((HQ,), far, device=device)}
    gold, _ = polysketch_reference(*tensors, **rule)
    exact, _ = polysketch(*tensors, **rule)
    assert_as_good_as("o", exact, gold, gold)
    single, _ = polysketch(*(x.float() for x in tensors), **rule)
    assert single.isfinite().all()
    assert ((single - gold).norm() / gold.norm()).item() < 1e-3  # logits of hundreds, rounded to float32


@pytest.mark.parametrize("state", [False, True], ids=["from the start", "going on"])
def test_a_mask_without_padding_changes_nothing_and_is_not_waited_for(state, device):
    layer = PolySketchAttention(AttentionShape(24, 4, 2, 8), PolySketchOptions(sketch_size=8, block=16))
    layer = layer.to(device, torch.float64)
    x = torch.randn(2, 50, 24, dtype=torch.float64, device=device)
    rotary = Rotary(*torch.randn(2, 1, 50, 8, dtype=torch.float64, device=device))
    before = None
    if state:
        _, before = layer(x, rotary=rotary, keep_state=True)
    mask = torch.ones(2, 50, dtype=torch.bool, device=device)
    y, after = layer(x, rotary=rotary, state=before, keep_state=True)
    with patch.object(torch.Tensor, "__bool__", side_effect=AssertionError("a GPU would be waited for")):
        masked, kept = layer(x, rotary=rotary, mask=mask, state=before, keep_state=True)
    torch.testing.assert_close(masked, y)
    torch.testing.assert_close(tuple(kept), tuple(after))


def test_what_lies_beyond_a_rows_length_is_never_read(device):
    T, lengths = 2 * C + 5, torch.tensor([C + 3, 2 * C + 5], device=device)
    tensors = inputs(T, device)
    clean, clean_state = polysketch(*(x[:1, : C + 3] for x in tensors), block=C, local="softmax", sinks=2)
    for x in tensors:
        x[0, C + 3 :] = torch.nan
    o, state = polysketch(*tensors, block=C, local="softmax", sinks=2, lengths=lengths)
    assert_as_good_as("o", o[:1, : C + 3], clean, clean)
    assert not o[0, C + 3 :].any()
    for name, ours, gold in zip(state._fields, state, clean_state):
        assert_as_good_as(name, ours[:1].double(), gold.double(), gold.double())


def test_autocast_does_not_lower_the_sums(device):
    tensors = inputs(2 * C, device, dtype=torch.bfloat16)
    plain, state = polysketch(*tensors, block=C)
    with torch.autocast(device.type, torch.bfloat16):
        cast, _ = polysketch(*tensors, block=C)
    assert plain.dtype == torch.bfloat16 and state.S.dtype == torch.float32
    assert torch.equal(plain, cast)


def test_features_are_not_kept_for_the_backward_pass(device):
    def kept(T):
        tensors = [x.requires_grad_() for x in inputs(T, device, B=1, r=32, dtype=torch.float32)]
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x,
            lambda x: x,
        ):
            polysketch(*tensors, block=32)
        return sum(sizes.values())

    features_alone = 4 * 2048 * (HQ + H) * num_features(32)
    assert kept(4096) - kept(2048) < features_alone / 4


@pytest.mark.parametrize("r", [1, 2, 7, 8, 12, 16, 32, 65])
def test_features_multiply_to_the_square(r, device):
    x, y = torch.randn(2, 9, r, dtype=torch.float64, device=device)
    square = (x * y).sum(-1) ** 2
    assert_as_good_as("square", (features(x) * features(y, weighted=True)).sum(-1), square, square)
    norms = features(x)[:, squared_norms(r, device)].sum(-1)
    assert_as_good_as("norm", norms, x.square().sum(-1), x.square().sum(-1))
    assert r * (r + 1) // 2 <= num_features(r) == features(x).shape[-1] <= r * r


def test_orthogonal_vectors_have_product_zero():
    x, y = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])
    assert (features(x) * features(y, weighted=True)).sum() == 0


def random_sketch(kind: str, degree: int, width: int, size: int) -> RandomSketch:
    sketch = RandomSketch(kind, degree, width, size).double()
    sketch.reset()
    return sketch


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gaussian", "hadamard", "learned"])
def test_sketches_are_homogeneous_of_half_the_degree(kind, degree):
    x, y = torch.randn(1, 3, 4, 6).double(), torch.randn(1, 3, 2, 6).double()
    if kind == "learned":
        sketch = LearnedSketch(degree, 6, 8, 2).double()
        for p in sketch.parameters():
            torch.nn.init.normal_(p)
    else:
        sketch = random_sketch(kind, degree, 6, 8)
    once, twice = sketch(x, y), sketch(2 * x, -y)
    assert torch.allclose(twice[0], 2 ** (degree // 2) * once[0])
    assert torch.allclose(twice[1], (-1) ** (degree // 2) * once[1])


@pytest.mark.parametrize("width", [5, 8], ids=["no power of two", "a power of two"])
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gaussian", "hadamard"])
def test_random_sketches_are_unbiased(kind, degree, width):
    x = torch.nn.functional.normalize(torch.randn(width).double(), dim=0)
    y = torch.nn.functional.normalize(x + 0.2 * torch.randn(width).double(), dim=0)
    products = []
    for _ in range(600):
        a, b = random_sketch(kind, degree, width, 16)(x[None, None, None], y[None, None, None])
        products.append((a * b).sum())
    products, truth = torch.stack(products), (x @ y) ** (degree // 2)
    error = products.std() / math.sqrt(len(products))
    assert abs(products.mean() - truth) < 4 * error
    assert error < 0.12 * truth  # or the line above would say nothing


@pytest.mark.parametrize(("degree", "size", "width"), [(2, 6, 5), (4, 21, 5), (8, 15, 2)])
def test_a_learned_sketch_with_room_for_all_terms_starts_as_the_power_itself(degree, size, width):
    sketch = LearnedSketch(degree, width + 1, size, 2).double()
    basis = torch.linalg.qr(torch.randn(2, width, width).double())[0]
    strength = torch.rand(2, width).double().sort(1, descending=True).values
    sketch.start(basis, basis, strength)
    q, k = torch.randn(1, 7, 4, width).double() / 3, torch.randn(1, 9, 2, width).double() / 3
    phi_q, phi_k = sketch(append(q, 1.0), append(k, 1.0))
    S = basis @ torch.diag_embed(strength) @ basis.transpose(1, 2)
    score = torch.einsum("bthd,hde,bshe->bhts", q, S.repeat_interleave(2, 0), k.repeat_interleave(2, 2))
    product = torch.einsum("bthr,bshr->bhts", phi_q, phi_k.repeat_interleave(2, 2))
    gold = (1 + score) ** (degree // 2)
    assert ((product - gold).norm() / gold.norm()).item() < 1e-6  # starts are set in float32


def calibration(layer: PolySketchAttention, rows: int, T: int):
    """Inputs whose keys share a mean, and rotary factors."""
    angle = torch.arange(T)[:, None] * 1e4 ** (-torch.arange(4) / 4)
    angle = torch.cat((angle, angle), -1)[None]
    x = torch.randn(rows, T, layer.shape.hidden_size) + torch.randn(layer.shape.hidden_size)
    return [(x, Rotary(angle.cos(), angle.sin()))]


def attention_error(layer: PolySketchAttention, batches) -> float:
    """Relative distance from softmax attention."""
    ((x, rotary),) = batches
    q, k, v = layer.project(x, rotary)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True
    )
    gold = layer.o_proj(o.transpose(1, 2).flatten(2))
    return ((layer(x, rotary=rotary)[0] - gold).norm() / gold.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("local", ["power", "softmax"])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_fitting_brings_a_layer_nearer_to_its_teacher(degree, local):
    options = PolySketchOptions(degree=degree, local=local, block=8, sketch_size=16)
    layer = PolySketchAttention(AttentionShape(32, 4, 2, 8), options)
    layer.q_proj.weight.mul_(2)
    batches = calibration(layer, 4, 96)
    before = attention_error(layer, batches)
    report = layer.fit(batches)
    assert attention_error(layer, batches) < 0.7 * before
    if local == "softmax":
        assert report["far_mass"] == pytest.approx(report["far_mass_teacher"], rel=0.05)


@torch.no_grad()
def test_a_scale_too_small_to_tell_tokens_apart_starts_as_the_mean():
    layer = PolySketchAttention(AttentionShape(32, 4, 2, 8, scale=1e-6), PolySketchOptions(block=8))
    batches = calibration(layer, 2, 64)
    layer.fit(batches)
    assert attention_error(layer, batches) < 1e-3


def test_fitting_without_a_far_key_changes_nothing():
    layer = PolySketchAttention(AttentionShape(32, 4, 2, 8), PolySketchOptions())
    kept = {n: p.clone() for n, p in layer.state_dict().items()}
    assert layer.fit(calibration(layer, 1, 40)) == {}
    assert all(torch.equal(p, kept[n]) for n, p in layer.state_dict().items())


WRONG_OPTIONS = {
    "sketch": ({"sketch": "lerned"}, "mixer.sketch is 'lerned'"),
    "degree": ({"degree": 3}, "mixer.degree is 3; it must be one of 2, 4, 8"),
    "exact, degree 4": ({"sketch": "exact"}, "mixer.degree is 4"),
    "window": ({"block": 32, "window": 50}, "multiple of mixer.block 32, such as 64"),
    "window below a block": ({"block": 32, "window": 3}, "such as 32"),
    "block": ({"block": 0}, "mixer.block is 0"),
    "sinks": ({"sinks": -1}, "mixer.sinks is -1"),
    "size": ({"sketch_size": 0}, "mixer.sketch_size is 0"),
    "local": ({"local": "window"}, "mixer.local is 'window'"),
    "normaliser": ({"normaliser": -1.0}, "mixer.normaliser is -1.0"),
}


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PolySketchOptions(**options)


def test_options_left_out_follow_local_and_are_written_down():
    soft, power = PolySketchOptions(), PolySketchOptions(local="power")
    assert (soft.block, soft.window, soft.sinks) == (32, 64, 4)
    assert (power.block, power.window, power.sinks) == (256, 256, 0)
    assert PolySketchOptions(local="softmax", window=128).block == 32


WRONG_ARGUMENTS = {
    "window": ({"block": C, "window": C + 1}, "multiple of block 8"),
    "degree": ({"degree": 3}, "degree is 3"),
    "local": ({"local": "sliding"}, "local is 'sliding'"),
    "offset": ({"local": "softmax", "offset": torch.zeros(HQ)}, "offset belongs to local='power'"),
    "short cu_seqlens": ({"cu_seqlens": torch.tensor([0, 3])}, "from 0 to T = 9"),
    "falling cu_seqlens": ({"cu_seqlens": torch.tensor([0, 5, 3, 9])}, "without decreasing"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        polysketch(*inputs(9, torch.device("cpu"), B=1), **wrong)
