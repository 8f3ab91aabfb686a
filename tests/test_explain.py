"""unsoftmax explain: a line a layer, with distances that a hand-made case knows."""

import json

import pytest
import torch

from test_model import KEPT, MEMORY, POLY, RING, WINDOW
from tiny import tiny_source, tiny_tokenizer
from unsoftmax import cli
from unsoftmax.convert.checkpoint import convert_checkpoint
from unsoftmax.convert.load import load
from unsoftmax.eval.explain import attention_distances, explain, important_tokens
from unsoftmax.recipes.schema import parse_recipe

IDS = torch.randint(256, (60,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A source, `out` converted from it, `mixed` with every mixer, and a text."""
    folder = tmp_path_factory.mktemp("explain")
    source = tiny_source(folder / "source")
    lines = [
        json.dumps({"text": f"{n} stones, {n * n} rivers and {n % 7} questions. " * 3}) for n in range(60)
    ]
    (folder / "text.jsonl").write_text("\n".join(lines))
    calibration = {"text": str(folder / "text.jsonl"), "tokens": 512}
    recipe = parse_recipe({"source": "t", "mixer": MEMORY, "softmax_layers": [1], "calibration": calibration})
    convert_checkpoint(source, folder / "out", recipe, verify=False, say=lambda line: None)
    load(source, layer_mixers=[RING, POLY, WINDOW]).save_pretrained(folder / "mixed")
    tiny_tokenizer().save_pretrained(folder / "mixed")
    return folder


def test_every_layer_is_told_and_the_teacher_is_found_by_the_record(here, tmp_path, capsys):
    words = ["explain", str(here / "out"), "--text", str(here / "text.jsonl"), "--tokens", "120"]
    assert cli.main([*words, "--out", str(tmp_path / "page")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:4] == ["layer", "mixer", "distance", "sinks"] and "important" in said[0]
    assert [line.split()[:2] for line in said[1:4]] == [["0", "gsa"], ["1", "softmax"], ["2", "gsa"]]
    assert said[2].split()[2] == "0.000", "softmax is the teacher's own"
    assert float(said[1].split()[2]) > 0.001 and "kept" in said[1]
    page = (tmp_path / "page" / "explain.html").read_text()
    assert "Distance against the teacher" in page and "Slot lifetimes" in page
    assert said[1].split("(")[0].strip() in page


def test_other_mixers_have_distances_alone_and_none_without_a_teacher(here, capsys):
    options = {"text": str(here / "text.jsonl"), "tokens": 100}
    alone = explain(here / "mixed", **options)
    assert [layer["distance"] for layer in alone] == [None] * 3
    assert "name the teacher with --teacher" in capsys.readouterr().out
    with_it = explain(here / "mixed", teacher=here / "source", **options)
    assert all(0 < layer["distance"] < 2 for layer in with_it)
    assert with_it[0]["slots"] and not with_it[1]["slots"] and not with_it[2]["slots"]


def test_a_window_that_holds_the_text_is_no_distance_away_and_a_zeroed_output_is_one(here):
    teacher = load(here / "source")
    wide, narrow = WINDOW | {"window": 64}, WINDOW | {"window": 2, "sinks": 0}
    model = load(here / "source", layer_mixers=[wide, narrow, KEPT])
    near, far, same = attention_distances(model, teacher, IDS)
    assert near < 1e-5 and far > 0.01 and same == 0
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    assert attention_distances(model, teacher, IDS)[0] == pytest.approx(1)


def test_the_important_tokens_are_those_the_map_ranks_highest(here):
    uneven = MEMORY | {"num_slots": [12, 7]}
    model = load(here / "source", layer_mixers=[uneven, MEMORY, MEMORY])
    layer = model.model.layers[0]
    with torch.no_grad():  # token 77's own direction
        ids = IDS.clone()
        ids[10] = ids[30] = 77
        ids[:2] = torch.tensor([78, 77])  # sinks
        assert 78 not in ids[2:]
        x = layer.input_layernorm(model.model.embed_tokens(torch.tensor([77])))
        layer.self_attn.importance.weight.copy_(x.expand_as(layer.self_attn.importance.weight))
    found = important_tokens(model, ids)
    assert list(found) == [0, 1, 2] and found[0][0] == 77 and len(set(found[0])) == 5
    assert important_tokens(load(here / "source", layer_mixers=[RING, KEPT, POLY]), ids) == {}


WRONG = {
    "a source": (["source"], "is not converted, so all its layers are softmax"),
    "a converted teacher": (["out", "--teacher", "{here}/mixed"], "is converted itself"),
    "another teacher": (["out", "--teacher", "{here}/other"], "has num_hidden_layers 2, and"),
    "too few tokens": (["out", "--tokens", "3"], "--tokens is 3; it must be at least 16"),
    "too little text": (["out", "--text", "{here}/short.txt"], "give a longer text"),
    "an out that is a file": (["out", "--out", "{here}/short.txt"], "is a file, not a folder"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_what_cannot_be_explained_is_refused_by_name(here, capsys, case):
    words, message = case
    (here / "short.txt").write_text("too short")
    tiny_source(here / "other", num_hidden_layers=2)
    words = [str(here / words[0]), *(word.replace("{here}", str(here)) for word in words[1:])]
    assert cli.main(["explain", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and said.out == ""
