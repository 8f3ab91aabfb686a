"""How slots are dealt to heads: the dealing, the costs it goes by, and a conversion that does both."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tiny import VOCABULARY, tiny_model, tiny_source
from unsoftmax.convert import share
from unsoftmax.convert.checkpoint import convert_checkpoint
from unsoftmax.convert.config import attention_shape
from unsoftmax.convert.load import load
from unsoftmax.convert.share import costs, deal, shares_slots, sizes_of
from unsoftmax.convert.source import open_source
from unsoftmax.kernels.gsa.layer import GatedSlotAttention, GSAOptions
from unsoftmax.kernels.mixer import Rotary
from unsoftmax.recipes.schema import parse_recipe

KEEP = {"name": "gsa", "num_slots": 16, "sinks": 2, "recent": 5}
SIZES = [4, 8, 12, 16, 24, 32]
IDS = torch.randint(256, (1, 90), generator=torch.Generator().manual_seed(5))


def total(cost: dict[int, torch.Tensor], dealt: dict[int, tuple[int, ...]], sizes: list[int]) -> float:
    return sum(float(cost[n][h, sizes.index(m)]) for n, slots in dealt.items() for h, m in enumerate(slots))


# ---- the dealing


@pytest.mark.parametrize("mean", [4, 8, 16, 32])
@pytest.mark.parametrize("seed", range(5))
def test_heads_get_the_mean_or_a_little_less_and_never_more(seed, mean):
    generator = torch.Generator().manual_seed(seed)
    cost = {n: torch.rand(3, len(SIZES), generator=generator).sort(1, descending=True).values for n in (0, 4)}
    dealt = deal(cost, SIZES, mean)
    slots = [m for each in dealt.values() for m in each]
    assert dealt.keys() == cost.keys() and len(slots) == 6 and set(slots) <= set(SIZES)
    assert 0 <= mean * 6 - sum(slots) < 8, "whatever is left buys no head its next number of slots"


@pytest.mark.parametrize("seed", range(5))
def test_no_other_way_to_deal_as_many_slots_saves_more(seed):
    sizes = [4, 8, 12, 16]  # equal steps, each worth less than the one before: the greedy way is the best
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(4, 3, generator=generator).sort(1, descending=True).values
    cost = {0: 5 - torch.cat((torch.zeros(4, 1), steps.cumsum(1)), 1)}
    least = min(
        total(cost, {0: slots}, sizes) for slots in itertools.product(sizes, repeat=4) if sum(slots) <= 4 * 8
    )
    assert total(cost, deal(cost, sizes, 8), sizes) == pytest.approx(least)


def test_slots_go_to_the_heads_that_they_save_most():
    same = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.25])
    assert deal({0: same.repeat(2, 1), 1: same.repeat(2, 1)}, SIZES, 12) == {0: (12, 12), 1: (12, 12)}
    assert deal({0: torch.stack((100 * same, same)), 1: torch.stack((same, same))}, SIZES, 12)[0][0] == 32
    late = torch.tensor([9.0, 9.0, 9.0, 9.0, 9.0, 0.0])  # only the whole of the way saves anything
    assert deal({0: torch.stack((late, 0.01 * same))}, SIZES, 18) == {0: (32, 4)}


def test_slots_that_save_nothing_are_dealt_evenly():
    nothing, worse = torch.zeros(2, 6), torch.arange(6.0).repeat(2, 1)
    for flat in (nothing, worse):
        assert deal({0: flat, 3: flat}, SIZES, 16) == {0: (16, 16), 3: (16, 16)}
    early = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    late = torch.tensor([9.0, 8.0, 7.0, 6.0, 0.0, 0.0])
    assert deal({0: torch.stack((early, early, late))}, SIZES, 16) == {0: (12, 12, 24)}


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_costs_that_are_no_numbers_are_refused_by_layer_and_head(value):
    cost = {0: torch.ones(2, 6), 3: torch.ones(2, 6)}
    cost[3][1, 2] = value
    message = rf"^layer 3, head 1: what 12 slots cost .* as {value}; .*calibration\.sharing_tokens=0"
    with pytest.raises(ValueError, match=message):
        deal(cost, SIZES, 16)


def test_the_numbers_tried_rise_leave_room_beside_the_sinks_and_have_the_recipes_own():
    assert sizes_of(GSAOptions(num_slots=64, recent=16)) == [16, 32, 48, 64, 96, 128, 192, 256, 384]
    assert sizes_of(GSAOptions(num_slots=6, sinks=4, recent=1)) == [6, 9, 12, 18, 24, 36]
    assert sizes_of(GSAOptions(num_slots=1, sinks=0, recent=1))[0] == 1


@pytest.mark.parametrize(
    ("options", "may"),
    [
        (GSAOptions(num_slots=16, recent=5), True),
        (GSAOptions(num_slots=16), False),
        (GSAOptions(num_slots=16, start="paper"), False),
        (GSAOptions(num_slots=(16, 8), recent=5), False),
    ],
    ids=["kept by worth", "a ring", "the paper's", "dealt already"],
)
def test_only_slots_kept_by_worth_are_shared(options, may):
    assert shares_slots(GatedSlotAttention(attention_shape(tiny_model().config), options)) == may


# ---- the costs


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A teacher in float64, its middle layer as slots, and what a backward pass shows of that layer."""
    source = tiny_source(tmp_path_factory.mktemp("share") / "s")
    teacher = load(source).double()
    torch.manual_seed(1)
    mixer = load(source, layer_mixers=[KEEP] * 3).double().model.layers[1].self_attn
    return teacher, mixer, share._backward(teacher.requires_grad_(False), IDS, [1])[1]


