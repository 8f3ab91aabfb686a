"""A converted model is its source wherever softmax stays, and keeps the library's promises elsewhere."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from tiny import VOCABULARY, tiny_model, tiny_source, tiny_tokenizer
from unsoftmax.convert.cache import StateCache
from unsoftmax.convert.config import SOFTMAX, UnsoftLlamaConfig, convert_config
from unsoftmax.convert.load import load, new_parameter_names, tokenizer
from unsoftmax.convert.model import CACHE, CONVERTED_MODELS
from unsoftmax.convert.remote_code import bundle
from unsoftmax.kernels import mixer as mixer_module
from unsoftmax.kernels.mixer import Mixer, Rotary

KEPT = {"name": SOFTMAX}
RING = {"name": "gsa", "num_slots": 8, "sinks": 2}
MEMORY = {"name": "gsa", "num_slots": 12, "sinks": 2, "recent": 4}
PAPER = {"name": "gsa", "num_slots": 8, "start": "paper"}
WINDOW = {"name": "window", "window": 5, "sinks": 2}
POLY = {"name": "polysketch", "sketch_size": 8, "block": 8}
DRAWN = POLY | {"sketch": "gaussian", "degree": 8}
LAYERS = {
    "all softmax": [KEPT] * 3,
    "ring": [RING] * 3,
    "ring with memory": [MEMORY] * 3,
    "paper gates": [PAPER] * 3,
    "window": [WINDOW] * 3,
    "polysketch": [POLY] * 3,
    "polysketch, random": [DRAWN, DRAWN | {"sketch": "hadamard"}, DRAWN],
    "softmax between mixers": [MEMORY, KEPT, WINDOW],
    "softmax first": [KEPT, RING, KEPT],
}
GEOMETRIES = {
    "queries share keys in pairs": {},
    "as many keys as queries": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "heads wider than hidden / heads": {"head_dim": 16},
    "three queries a key head": {"hidden_size": 48, "num_attention_heads": 6},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd theta and eps": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rms_norm_eps": 1e-3,
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "dynamic rope beyond its length": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "Mistral": {"family": "mistral"},
    "Mistral with a window of 5": {"family": "mistral", "sliding_window": 5},
}
IDS = torch.randint(256, (2, 23), generator=torch.Generator().manual_seed(5))


def converted(source: Any, layers: list[dict]) -> Any:
    """The source's weights in the converted class; what mixers add starts at random."""
    model = CONVERTED_MODELS[source.config.model_type](convert_config(source.config, layers))
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert set(missing) == new_parameter_names(model) and not unexpected
    return model.to(source.dtype).eval()


@pytest.fixture(params=list(LAYERS.values()), ids=list(LAYERS))
def model(request) -> Any:
    """float64, so that closeness needs no tolerance of its own."""
    torch.manual_seed(3)
    return converted(tiny_model(), request.param).double()


# --- the source, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_with_softmax_in_all_layers_logits_are_the_sources_bit_for_bit(tmp_path, geometry, dtype):
    folder = tiny_source(tmp_path, dtype=dtype, **geometry)
    source: Any = load(folder, dtype=dtype)
    ours: Any = load(folder, dtype=dtype, layer_mixers=[KEPT] * 3)
    assert torch.equal(ours(IDS).logits, source(IDS).logits)
    made = [m.generate(IDS, max_new_tokens=9, do_sample=False, eos_token_id=None) for m in (ours, source)]
    assert torch.equal(*made)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_window_wider_than_the_text_gives_the_sources_logits(geometry):
    source = tiny_model(**geometry).double()
    width = source.config.to_dict().get("sliding_window") or 64
    window = {"name": "window", "window": width, "sinks": 0}
    ours = converted(source, [window, KEPT, window])
    source.model.rotary_emb = ours.model.rotary_emb  # the library's tables do not stay float32 in double()
    torch.testing.assert_close(ours(IDS).logits, source(IDS).logits)


