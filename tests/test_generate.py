"""Generation gives the tokens that whole passes over the text would, in pieces, batches and continuations."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, TextStreamer

from test_model import LAYERS, converted
from tiny import VOCABULARY, tiny_model, tiny_source, tiny_tokenizer
from unsoftmax.cli import main
from unsoftmax.convert.cache import StateCache
from unsoftmax.convert.checkpoint import convert_checkpoint
from unsoftmax.convert.generate import generate, tensors_of
from unsoftmax.recipes.schema import parse_recipe

BYTES = 256  # tokens that are text; after them come <bos> <eos> <pad>


@pytest.fixture(params=list(LAYERS.values()), ids=list(LAYERS))
def model(request) -> Any:
    torch.manual_seed(3)
    return converted(tiny_model(), request.param).double()


def prompt(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(BYTES, shape, generator=torch.Generator().manual_seed(seed))


def by_whole_passes(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(steps):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[:, -steps:]


def same(a: StateCache, b: StateCache) -> bool:
    return all(torch.allclose(x, y, atol=1e-4) for x, y in zip(tensors_of(a), tensors_of(b), strict=True))


def test_greedy_tokens_are_those_of_whole_passes_in_any_pieces(model):
    ids = prompt(2, 21)
    want = by_whole_passes(model, ids, 9)
    for piece in (1, 8, 21, 64):
        found = generate(model, ids, max_new_tokens=9, end=(), piece=piece)
        assert found.tokens.tolist() == want.tolist(), piece
        assert found.lengths.tolist() == [9, 9]


def test_padding_anywhere_changes_no_row(model):
    rows = [prompt(1, n, seed=n) for n in (5, 19, 11)]
    ids, mask = torch.full((3, 22), VOCABULARY - 1), torch.zeros(3, 22, dtype=torch.int64)
    inside = torch.tensor([0, 1, 4, 5, 6, 9, 12, 13, 17, 18, 20])
    for b, (row, place) in enumerate(
        zip(rows, (slice(17, 22), slice(0, 19), inside))
    ):  # left, right, between
        ids[b, place], mask[b, place] = row[0], 1
    found = generate(model, ids, mask, max_new_tokens=7, end=(), piece=4)
    for b, row in enumerate(rows):
        alone = generate(model, row, max_new_tokens=7, end=())
        assert found.tokens[b].tolist() == alone.tokens[0].tolist(), b


def test_a_row_that_ends_is_padded_and_leaves_the_others_alone(model):
    ids = prompt(3, 17)
    free = generate(model, ids, max_new_tokens=8, end=()).tokens
    stop = int(free[1, 2])
    first = [row.index(stop) + 1 if stop in row else 8 for row in free.tolist()]
    found = generate(model, ids, max_new_tokens=8, end=(stop,))
    assert found.lengths.tolist() == first
    for row, whole, n in zip(found.tokens.tolist(), free.tolist(), first):
        assert row[:n] == whole[:n] and set(row[n:]) <= {model.generation_config.pad_token_id}
    alone = generate(model, ids[1:2], max_new_tokens=8, end=(stop,))
    assert alone.tokens.shape == (1, first[1])


def test_the_cache_goes_on_where_it_stood_even_in_rows_that_ended_before(model):
    ids = prompt(2, 12)
    free = generate(model, ids, max_new_tokens=6, end=())
    first = generate(model, ids, max_new_tokens=6, end=(int(free.tokens[0, 1]),))
    before, more = copy.deepcopy(first.cache), prompt(2, 5, seed=3)
    found = generate(model, more, max_new_tokens=4, end=(), cache=first.cache)
    assert same(before, first.cache), "the cache given was changed"
    for b in range(2):
        text = torch.cat([ids[b], first.tokens[b, : first.lengths[b]], more[b]])[None]
        assert found.tokens[b].tolist() == by_whole_passes(model, text, 4)[0].tolist(), b


def test_draws_follow_the_seed_and_stay_among_the_likeliest(model):
    ids = prompt(4, 6)
    options: dict = {"max_new_tokens": 5, "temperature": 1.5, "end": ()}
    draws = [generate(model, ids, seed=seed, **options).tokens.tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    greedy = generate(model, ids, max_new_tokens=5, end=()).tokens.tolist()
    assert generate(model, ids, top_k=1, **options).tokens.tolist() == greedy
    assert generate(model, ids, top_p=1e-6, **options).tokens.tolist() == greedy


def test_draws_have_the_models_own_probabilities():
    model, ids = converted(tiny_model(), LAYERS["ring"]), prompt(1, 6)
    with torch.no_grad():
        p = (model(ids).logits[0, -1] / 2.0).softmax(-1)
    n = 20_000
    drawn = generate(model, ids.expand(n, -1), max_new_tokens=1, temperature=2.0, end=()).tokens.flatten()
    have = torch.bincount(drawn, minlength=len(p)) / n
    assert (have - p).abs().max() < 5 * (p.max() / n).sqrt()


def test_a_stop_text_ends_its_row():
    model, words = converted(tiny_model(), LAYERS["ring"]), tiny_tokenizer()
    ids = torch.tensor([words.encode("A prompt of plain letters")])
    free = generate(model, ids, max_new_tokens=40, end=()).tokens[0]
    at, text = next((n, words.decode(t)) for n, t in enumerate(free.tolist()) if words.decode(t).isascii())
    found = generate(model, ids, max_new_tokens=40, end=(), stop=[text], tokenizer=words)
    assert found.tokens[0].tolist() == free[: at + 1].tolist() and found.lengths[0] == at + 1


def test_a_streamer_gets_every_token(capsys):
    model, tokenizer = converted(tiny_model(), LAYERS["ring"]), tiny_tokenizer()
    found = generate(model, prompt(1, 9), max_new_tokens=12, end=(), streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(found.tokens[0]).rstrip("\n")


REFUSED: dict[str, tuple[dict, str]] = {
    "no room": ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
    "pieces of nothing": ({"piece": 0}, "piece is 0; it must be at least 1"),
    "cold": ({"temperature": -1.0}, "temperature is -1.0; it must be 0 or more"),
    "top_k": ({"top_k": 0, "temperature": 1.0}, "top_k is 0; it must be at least 1"),
    "top_p": ({"top_p": 1.5, "temperature": 1.0}, "top_p is 1.5; it must be above 0"),
    "top_k without draws": ({"top_k": 5}, "give a temperature too"),
    "stop without words": ({"stop": ["."]}, "give the tokenizer too"),
    "all padding": ({"attention_mask": torch.zeros(2, 9)}, "row 0 of attention_mask is all padding"),
    "another mask": ({"attention_mask": torch.ones(2, 8)}, "attention_mask is [2, 8]; it must be [2, 9]"),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "it must be [rows, tokens]"),
    "the library's cache": ({"cache": DynamicCache()}, "it must be a StateCache"),
    "a graph on a CPU": ({"graph": True}, "graph=True: the model is on cpu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    change, words = REFUSED[case]
    model = converted(tiny_model(), LAYERS["ring"])
    with pytest.raises(ValueError, match=re.escape(words)):
        generate(model, **{"input_ids": prompt(2, 9), "max_new_tokens": 2} | change)


def test_a_cache_of_other_rows_is_refused(model):
    cache = generate(model, prompt(2, 4), max_new_tokens=1).cache
    with pytest.raises(ValueError, match="the cache has 2 rows and input_ids 3"):
        generate(model, prompt(3, 4), max_new_tokens=1, cache=cache)


def test_a_source_model_is_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM is not a converted model"):
        generate(tiny_model(), prompt(1, 4), max_new_tokens=1)


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Any:
    """A converted checkpoint on disk."""
    where = tmp_path_factory.mktemp("generate")
    recipe = parse_recipe({"source": "tiny", "mixer": {"name": "gsa", "num_slots": 8, "sinks": 2}})
    convert_checkpoint(
        tiny_source(where / "source"), where / "gsa", recipe, verify=False, say=lambda line: None
    )
    return where / "gsa"


def test_the_command_prints_the_text_and_says_what_it_took(folder, capsys):
    assert main(["generate", str(folder), "--prompt", "Once upon", "--max-new-tokens", "6"]) == 0
    out, told = capsys.readouterr()
    words = tiny_tokenizer()
    ids = torch.tensor([words.encode("Once upon")])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert out.rstrip("\n") == words.decode(generate(model, ids, max_new_tokens=6).tokens[0]).rstrip("\n")
    assert re.search(r"9 tokens read, .* 6 written, .* ms each; memory of all of them: 0\.\d MiB", told)


def test_the_command_reads_its_prompt_from_a_pipe(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon"))
    assert main(["generate", str(folder), "--prompt", "-", "--max-new-tokens", "2"]) == 0
    assert "9 tokens read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chat"], "has no chat template; leave --chat out"),
        (["--temperature", "-1"], "--temperature is -1.0; it must be 0 or more"),
        (["--top-k", "5"], "--top-k and --top-p choose among drawn tokens; give a --temperature too"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; it must be at least 1"),
        (["--seed", "-1"], "--seed is -1; it must be from 0 to 2^63 - 1"),
        (["--seed", str(2**63)], "it must be from 0 to 2^63 - 1"),
        (["--stop", ""], "--stop is ['']; it must be texts of at least one character"),
        (["--prompt", "caf\udce9"], "--prompt is not text in UTF-8"),
        (["--device", "tpu"], "--device is 'tpu'; it must be cpu, cuda or cuda:N"),
        (["--dtype", "int4"], "--dtype is 'int4'; it must be one of"),
    ],
)
def test_the_command_says_what_would_work(folder, capsys, words, said):
    assert main(["generate", str(folder), "--prompt", "Once", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_command_refuses_an_empty_prompt_and_a_source(folder, capsys):
    assert main(["generate", str(folder), "--prompt", ""]) == 2
    assert main(["generate", str(folder.parent / "source"), "--prompt", "Once"]) == 2
    told = capsys.readouterr().err
    assert "--prompt '' has no tokens" in told
    assert "source is not converted; to do so: convert-checkpoint " in told


def test_what_is_no_folder_and_no_hub_id_is_refused_at_once(capsys):
    assert main(["generate", "nosuch", "--prompt", "Once"]) == 2
    assert "nosuch: there is no such folder (and a hub id looks like owner/name)" in capsys.readouterr().err


# --- on a GPU


GRAPHS = {name: layers for name, layers in LAYERS.items() if "softmax" not in name}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", list(GRAPHS.values()), ids=list(GRAPHS))
def test_a_graph_gives_what_steps_give(layers, dtype):
    torch.manual_seed(3)
    model = converted(tiny_model(), layers).to("cuda", dtype)
    ids, mask = prompt(3, 29).cuda(), torch.ones(3, 29)
    mask[1, :7] = 0
    free = generate(model, ids, mask, max_new_tokens=24, end=(), graph=False)
    end = (int(free.tokens[1, 9]),)
    for options in ({"end": ()}, {"end": end}):
        eager, graph = (
            generate(model, ids, mask, max_new_tokens=24, graph=which, **options) for which in (False, True)
        )
        assert eager.tokens.tolist() == graph.tokens.tolist()
        assert eager.lengths.tolist() == graph.lengths.tolist()
        assert same(eager.cache, graph.cache)
        more = (generate(model, ids, max_new_tokens=5, end=(), cache=c.cache) for c in (eager, graph))
        assert next(more).tokens.tolist() == next(more).tokens.tolist()


@pytest.mark.gpu
def test_one_row_that_ends_leaves_a_cache_that_goes_on():
    model, ids = converted(tiny_model(), LAYERS["ring"]).cuda(), prompt(1, 9).cuda()
    free = generate(model, ids, max_new_tokens=24, end=()).tokens[0]
    end = int(free[7])
    first = generate(model, ids, max_new_tokens=24, end=(end,))
    more = (prompt(1, 4).cuda(), {"max_new_tokens": 6, "end": ()})
    text = torch.cat([ids, first.tokens, more[0]], 1)
    found = generate(model, more[0], cache=first.cache, **more[1])
    assert found.tokens.tolist() == by_whole_passes(model, text, 6).tolist()


@pytest.mark.gpu
def test_fused_steps_give_the_same_and_leave_the_model_as_it_was():
    model = converted(tiny_model(), LAYERS["ring with memory"]).cuda()
    options: dict = {"input_ids": prompt(3, 29).cuda(), "max_new_tokens": 24, "end": ()}
    plain, fused, again = (generate(model, fuse=which, **options) for which in (False, True, False))
    assert plain.tokens.tolist() == fused.tokens.tolist() == again.tokens.tolist()
    assert same(plain.cache, fused.cache) and same(plain.cache, again.cache)
    assert "project" not in vars(model.model.layers[0].self_attn)
    assert model.model.norm._compiled_call_impl is None


@pytest.mark.gpu
def test_a_graph_draws_anew_at_every_step():
    model = converted(tiny_model(), LAYERS["ring"]).cuda()
    options: dict = {"max_new_tokens": 64, "temperature": 5.0, "end": (), "seed": 4}
    first, second = (generate(model, prompt(2, 9).cuda(), **options).tokens for _ in range(2))
    assert first.tolist() == second.tolist() and len(set(first[0].tolist())) > 16