def alive(write: torch.Tensor, size: int) -> torch.Tensor:
    """[T, T]: whether token j's slot still holds it when token i reads; write [T]."""
    held, rows = torch.full((size,), -1), []
    for i, slot in enumerate(write.tolist()):
        held[slot] = i
        rows.append(torch.zeros(len(write), dtype=torch.bool).index_fill(0, held[held >= 0], True))
    return torch.stack(rows)


def test_costs_are_those_of_attention_under_the_masks_that_slots_leave(seen):
    _, mixer, found = seen
    sizes, T = [4, 9, 40], IDS.shape[1]
    got = costs(mixer, **found, sizes=sizes)
    q, k, v = (t[0].transpose(0, 1) for t in mixer.project(found["x"], found["rotary"]))  # [heads, T, D]
    shape = mixer.shape
    group = shape.num_heads // shape.num_kv_heads
    teacher, gradient = (found[n][0].view(T, shape.num_heads, -1).transpose(0, 1) for n in ("o", "gradient"))
    for s, size in enumerate(sizes):
        own = type(mixer)(shape, GSAOptions((size,) * shape.num_kv_heads, sinks=2, recent=5)).double()
        own.load_state_dict(mixer.state_dict())
        write = own.writes(found["x"])[0][0]
        for h in range(shape.num_kv_heads):
            mask, want = alive(write[:, h], size), 0.0
            assert mask.sum(1).max() == min(size, T)
            for a in range(h * group, (h + 1) * group):
                p = (mixer.scale * q[a] @ k[h].T).masked_fill(~mask, -torch.inf).softmax(-1)
                want += (gradient[a] * (p @ v[h] - teacher[a])).sum(-1).square().sum().item()
            assert got[h, s].item() == pytest.approx(want, rel=1e-9)
    assert (got[:, 0] > got[:, 2]).all() and (got > 0).all()


def test_a_head_with_a_slot_for_every_token_costs_nothing(seen):
    _, mixer, found = seen
    few, enough = costs(mixer, **found, sizes=[4, IDS.shape[1]]).unbind(1)
    assert (enough < 1e-20 * few).all()


def test_the_gradient_is_that_of_the_loss_at_the_heads_output(seen):
    teacher, _, found = seen
    bump = torch.zeros_like(found["o"], requires_grad=True)
    hook = teacher.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda m, args: (args[0] + bump,)
    )
    loss = torch.nn.functional.cross_entropy(
        teacher(IDS, use_cache=False).logits[0, :-1], IDS[0, 1:], reduction="sum"
    )
    hook.remove()
    [want] = torch.autograd.grad(loss, bump)
    torch.testing.assert_close(found["gradient"], want, rtol=1e-4, atol=1e-5)
    assert want.abs().max() > 0.1
    assert isinstance(found["rotary"], Rotary) and not found["x"].requires_grad


def test_only_tokens_that_text_far_back_foretells_count_where_there_are_some(seen):
    teacher, _, _ = seen
    row = torch.arange(200).remainder(256)[None].clone()
    row[0, 150:152] = row[0, 3:5]
    found = share._backward(teacher, row, [1])[1]["gradient"][0]
    assert found[150].any() and not found[151:].any(), "one token counts: the one at 151"