def test_a_plain_folder_loads_with_the_mixers_asked_for(tmp_path):
    folder = tiny_source(tmp_path / "source", shards=True)
    assert type(load(folder)).__name__ == "LlamaForCausalLM"
    kept = load(folder, layer_mixers=[KEPT] * 3)
    assert torch.equal(kept(IDS).logits, load(folder)(IDS).logits)
    assert not kept.training
    assert load(folder, layer_mixers=[WINDOW] * 3)(IDS).logits.isfinite().all()


# --- one token after the other


@torch.no_grad()
def steps(
    model: Any, ids: torch.Tensor, sizes: list[int], mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """Logits of all tokens, with `sizes` of them a call; the mask is given as far as the tokens go."""
    cache: Any = None
    logits, done = [], 0
    for size in sizes:
        part = slice(done, done + size)
        known = None if mask is None else mask[:, : done + size]
        out = model(ids[:, part], attention_mask=known, use_cache=True, **{CACHE: cache})
        cache, done = out[CACHE], done + size
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("sizes", [[1] * 23, [1, 7, 9, 1, 1, 4], [20, 1, 1, 1]], ids=str)
def test_any_pieces_give_the_logits_of_the_whole(model, sizes):
    logits, cache = steps(model, IDS, sizes)
    torch.testing.assert_close(logits, model(IDS, use_cache=False).logits)
    assert cache.get_seq_length() == 23


def test_a_step_leaves_an_earlier_copy_of_the_cache_as_it_was(model):
    _, cache = steps(model, IDS, [15])
    states = [layer.state for layer in cache.layers if hasattr(layer, "state")]
    before = copy.deepcopy(states)
    with torch.no_grad():
        model(IDS[:, 15:], use_cache=True, **{CACHE: cache})
    torch.testing.assert_close(states, before, rtol=0, atol=0)


def test_greedy_generation_is_the_argmax_of_full_forwards(model):
    made = model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    ids = IDS
    for _ in range(6):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, ids)
    chunked = model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None, prefill_chunk_size=7)
    assert torch.equal(chunked, ids)
    uncached = model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)
    assert torch.equal(uncached, ids)


def test_beams_and_samples_are_those_of_a_model_without_cache(model):
    ways = {"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 20}
    for way in ways:
        made = []
        for use_cache in (True, False):
            torch.manual_seed(1)
            options = way | {"num_return_sequences": 2, "max_new_tokens": 5, "eos_token_id": None}
            made.append(model.generate(IDS, use_cache=use_cache, **options))
        assert made[0].shape == (4, 28)
        assert torch.equal(*made), way


def test_generation_goes_on_from_a_given_cache(model):
    whole = model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    _, cache = steps(model, IDS, [22])
    assert torch.equal(
        model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None, **{CACHE: cache}), whole
    )


# --- padding and documents

PADDING = {
    "left": [0, 0, 0, 0] + [1] * 19,
    "right": [1] * 19 + [0, 0, 0, 0],
    "inside": [1] * 5 + [0, 0] + [1] * 8 + [0, 0] + [1] * 6,
}


@pytest.mark.parametrize("places", PADDING.values(), ids=PADDING)
def test_padding_anywhere_leaves_no_trace(model, places):
    mask = torch.tensor([places, [1] * 23])
    real = mask[0].bool()
    alone = model(IDS[:1, real]).logits[0]
    logits = model(IDS, attention_mask=mask).logits
    torch.testing.assert_close(logits[0, real], alone)
    torch.testing.assert_close(logits[1], model(IDS[1:]).logits[0])
    stepped, cache = steps(model, IDS, [3, 8, 1, 11], mask)
    torch.testing.assert_close(stepped[0, real], alone)
    assert cache.seen.tolist() == [19, 23]


