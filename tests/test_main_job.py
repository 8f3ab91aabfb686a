"""The main job on real sizes: a real checkpoint, and the shapes of a 7B."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tiny import tiny_tokenizer
from unsoftmax.convert.checkpoint import convert_checkpoint
from unsoftmax.convert.fetch import fetch
from unsoftmax.convert.load import load, tokenizer
from unsoftmax.demo import demo
from unsoftmax.recipes.schema import load_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    return fetch("smollm2-135m", tmp_path_factory.mktemp("source") / "smollm2-135m")


def command(name: str, *words: str | Path) -> str:
    """Run a console script as a user would; its output."""
    program = Path(sys.executable).parent / name
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_demo_converts_trains_and_scores_a_real_checkpoint(tmp_path, smollm2):
    page = demo(tmp_path / "demo", source=smollm2)
    names = ("teacher", "window-control", "converted", "trained")
    found = {n: json.loads((page.parent / "results" / n / "results.json").read_text()) for n in names}
    ppl, recall = (
        {n: f["text"]["checkpoint"][key] for n, f in found.items()} for key in ("ppl", "recall_nll")
    )
    assert (
        ppl["trained"] < ppl["converted"] < ppl["window-control"]
    )  # on this text, training beats the teacher
    assert recall["teacher"] < recall["trained"] < recall["converted"] < recall["window-control"]
    text = page.read_text()
    assert all(f"{ppl[n]:.2f}" in text for n in names)


def test_polysketch_goes_through_the_same_job(tmp_path, smollm2):
    out, run = tmp_path / "polysketch", tmp_path / "run"
    small = ["--set", "calibration.text=python-docs", "--set", "calibration.tokens=2048"]
    command("convert-checkpoint", smollm2, out, "--recipe", "smollm2-135m-polysketch", *small)
    brief = ("data.sources=[{text: python-docs}]", "data.context_tokens=256", "train.batch_tokens=512")
    brief += ("train.total_tokens=1024", "train.micro_batch_sequences=2", "train.warmup_steps=0")
    brief += ("train.eval_rows=2",)
    sets = [word for key in brief for word in ("--set", key)]
    command("unsoftmax-train", "smollm2-135m-polysketch", "--model", out, "--run", run, *sets)
    scores = tmp_path / "scores"
    words = ("--teacher", smollm2, "--suite", "text", "--text", "python-docs", "--limit", "2")
    text = command("unsoftmax-eval", run / "export", *words, "--out", scores)
    result = json.loads((scores / "results.json").read_text())
    assert result["text"]["checkpoint"]["ppl"] < 3 * result["text"]["teacher"]["ppl"], text


def test_a_checkpoint_with_the_shapes_of_mistral_7b_converts_trains_and_generates(tmp_path):
    config = MistralConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=1024,
        sliding_window=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    source = tmp_path / "source"
    MistralForCausalLM(config).bfloat16().save_pretrained(source, max_shard_size="400MB")
    tiny_tokenizer().save_pretrained(source)
    out, run = tmp_path / "converted", tmp_path / "run"
    few = ["calibration.text=python-docs", "calibration.tokens=1024", "calibration.sharing_tokens=1024"]
    recipe = load_recipe("mistral-7b-gsa", few)
    convert_checkpoint(source, out, recipe, say=lambda line: None)
    brief = ("data.sources=[{text: python-docs}]", "data.context_tokens=128", "train.batch_tokens=128")
    brief += ("train.total_tokens=256", "train.micro_batch_sequences=1", "train.warmup_steps=0")
    brief += ("train.eval_rows=1", "train.zero_stage=0")
    sets = [word for key in brief for word in ("--set", key)]
    command("unsoftmax-train", "mistral-7b-gsa", "--model", out, "--run", run, *sets)
    model, words = load(run / "export", dtype=torch.bfloat16), tokenizer(run / "export")
    ids = words("The harbour was quiet", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert made.shape == (1, ids.shape[1] + 8)