# ---- a conversion


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A source, `source`, and a text whose words come again far from where they were."""
    folder = tmp_path_factory.mktemp("sharing")
    tiny_source(folder / "source", max_position_embeddings=256)
    words = ["stone", "river", "ask", "blue", "seven", "Anna", "goes", "where", "(x)", "and", "not", "kept."]
    picks = torch.randint(len(words), (40, 60), generator=torch.Generator().manual_seed(5)).tolist()
    lines = [json.dumps({"text": " ".join(words[i] for i in row)}) for row in picks]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def convert(here: Path, out: Path, sharing_tokens: int, mixer: dict = KEEP, **rest) -> tuple[Path, list[str]]:
    calibration = {"text": str(here / "text.jsonl"), "tokens": 512, "sharing_tokens": sharing_tokens}
    recipe = parse_recipe({"source": "tiny", "mixer": mixer, "calibration": calibration} | rest)
    said: list[str] = []
    return convert_checkpoint(here / "source", out, recipe, verify=False, say=said.append), said


def slots(folder: Path) -> list[Any]:
    entries = json.loads((folder / "config.json").read_text())["layer_mixers"]
    return [entry.get("num_slots") for entry in entries]


def test_a_conversion_deals_slots_the_same_each_time_and_the_result_opens_and_speaks(here, tmp_path):
    out, said = convert(here, tmp_path / "a", 512)
    every = [m for layer in slots(out) for m in layer]
    assert len(every) == 6 and len(set(every)) > 1 and sum(every) <= 6 * 16
    assert any("to share slots out" in line for line in said)
    assert any("slots a head: mean" in line and f"to {max(every)}" in line for line in said)
    again, _ = convert(here, tmp_path / "b", 512)
    assert slots(again) == slots(out)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, again))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    model: Any = load(out)
    assert [layer.self_attn.slots for layer in model.model.layers] == [tuple(each) for each in slots(out)]
    made = model.generate(IDS, max_new_tokens=7, do_sample=False, eos_token_id=None)
    whole = model(made[:, :-1], use_cache=False).logits
    assert torch.equal(whole[0, IDS.shape[1] - 1 :].argmax(-1), made[0, IDS.shape[1] :])
    model.save_pretrained(tmp_path / "c")
    assert torch.equal(load(tmp_path / "c")(IDS).logits, model(IDS).logits)


def test_without_tokens_to_share_by_every_head_has_as_many_and_the_same_weights(here, tmp_path):
    even, said = convert(here, tmp_path / "even", 0)
    assert slots(even) == [16] * 3
    assert not any(line.startswith("  share") or "to share slots out" in line for line in said)
    dealt, _ = convert(here, tmp_path / "dealt", 256)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (even, dealt))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_a_text_shorter_than_a_row_shares_slots_and_one_that_says_nothing_leaves_them_even(here, tmp_path):
    words = (here / "text.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(words[:9]))
    tiny_source(tmp_path / "source", max_position_embeddings=4096)
    for name, tokens in (("row", 16_384), ("two", 2)):
        calibration = {"text": str(tmp_path / "few.jsonl"), "tokens": 256, "sharing_tokens": tokens}
        recipe = parse_recipe({"source": "tiny", "mixer": KEEP, "calibration": calibration})
        out = convert_checkpoint(
            tmp_path / "source", tmp_path / name, recipe, verify=False, say=lambda _: None
        )
        every = [m for layer in slots(out) for m in layer]
        assert (len(set(every)) > 1) == (name == "row")
        assert 6 * 16 - 4 < sum(every) <= 6 * 16


def test_layers_that_keep_softmax_are_left_out(here, tmp_path):
    out, _ = convert(here, tmp_path / "out", 512, softmax_layers=[1])
    first, kept, last = slots(out)
    assert kept is None and len(first) == len(last) == 2
    assert sum((*first, *last)) <= 4 * 16 and len({*first, *last}) > 1


def test_a_ring_is_never_shared(here, tmp_path):
    out, said = convert(here, tmp_path / "out", 512, mixer={"name": "gsa", "num_slots": 16, "sinks": 2})
    assert slots(out) == [16] * 3 and not any(line.startswith("  share") for line in said)


def test_the_memory_that_sharing_takes_counts_the_logits_and_what_each_token_keeps(here):
    source = open_source(here / "source")
    weights = sum(w.numel() for w in tiny_model(max_position_embeddings=256).parameters())
    small, large = (share.sharing_bytes(source, tokens) for tokens in (1, 1001))
    assert small > 4 * weights
    assert (large - small) / 1000 > 3 * 4 * VOCABULARY + 3 * 4 * (10 * 32 + 4 * 48)
    assert not share.can_share(source, torch.device("cpu"), 1 << 40)
    assert share.can_share(source, torch.device("cpu"), 256)


def test_a_teacher_too_large_for_the_memory_leaves_slots_even_and_says_so(here, tmp_path, monkeypatch):
    monkeypatch.setattr(share, "available_memory", lambda: 1 << 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 10, 1 << 10))
    out, said = convert(here, tmp_path / "out", 512)
    assert slots(out) == [16] * 3
    assert any("every head keeps mixer.num_slots" in line for line in said)
