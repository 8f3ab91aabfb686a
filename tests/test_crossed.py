"""Every kind of source with every kind of layer: converted from disk, opened, called, saved and opened again.

README's table of what is supported is made from SOURCES and KINDS. What single pairs need beyond this is in
test_model.py (the library's conventions) and test_convert.py (the account and its checks).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from test_model import GEOMETRIES, KEPT, MEMORY, PAPER, POLY, RING, WINDOW, steps
from tiny import tiny_source
from unsoftmax.convert.checkpoint import convert_checkpoint
from unsoftmax.convert.load import load
from unsoftmax.recipes.schema import parse_recipe

BEYOND = "dynamic rope beyond its length"  # where a token's keys hang on how many come after it, in any model
SOURCES = {
    **{f"Llama, {name}": g for name, g in GEOMETRIES.items() if "Mistral" not in name and name != BEYOND},
    "Llama, dynamic rope": {"rope_parameters": GEOMETRIES[BEYOND]["rope_parameters"]},
    "Llama in shards": {"shards": True},
    "Mistral": GEOMETRIES["Mistral"],
    "Mistral, sliding window": GEOMETRIES["Mistral with a window of 5"],
    "Mistral in shards, tied, heads wider than hidden / heads": {
        "family": "mistral",
        "shards": True,
        "tie_word_embeddings": True,
        "head_dim": 16,
    },
}
KINDS = {  # the recipe's mixer, and its softmax_layers
    "gated slots, ring": (RING, []),
    "gated slots, kept by importance": (MEMORY, []),
    "gated slots, paper": (PAPER, []),
    "PolySketch, power": (POLY | {"block": 4, "local": "power"}, []),
    "PolySketch, softmax window": (POLY | {"block": 4, "local": "softmax", "window": 8}, []),
    "window": (WINDOW, []),
    "softmax": (KEPT, []),
    "slots and softmax in turn": (MEMORY, [1]),
}
LAYERS = 2
TOKENS = 30  # past every window, ring and block above
GENERATOR = torch.Generator().manual_seed(11)
WORDS = ["stone", "river", "ask", "blue", "seven", "Anna", "goes", "where", "(x)", "and", "not", "kept."]
IDS = torch.randint(256, (2, TOKENS), generator=GENERATOR)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with `text.jsonl`, sixty documents of made-up words."""
    folder = tmp_path_factory.mktemp("crossed")
    picks = torch.randint(len(WORDS), (60, 30), generator=GENERATOR).tolist()
    lines = [json.dumps({"text": " ".join(WORDS[i] for i in row)}) for row in picks]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module", params=SOURCES.values(), ids=SOURCES)
def source(request, tmp_path_factory) -> Path:
    return tiny_source(tmp_path_factory.mktemp("source") / "s", num_hidden_layers=LAYERS, **request.param)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_source_converts_to_every_kind_of_layer(here, source, kind, tmp_path):
    mixer, softmax_layers = kind
    calibration = {"text": str(here / "text.jsonl"), "tokens": 256}
    recipe = parse_recipe(
        {"source": "tiny", "mixer": mixer, "softmax_layers": softmax_layers, "calibration": calibration}
    )
    out = convert_checkpoint(source, tmp_path / "out", recipe, verify=False, say=lambda line: None)
    model = load(out)
    names = [entry["name"] for entry in model.config.layer_mixers]
    assert names == ["softmax" if i in softmax_layers else mixer["name"] for i in range(LAYERS)]
    with torch.no_grad():
        logits = model(IDS, use_cache=False).logits
    assert logits.isfinite().all()

    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "again")(IDS, use_cache=False).logits, logits)
        if mixer["name"] == "softmax":
            assert torch.equal(load(source)(IDS, use_cache=False).logits, logits)

    exact = model.double()  # so that closeness needs no tolerance of its own
    whole = exact(IDS, use_cache=False).logits
    decoded, cache = steps(exact, IDS, [1, 7, 13, 4, *[1] * (TOKENS - 25)])
    torch.testing.assert_close(decoded, whole)
    assert cache.get_seq_length() == TOKENS