@pytest.mark.parametrize("places", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("mixers", [[KEPT] * 3, [KEPT, RING, KEPT], [MEMORY, KEPT, WINDOW]], ids=str)
def test_a_sliding_window_of_kept_softmax_counts_real_tokens(mixers, places):
    ours = converted(tiny_model("mistral", sliding_window=5), mixers).double()
    mask = torch.tensor([places, [1] * 23])
    real = mask[0].bool()
    alone = [ours(IDS[:1, real]).logits[0], ours(IDS[1:]).logits[0]]
    for logits in (
        ours(IDS, attention_mask=mask).logits,
        steps(ours, IDS, [3, 8, 1, 11], mask)[0],
        steps(ours, IDS, [18, *[1] * 5], mask)[0],
        steps(ours, IDS, [6, *[1] * 17], mask)[0],
    ):
        torch.testing.assert_close(logits[0, real], alone[0])
        torch.testing.assert_close(logits[1], alone[1])


def test_left_padding_in_a_sliding_window_gives_the_sources_bits():
    source = tiny_model("mistral", sliding_window=5)
    mask = torch.tensor([PADDING["left"], [1] * 23])
    theirs = source(IDS, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    ours = converted(source, [KEPT] * 3)(IDS, attention_mask=mask).logits
    assert torch.equal(ours[mask.bool()], theirs[mask.bool()])


def test_a_mask_for_the_new_tokens_alone_will_do(model):
    mask = torch.tensor([PADDING["left"], PADDING["inside"]])
    whole = model(IDS, attention_mask=mask).logits
    cache = model(IDS[:, :20], attention_mask=mask[:, :20], use_cache=True)[CACHE]
    out = model(IDS[:, 20:22], attention_mask=mask[:, 20:22], use_cache=True, **{CACHE: cache})
    last = model(IDS[:, 22:], use_cache=True, **{CACHE: out[CACHE]})
    torch.testing.assert_close(torch.cat([out.logits, last.logits], 1), whole[:, 20:])


def test_a_left_padded_batch_generates_what_each_row_does_alone(model):
    mask = torch.tensor([PADDING["left"], [1] * 23])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    made = model.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(made[0, 4:], model.generate(IDS[:1, 4:], **options)[0])
    assert torch.equal(made[1], model.generate(IDS[1:], **options)[0])
    beams = model.generate(IDS, attention_mask=mask, num_beams=2, **options)
    assert torch.equal(beams[0, 4:], model.generate(IDS[:1, 4:], num_beams=2, **options)[0])


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


CUTS = {"three documents": [0, 9, 10, 23], "one document": [0, 23], "an empty document": [0, 8, 8, 23]}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_packed_documents_are_as_if_apart_in_logits_and_gradients(model, cuts):
    row, weight = IDS[:1], torch.randn(1, 23, VOCABULARY, dtype=torch.float64)
    packed = model(row, cu_seqlens=torch.tensor(cuts)).logits
    apart = torch.cat([model(row[:, a:b]).logits for a, b in itertools.pairwise(cuts) if b > a], 1)
    torch.testing.assert_close(packed, apart)
    torch.testing.assert_close(
        gradients(model, (packed * weight).sum()), gradients(model, (apart * weight).sum())
    )


def test_a_loss_on_one_document_gives_another_no_gradient(model):
    x = model.model.embed_tokens(IDS[:1]).detach().requires_grad_()
    model(inputs_embeds=x, cu_seqlens=torch.tensor([0, 9, 23])).logits[:, 9:].sum().backward()
    assert x.grad[:, :9].eq(0).all() and x.grad[:, 9:].ne(0).any()


def test_positions_that_start_anew_mean_documents(model):
    row, cuts = IDS[:1], torch.tensor([0, 9, 10, 23])
    positions = torch.cat([torch.arange(n) for n in (9, 1, 13)]).unsqueeze(0)
    expected = model(row, cu_seqlens=cuts).logits
    torch.testing.assert_close(model(row, position_ids=positions, use_cache=False).logits, expected)
    torch.testing.assert_close(model(row, cu_seq_lens_q=cuts, position_ids=positions).logits, expected)
    with pytest.raises(ValueError, match="one row"):
        model(IDS, position_ids=positions.expand(2, -1))


def test_without_softmax_layers_no_mask_is_ever_built(monkeypatch):
    def refuse(**_):
        raise AssertionError("a T x T mask was built")

    ours = converted(tiny_model(), [RING] * 3)
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        monkeypatch.setattr(f"unsoftmax.convert.model.{name}", refuse)
    mask = torch.tensor([PADDING["left"], PADDING["right"]])
    assert ours(IDS, attention_mask=mask).logits.isfinite().all()
    with pytest.raises(AssertionError, match="T x T"):
        converted(tiny_model(), [RING, KEPT, RING])(IDS, attention_mask=mask)


# --- the library's conventions


def test_logits_are_made_only_where_asked(model):
    whole = model(IDS).logits
    torch.testing.assert_close(model(IDS, logits_to_keep=1).logits, whole[:, -1:])
    torch.testing.assert_close(model(IDS, logits_to_keep=torch.tensor([3, 7])).logits, whole[:, [3, 7]])


def test_training_keeps_no_cache_unless_asked(model):
    assert CACHE in model(IDS)
    assert CACHE not in model.train()(IDS)
    assert model(IDS, use_cache=True)[CACHE].get_seq_length() == 23


def test_both_names_of_the_cache_are_taken(model):
    _, cache = steps(model, IDS, [20])
    other = copy.deepcopy(cache)
    torch.testing.assert_close(
        model(IDS[:, 20:], cache=cache).logits, model(IDS[:, 20:], past_key_values=other).logits
    )


def test_hidden_states_are_handed_out_and_the_loss_is_the_librarys(model):
    out = model(IDS, labels=IDS, output_hidden_states=True)
    assert len(out.hidden_states) == 4
    expected = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten()
    )
    torch.testing.assert_close(out.loss.float(), expected)
    assert isinstance(model(IDS, return_dict=False), tuple)


def test_gradients_are_the_same_with_checkpointing(model):
    plain = gradients(model.train(), model(IDS, labels=IDS).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = gradients(model, model(IDS, labels=IDS).loss)
    assert len(calls) == 2  # forward, and again on the way back
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)


REFUSED = {
    "two masks' worth of tokens": ({"attention_mask": torch.ones(2, 40)}, "attention_mask is \\[2, 40\\]"),
    "a 4-D mask": ({"attention_mask": torch.ones(2, 1, 23, 23)}, "it must be \\[2, 23\\]"),
    "documents in two rows": ({"cu_seqlens": torch.tensor([0, 23])}, "the batch has 2"),
    "the library's cache": ({CACHE: DynamicCache()}, "DynamicCache"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_right_is_refused_by_name(case):
    arguments, message = case
    with pytest.raises(ValueError, match=message):
        converted(tiny_model(), [RING] * 3)(IDS, **arguments)


BAD_CUTS = {
    "not from 0": (torch.tensor([1, 23]), "begins with 1; it must begin with 0"),
    "falling": (torch.tensor([0, 9, 7, 23]), "falls from 9 to 7 at entry 2; it must never decrease"),
    "too short": (torch.tensor([0, 9, 22]), "ends with 22; it must end with 23"),
    "beyond the row": (torch.tensor([0, 9, 24]), "ends with 24; it must end with 23"),
    "floats": (torch.tensor([0.0, 23.0]), "is torch.float32; it must be torch.int64 or torch.int32"),
    "two rows of it": (torch.tensor([[0, 23]]), r"is \[1, 2\]; it must be \[documents \+ 1\]"),
    "nothing": (torch.tensor([], dtype=torch.int64), r"is \[0\]; it must be \[documents \+ 1\]"),
}


@pytest.mark.parametrize("case", BAD_CUTS.values(), ids=BAD_CUTS)
def test_packed_documents_that_do_not_fill_the_row_are_refused(model, case):
    cuts, message = case
    for mixer in (layer.self_attn for layer in model.model.layers if isinstance(layer.self_attn, Mixer)):
        x = torch.randn(1, 23, 32, dtype=torch.float64)
        rotary = Rotary(*torch.ones(2, 1, 23, 8, dtype=torch.float64))
        with pytest.raises(ValueError, match=f"cu_seqlens {message}"):
            mixer(x, rotary=rotary, cu_seqlens=cuts)
    with pytest.raises(ValueError, match=f"cu_seqlens {message}"):
        model(IDS[:1], cu_seqlens=cuts)


def test_packed_documents_may_be_int32_and_are_looked_at_once(model, monkeypatch):
    looked = []
    look = torch.Tensor.tolist
    cuts = torch.tensor([0, 9, 23])
    expected = model(IDS[:1], cu_seqlens=cuts).logits
    narrow = cuts.int()
    torch.testing.assert_close(model(IDS[:1], cu_seqlens=narrow).logits, expected, rtol=0, atol=0)
    monkeypatch.setattr(mixer_module, "_check_documents", lambda *a: looked.append(look(a[0])))
    model(IDS[:1], cu_seqlens=narrow)
    assert looked == []
    narrow[1] = 12  # another tensor by what it says
    model(IDS[:1], cu_seqlens=narrow)
    assert looked == [[0, 12, 23]]


def test_a_misspelt_argument_is_refused():
    with pytest.raises(TypeError, match="cu_seqlen"):
        converted(tiny_model(), [RING] * 3)(IDS[:1], cu_seqlen=torch.tensor([0, 9, 23]))


def test_what_needs_a_cropped_cache_is_refused_by_name():
    ours = converted(tiny_model(), [KEPT, RING, KEPT])
    for option, message in (
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
        ({"assistant_model": tiny_model()}, "assistant_model"),
        ({"cache_implementation": "static"}, "cache_implementation"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.generate(IDS[:1], max_new_tokens=3, **option)
    _, cache = steps(ours, IDS, [20])
    with pytest.raises(ValueError, match="cropped"):
        cache.crop(-1)
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20, 20]


def test_a_cache_of_softmax_layers_alone_can_be_cropped():
    ours = converted(tiny_model(), [KEPT] * 3)
    mask = torch.tensor([PADDING["left"], PADDING["inside"]])
    _, cache = steps(ours, IDS, [20], mask)
    cache.crop(-6)
    assert cache.get_seq_length() == 14 and cache.seen.tolist() == [10, 12]


def test_softmax_layers_with_a_sliding_window_keep_no_more_than_it():
    ours = converted(tiny_model("mistral", sliding_window=5), [KEPT, RING, KEPT])
    _, cache = steps(ours, IDS, [20, 1, 1])
    assert cache.layers[0].keys.shape[-2] == 4 and cache.get_seq_length() == 22
    _, cache = steps(ours, IDS, [20, 1, 1], torch.tensor([PADDING["left"], [1] * 23]))
    assert cache.layers[0].keys.shape[-2] == 4
    _, cache = steps(ours, IDS, [17], torch.tensor([PADDING["inside"], [1] * 23]))
    assert cache.layers[0].keys.shape[-2] == 6, "two of them are padding"


def test_cache_rows_can_be_chosen_repeated_and_emptied(model):
    mask = torch.tensor([PADDING["left"], PADDING["inside"]])
    expected = model(IDS, attention_mask=mask, use_cache=False).logits[:, 20:]
    changes = {
        (1, 0): lambda c: c.reorder_cache(torch.tensor([1, 0])),
        (1,): lambda c: c.batch_select_indices(torch.tensor([1])),
        (0, 0, 1, 1): lambda c: c.batch_repeat_interleave(2),
    }
    for rows, change in changes.items():
        _, cache = steps(model, IDS, [20], mask)
        change(cache)
        rows = list(rows)
        out = model(IDS[rows, 20:], attention_mask=mask[rows, 20:], use_cache=True, **{CACHE: cache})
        torch.testing.assert_close(out.logits, expected[rows])
    cache.reset()
    fresh = model(IDS, attention_mask=mask, use_cache=True, **{CACHE: cache}).logits
    torch.testing.assert_close(fresh[:, 20:], expected)


# --- weights on disk


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("geometry", ["tied embeddings", "biases", "yarn rope", "Mistral with a window of 5"])
def test_saved_and_loaded_again_it_is_the_same(tmp_path, geometry, layers):
    ours = converted(tiny_model(**GEOMETRIES[geometry]), layers)
    ours.save_pretrained(tmp_path, max_shard_size="20KB")
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    again, report = opened
    assert type(again) is type(ours) and len(list(tmp_path.glob("*.safetensors"))) > 1
    assert not any(report.values())
    assert torch.equal(again(IDS).logits, ours(IDS).logits)
    assert set(again.state_dict()) == set(ours.state_dict())
    tied = ours.config.tie_word_embeddings
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert torch.equal(load(tmp_path)(IDS).logits, ours(IDS).logits)


def test_loading_never_starts_a_loaded_weight_anew(tmp_path):
    ours = converted(tiny_model(), [MEMORY, PAPER, POLY])
    for tensor in ours.state_dict().values():
        tensor.fill_(0.5)
    ours.save_pretrained(tmp_path)
    for name, tensor in load(tmp_path).state_dict().items():
        assert tensor.eq(0.5).all(), name


def drop(folder: Path, key: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[key]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_new_parameter_that_is_missing_gets_its_documented_start_and_no_other_does(tmp_path):
    ours = converted(tiny_model(), [MEMORY, MEMORY, POLY])
    dropped = {"model.layers.1.self_attn.importance.decay", "model.layers.2.self_attn.power.offset"}
    for layer in ours.model.layers:
        layer.self_attn.reset_new_parameters()
    start = {name: ours.state_dict()[name].clone() for name in dropped}
    for tensor in ours.state_dict().values():
        tensor.fill_(0.5)
    ours.save_pretrained(tmp_path)
    for name in dropped:
        drop(tmp_path, name)
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    again, report = opened
    assert set(report["missing_keys"]) == dropped
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, start.get(name, torch.full_like(tensor, 0.5))), name
    lacks = (
        r"lacks model\.layers\.1\.self_attn\.importance\.decay.*another version.* convert its source again"
    )
    with pytest.raises(ValueError, match=lacks):
        load(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["layer_mixers"][1]["memory_slots"] = 4
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"memory_slots is not an option of gsa.* convert its source again"):
        load(tmp_path)


def test_what_mixers_add_stays_float32_in_a_bfloat16_load(tmp_path):
    layers = [MEMORY, PAPER, DRAWN]
    folder = tiny_source(tmp_path / "source", dtype=torch.bfloat16)
    fresh = load(folder, dtype=torch.bfloat16, layer_mixers=layers)
    fresh.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out", dtype=torch.bfloat16)
    for ours in (fresh, again):
        new = new_parameter_names(ours)
        assert new
        for name, tensor in ours.state_dict().items():
            assert tensor.dtype == (torch.float32 if name in new else torch.bfloat16), name
        assert ours(IDS).logits.isfinite().all()
    assert torch.equal(fresh(IDS).logits, again(IDS).logits)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_what_is_fitted_or_drawn_is_no_parameter_and_is_missed_like_one(tmp_path):
    fresh: Any = load(tiny_source(tmp_path / "source"), layer_mixers=[MEMORY, KEPT, DRAWN])
    fixed = {f"model.layers.0.self_attn.importance.{name}" for name in ("weight", "decay")}
    fixed |= {f"model.layers.2.self_attn.sketch.{name}" for name in ("leaf", "inner")}
    fresh.save_pretrained(tmp_path / "out")
    for ours in (fresh, load(tmp_path / "out"), copy.deepcopy(fresh).train().requires_grad_()):
        assert fixed < new_parameter_names(ours)
        assert not fixed & dict(ours.named_parameters()).keys()
        assert fixed < ours.state_dict().keys()
    for name in sorted(fixed):
        shutil.copytree(tmp_path / "out", tmp_path / name)
        drop(tmp_path / name, name)
        with pytest.raises(ValueError, match=f"lacks {re.escape(name)}"):
            load(tmp_path / name)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "to", "to from double"])
def test_what_mixers_add_stays_float32_when_the_model_is_cast(tmp_path, cast):
    ours = load(tiny_source(tmp_path), layer_mixers=[MEMORY, PAPER, DRAWN])
    new = new_parameter_names(ours)
    before = {name: ours.state_dict()[name].clone() for name in new}
    ours.train()(IDS, labels=IDS).loss.backward()
    if cast == "to from double":
        ours.double()
        assert all(x.dtype == torch.float64 for x in ours.state_dict().values())
    narrow = torch.float16 if cast == "half" else torch.bfloat16
    getattr(ours, cast)() if cast in ("bfloat16", "half") else ours.to(narrow)
    for name, x in ours.state_dict(keep_vars=True).items():
        assert x.dtype == (torch.float32 if name in new else narrow), name
        assert x.grad is None or x.grad.dtype == x.dtype, name
    assert all(torch.equal(ours.state_dict()[name], x) for name, x in before.items())
    assert ours.eval()(IDS).logits.isfinite().all()


def test_rotary_tables_are_filled_and_stay_float32(tmp_path):
    ours: Any = load(tiny_source(tmp_path), dtype=torch.bfloat16, layer_mixers=[RING] * 3)
    before = ours.model.rotary_emb.inv_freq.clone()
    assert before[0] == 1.0
    for cast in (ours.bfloat16(), ours.half(), ours.to(torch.bfloat16)):
        assert cast.model.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(cast.model.rotary_emb.inv_freq, before)


def test_the_config_says_the_rotary_fields_in_both_spellings(tmp_path):
    for geometry in GEOMETRIES.values():
        source = tiny_model(**geometry)
        config = convert_config(source.config, [RING] * 3)
        config.save_pretrained(tmp_path)
        fields = json.loads((tmp_path / "config.json").read_text())
        rope = source.config.rope_parameters
        assert fields["rope_theta"] == rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        assert fields["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)
        assert type(config).from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_every_field_of_the_source_is_carried():
    for geometry in GEOMETRIES.values():
        source = tiny_model(**geometry).config
        source.eos_token_id, source.is_llama_config = [1, 2], True
        ours, theirs = convert_config(source, [RING] * 3).to_dict(), source.to_dict()
        for key in ("model_type", "architectures"):
            theirs.pop(key)
        assert {key: ours[key] for key in theirs} == theirs


BAD_ENTRIES = {
    "a misspelt mixer": ([{"name": "gas"}] * 3, r"layer_mixers\[0\].name is 'gas'.*did you mean 'gsa'"),
    "a misspelt option": ([KEPT, {"name": "gsa", "num_slot": 8}, KEPT], r"\[1\].num_slot .*'num_slots'"),
    "too few layers": ([KEPT] * 2, "2 entries.*num_hidden_layers 3"),
    "an option for softmax": ([{"name": SOFTMAX, "window": 3}] * 3, "softmax has no options"),
    "a bare name": (["gsa"] * 3, "it must be a mapping"),
    "a value that cannot be": ([{"name": "gsa", "num_slots": 0}] * 3, "num_slots is 0"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_wrong_layer_entry_is_refused_by_name(case):
    layers, message = case
    with pytest.raises(ValueError, match=message):
        convert_config(tiny_model().config, layers)


BAD_SOURCES = {
    "unknown field": ({"residual_multiplier": 0.2}, "residual_multiplier"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "part of the head rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "mixed layer types": ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
}


@pytest.mark.parametrize("case", BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_a_source_that_would_change_is_refused_by_field(case):
    fields, message = case
    with pytest.raises(ValueError, match=message):
        convert_config(LlamaConfig(num_hidden_layers=4, **fields), [RING] * 4)


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing-here"):
        load(tmp_path / "nothing-here")
    with pytest.raises(ValueError, match="no tokenizer"):
        tokenizer(tmp_path)
    folder = tiny_source(tmp_path / "source", shards=True)
    index = folder / "model.safetensors.index.json"
    shard = folder / json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="source"):
        load(folder)
    shard.unlink()
    with pytest.raises(ValueError, match="source"):
        load(folder)
    converted(tiny_model(), [RING] * 3).save_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="converted already"):
        load(tmp_path / "out", layer_mixers=[RING] * 3)


def test_a_config_alone_makes_a_model_with_softmax_everywhere():
    config = UnsoftLlamaConfig(num_hidden_layers=2)
    assert config.layer_mixers == [KEPT] * 2 and config.softmax_layers == [0, 1]
    assert StateCache(config).get_seq_length() == 0


def test_the_tokenizer_of_a_converted_folder_is_the_sources(tmp_path):
    folder = tiny_source(tmp_path / "source")
    load(folder, layer_mixers=[RING] * 3).save_pretrained(tmp_path / "out")
    tokenizer(folder).save_pretrained(tmp_path / "out")
    text = "Plain, naïve and 漢字\n\tin 3 lines  "
    for name in ("source", "out"):
        assert tokenizer(tmp_path / name)(text).input_ids == tiny_tokenizer()(text).input_ids
        assert tokenizer(tmp_path / name).decode(tiny_tokenizer()(text).input_ids) == text


# --- adapters


ADAPTED = {  # layers, and the modules of theirs that are trained whole beside the adapters
    "gsa": ([MEMORY, KEPT, WINDOW], []),  # importance is fitted, not trained
    "polysketch": ([POLY, KEPT, POLY | {"local": "power"}], ["power", "sketch"]),
    "polysketch, random": ([DRAWN, KEPT, DRAWN], ["power"]),
}


@pytest.mark.parametrize("case", ADAPTED.values(), ids=ADAPTED)
def test_lora_trains_saves_and_merges(tmp_path, case):
    import peft

    layers, trained_whole = case
    ours = converted(tiny_model(), layers)
    plain = copy.deepcopy(ours)
    before = {name: x.clone() for name, x in ours.state_dict().items()}
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=trained_whole or None)
    adapted = peft.get_peft_model(ours, wanted)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        adapted(IDS, labels=IDS).loss.backward()
        optimizer.step()
    adapted.eval()
    trained = adapted(IDS).logits
    assert not torch.equal(trained, plain(IDS).logits)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(IDS).logits, trained)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, trained)
    new = new_parameter_names(merged)
    changed = {name for name in new if not torch.equal(merged.state_dict()[name], before[name])}
    assert new and changed == {name for name in new if any(f".{module}." in name for module in trained_whole)}
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(load(tmp_path / "merged")(IDS).logits, trained)


# --- remote code

ALONE = """
import sys, torch
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "unsoftmax":
            raise ImportError(f"{name} must not be needed")
sys.meta_path.insert(0, Blocked())
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    given = torch.load(folder + "/given.pt")
    made = model.generate(given["input_ids"], max_new_tokens=5, do_sample=False, eos_token_id=None)
    torch.save({"logits": model(**given).logits, "made": made}, folder + "/got.pt")
model.save_pretrained(folder + "/again")
again = AutoModelForCausalLM.from_pretrained(folder + "/again", trust_remote_code=True)
assert torch.equal(again(**given).logits, model(**given).logits)
assert "unsoftmax" not in sys.modules
"""


def test_a_folder_opens_without_this_package(tmp_path):
    given = {"input_ids": IDS, "attention_mask": torch.tensor([PADDING["left"], PADDING["inside"]])}
    expected = {}
    for family in ("llama", "mistral"):
        folder = tmp_path / family
        ours = converted(tiny_model(family), [MEMORY, DRAWN, POLY])
        ours.save_pretrained(folder)
        drop(folder, "model.layers.0.self_attn.importance.decay")  # at its documented start in ours
        torch.save(given, folder / "given.pt")
        made = ours.generate(IDS, max_new_tokens=5, do_sample=False, eos_token_id=None)
        expected[folder] = {"logits": ours(**given).logits, "made": made}
    alone = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, *map(str, expected)]
    done = subprocess.run(command, env=alone, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for folder, values in expected.items():
        got = torch.load(folder / "got.pt")
        assert all(torch.equal(got[key], value) for key, value in values.items()), folder.name


def test_the_bundle_imports_nothing_but_itself_torch_and_transformers():
    allowed = {"torch", "transformers", "triton"} | set(sys.stdlib_module_names)
    files = bundle()
    for name, text in files.items():
        for line in text.splitlines():
            words = line.split()
            if words[:1] in (["from"], ["import"]) and len(words) > 1:
                target = words[1]
                assert target.partition(".")[0] in allowed | {""}, f"{name}: {line}"
                if target.startswith("."):
                    assert f"{target[1:]}.py" in files, f"{name}: {line}"
