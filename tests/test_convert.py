"""convert-checkpoint from end to end on tiny checkpoints: the start, the checks, and all or nothing."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import tiny_model, tiny_source
from unsoftmax.convert import checkpoint, provenance, start, verify, weights
from unsoftmax.convert.checkpoint import convert_checkpoint
from unsoftmax.convert.config import convert_config
from unsoftmax.convert.load import load
from unsoftmax.convert.model import CONVERTED_MODELS
from unsoftmax.convert.source import SINGLE, open_source
from unsoftmax.convert.start import TeacherLayers, start_layers
from unsoftmax.convert.verify import sample_rows, verify_conversion, window_control
from unsoftmax.convert.weights import plan_weights, skeleton
from unsoftmax.kernels.gsa.layer import GatedSlotAttention
from unsoftmax.kernels.mixer import Mixer
from unsoftmax.recipes.schema import Recipe, parse_recipe

RING = {"name": "gsa", "num_slots": 16, "sinks": 2}
MEMORY = RING | {"recent": 5}
POLYSKETCH = {"name": "polysketch"}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Forty documents of made-up words."""
    words = ["stone", "river", "ask", "blue", "seven", "Anna", "goes", "where", "(x)", "and", "not", "kept."]
    generator = torch.Generator().manual_seed(5)
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    with path.open("w") as f:
        for _ in range(40):
            picks = torch.randint(len(words), (60,), generator=generator).tolist()
            f.write(json.dumps({"text": " ".join(words[i] for i in picks)}) + "\n")
    return path


@pytest.fixture
def recipe(text):
    def make(mixer: dict, **rest) -> Recipe:
        tree = {"source": "tiny", "mixer": mixer, "calibration": {"text": str(text), "tokens": 1024}}
        return parse_recipe(tree | rest)

    return make


@pytest.fixture
def said() -> list[str]:
    return []


def left_over(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("out"))


# ---- what a conversion is


CASES = {  # family, shards, mixer, softmax layers, source's config
    "llama to a ring": ("llama", False, RING, [], {}),
    "mistral in shards to a ring with memory": ("mistral", True, MEMORY, [], {"sliding_window": 40}),
    "one layer keeps softmax": ("llama", True, MEMORY, [1], {}),
    "tied embeddings, one key/value head": (
        "llama",
        False,
        RING,
        [],
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "biases, wide heads": ("llama", False, RING, [], {"attention_bias": True, "head_dim": 16}),
    "to polysketch": ("llama", False, POLYSKETCH, [], {}),
    "to the paper's layer": ("llama", False, {"name": "gsa", "num_slots": 16, "start": "paper"}, [], {}),
    "all softmax": ("llama", False, {"name": "softmax"}, [], {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_conversion_passes_its_own_checks_and_opens(case, recipe, said, tmp_path):
    family, shards, mixer, softmax, geometry = case
    folder = tiny_source(tmp_path / "s", family, shards=shards, dtype=torch.bfloat16, **geometry)
    out = convert_checkpoint(folder, tmp_path / "out", recipe(mixer, softmax_layers=softmax), say=said.append)

    assert not [line for line in said if "FAIL" in line] and [line for line in said if "PASS" in line]
    model = load(out)
    names = [entry["name"] for entry in model.config.layer_mixers]
    assert names == ["softmax" if i in softmax else mixer["name"] for i in range(3)]
    assert model(input_ids=torch.arange(40)[None]).logits.isfinite().all()
    assert left_over(tmp_path) == ["out"]


def test_companions_travel_untouched_and_the_record_is_complete(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    (folder / "generation_config.json").write_text('{"eos_token_id":  257}')
    (folder / "notes.txt").write_text("mine")
    provenance.extend(folder, "fetch", {"name": "tiny"})
    out = convert_checkpoint(folder, tmp_path / "out", recipe(RING), say=said.append)

    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    assert not (out / "notes.txt").exists()
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    assert config["architectures"] == ["UnsoftLlamaForCausalLM"]
    assert "AutoModelForCausalLM" in config["auto_map"]
    fetched, converted = provenance.read(out)["steps"]
    assert fetched["step"] == "fetch" and converted["step"] == "convert"
    assert converted["source_sha256"] == open_source(folder).sha256()
    assert converted["recipe"]["mixer"]["num_slots"] == 16
    first = converted["checks"][0]
    assert first["name"] == "copied tensors whose bits differ" and first["value"] == 0


def test_the_account_comes_in_order_and_ends_with_commands(recipe, said, tmp_path):
    convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", recipe(RING), say=said.append)
    heads = [line.split()[0] for line in said if not line.startswith(" ")]
    assert heads == ["source", "plan", "budget", "verification", "wrote", "next"]
    assert f"unsoftmax-eval {tmp_path / 'out'}" in said[-1]


def test_a_dry_run_tells_everything_and_writes_nothing(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    before = sorted(tmp_path.rglob("*"))
    convert_checkpoint(folder, tmp_path / "out", recipe(MEMORY), dry_run=True, say=said.append)
    assert sorted(tmp_path.rglob("*")) == before
    assert any("new" in line and "importance" in line for line in said)
    assert "nothing was written" in said[-1]


def test_converting_twice_gives_the_same_bytes(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    for name in ("a", "b"):
        convert_checkpoint(folder, tmp_path / name, recipe(MEMORY), verify=False, say=said.append)
    assert (tmp_path / "a" / SINGLE).read_bytes() == (tmp_path / "b" / SINGLE).read_bytes()


# ---- the start


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_teacher_one_layer_at_a_time_is_the_teacher(family, tmp_path):
    geometry = {"sliding_window": 20} if family == "mistral" else {"attention_bias": True}
    folder = tiny_source(tmp_path / "s", family, shards=True, **geometry)
    rows = torch.randint(256, (6, 64))
    whole = tiny_model(family, **geometry)
    seen: list[torch.Tensor] = []
    for layer in whole.model.layers:
        layer.input_layernorm.register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad():
        whole(input_ids=rows)

    teacher = TeacherLayers(open_source(folder), lambda: rows, torch.device("cpu"))
    for layer, x in enumerate(seen):
        got = torch.cat([batch for batch, _ in teacher.inputs(layer)])
        torch.testing.assert_close(got, x, rtol=1e-5, atol=1e-5)
    rotary = teacher.inputs(2)[0][1]
    cos, sin = whole.model.rotary_emb(seen[0], torch.arange(64)[None])
    assert torch.equal(rotary.cos, cos) and torch.equal(rotary.sin, sin)


def started(folder: Path, entry: dict, rows):
    source = open_source(folder)
    config = convert_config(source.config, [entry] * 3)
    model = skeleton(CONVERTED_MODELS[source.family], config)
    plan = plan_weights(source, config, model)
    return start_layers(
        source, model, plan.new, rows, seed=3, device=torch.device("cpu"), say=lambda line: None
    )


def test_the_fit_of_each_layer_is_the_mixers_own_on_the_teachers_inputs(tmp_path):
    folder = tiny_source(tmp_path / "s")
    rows = torch.randint(256, (8, 100))
    new, report = started(folder, MEMORY, lambda: rows)

    teacher = TeacherLayers(open_source(folder), lambda: rows, torch.device("cpu"))
    model = load(folder, layer_mixers=[MEMORY] * 3)
    for i, layer in enumerate(model.model.layers):
        numbers = layer.self_attn.fit(teacher.inputs(i))
        assert report[i] == pytest.approx(numbers)
        for name, tensor in layer.self_attn.new_tensors().items():
            got = new[f"model.layers.{i}.self_attn.{name}"]
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, tensor.detach())


def test_no_text_is_read_where_no_mixer_wants_it(recipe, said, tmp_path):
    def no_rows():
        raise AssertionError("calibration text was read")

    folder = tiny_source(tmp_path / "s")
    new, report = started(folder, {"name": "gsa", "num_slots": 8, "start": "paper"}, no_rows)
    assert new and report == {}
    again, _ = started(folder, {"name": "gsa", "num_slots": 8, "start": "paper"}, no_rows)
    assert all(torch.equal(new[key], again[key]) for key in new)


def test_a_start_that_is_not_finite_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(start.TeacherLayers, "inputs", lambda self, layer: pytest.fail("unused"))
    mixer = Mixer.fit

    def broken(self, batches):
        next(iter(self.new_tensors().values())).data.fill_(float("nan"))
        return mixer(self, batches)

    monkeypatch.setattr(GatedSlotAttention, "fit", broken)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.importance.*NaN or inf.*calibration\.text"):
        started(tiny_source(tmp_path / "s"), MEMORY, lambda: torch.zeros(1, 8).long())


@pytest.mark.parametrize("mixer", [MEMORY, POLYSKETCH], ids=["memory", "polysketch"])
@pytest.mark.parametrize(
    "key",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.input_layernorm.weight",
    ],
)
def test_weights_that_are_not_finite_are_not_blamed_on_the_text(key, mixer, recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    damage(folder, key, lambda w: w.fill_(float("nan")))
    with pytest.raises(ValueError) as caught:
        convert_checkpoint(folder, tmp_path / "out", recipe(mixer), say=said.append)
    assert str(caught.value).startswith(f"{folder / SINGLE}: {key} holds NaN or inf")
    assert left_over(tmp_path) == []


def test_calibration_text_that_is_too_short_is_refused_by_key(recipe, said, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("four words and more")
    chosen = recipe(MEMORY, calibration={"text": str(short), "tokens": 4096})
    with pytest.raises(ValueError, match=r"calibration\.text .*short\.txt.*at least"):
        convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", chosen, say=said.append)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("tokens", [1, 24, 26])
def test_too_few_calibration_tokens_are_refused_by_key_before_any_work(tokens, recipe, said, tmp_path):
    folder, text = tiny_source(tmp_path / "s"), recipe(MEMORY).calibration.text
    message = (
        rf"^calibration\.tokens is {tokens}, .* rows of {tokens} tokens; gsa .* 27 or more: such as 30720"
    )
    with pytest.raises(ValueError, match=message):
        chosen = recipe(MEMORY, calibration={"text": text, "tokens": tokens})
        convert_checkpoint(folder, tmp_path / "out", chosen, dry_run=True, say=said.append)
    convert_checkpoint(
        folder,
        tmp_path / "out",
        recipe(MEMORY, calibration={"text": text, "tokens": 27}),
        verify=False,
        say=said.append,
    )
    assert left_over(tmp_path) == ["out"]


def test_sinks_that_no_calibration_row_reaches_past_are_refused_by_key(recipe, said, tmp_path):
    chosen = recipe(MEMORY | {"num_slots": 160, "sinks": 150})
    with pytest.raises(ValueError, match=r"mixer\.sinks and mixer\.recent .* 198 tokens.* 128 here"):
        convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", chosen, say=said.append)


HUGE = {  # mixer, the key that is named, its value, and one that works
    "slots": (RING | {"num_slots": 10**9}, "num_slots", "1000000000", 64),
    "slots that are kept": (MEMORY | {"num_slots": 10**9}, "num_slots", "1000000000", 64),
    "slots of one head": (RING | {"num_slots": [16, 10**9]}, "num_slots", r"\[16, 1000000000\]", 64),
    "slots of the paper": (RING | {"start": "paper", "num_slots": 10**9}, "num_slots", "1000000000", 64),
    "sinks, with slots for them": (
        RING | {"num_slots": 10**9, "sinks": 10**8},
        "num_slots",
        "1000000000",
        64,
    ),
    "a window": ({"name": "window", "window": 10**9}, "window", "1000000000", 60),
    "sinks beside a window": ({"name": "window", "sinks": 10**9}, "sinks", "1000000000", 4),
    "a sketch": (POLYSKETCH | {"sketch_size": 10**9}, "sketch_size", "1000000000", 32),
    "a block": (POLYSKETCH | {"block": 10**9}, "block", "1000000000", 32),
    "a window of blocks": (POLYSKETCH | {"window": 32 * 10**8}, "window", "3200000000", 64),
    "sinks beside sketches": (POLYSKETCH | {"sinks": 10**9}, "sinks", "1000000000", 4),
}


@pytest.mark.parametrize("mixer, key, value, works", HUGE.values(), ids=HUGE)
def test_a_state_larger_than_the_sources_cache_is_refused_before_it_is_made(
    mixer, key, value, works, recipe, said, tmp_path
):
    message = (
        rf"s/config\.json: mixer\.{key} is {value}: .* 3 layers x [\d,]+ numbers x 4 bytes = [\d,]+ bytes"
    )
    with pytest.raises(ValueError, match=rf"{message}; at most 268,435,456 .*\. {works} works$") as caught:
        convert_checkpoint(
            tiny_source(tmp_path / "s"), tmp_path / "out", recipe(mixer), dry_run=True, say=said.append
        )
    numbers, total = re.findall(r"x ([\d,]+) numbers x 4 bytes = ([\d,]+) bytes", str(caught.value))[0]
    assert int(total.replace(",", "")) == 12 * int(numbers.replace(",", "")) > 10**9
    assert left_over(tmp_path) == []


TEXTS = {  # mixer, the recipe's key, what it names, how the message begins
    "no calibration text": (MEMORY, "calibration", {"text": "none.jsonl"}, r"calibration\.text: none\.jsonl"),
    "no held-out text": (RING, "data", {"held_out": "none.txt"}, r"data\.held_out: none\.txt does not exist"),
    "empty calibration text": (
        MEMORY,
        "calibration",
        {"text": "empty.txt"},
        r"calibration\.text: empty\.txt holds no document with text",
    ),
    "empty held-out text": (RING, "data", {"held_out": "empty.txt"}, r"data\.held_out: empty\.txt holds no"),
    "held-out text that is none": (
        RING,
        "data",
        {"held_out": "bad.jsonl"},
        r"data\.held_out: bad\.jsonl, line 2 is not JSON",
    ),
}


@pytest.mark.parametrize("dry_run", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize("mixer, key, names, message", TEXTS.values(), ids=TEXTS)
def test_a_text_that_cannot_be_read_is_refused_by_key_before_any_work(
    mixer, key, names, message, dry_run, recipe, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\noops\n')
    monkeypatch.setattr(checkpoint, "_fill", lambda *args: pytest.fail("the work began"))
    folder = tiny_source(tmp_path / "s")
    with pytest.raises(ValueError, match="^" + message):
        convert_checkpoint(
            folder, tmp_path / "out", recipe(mixer, **{key: names}), dry_run=dry_run, say=said.append
        )
    assert left_over(tmp_path) == []


def test_a_tokenizer_without_an_end_of_text_is_refused_by_folder(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{folder}: the tokenizer has no eos token.*set eos_token"):
        convert_checkpoint(folder, tmp_path / "out", recipe(MEMORY), dry_run=True, say=said.append)


def test_texts_that_nothing_reads_need_not_be_there(recipe, said, tmp_path):
    chosen = recipe({"name": "softmax"}, calibration={"text": "none.jsonl"}, data={"held_out": "none.jsonl"})
    convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", chosen, verify=False, say=said.append)
    assert left_over(tmp_path) == ["out"]


# ---- verification


def test_layer_by_layer_verification_gives_the_same_verdicts(recipe, said, tmp_path, monkeypatch):
    folder = tiny_source(tmp_path / "s", shards=True, dtype=torch.bfloat16)
    monkeypatch.setattr(verify, "available_memory", lambda: 0)
    convert_checkpoint(folder, tmp_path / "out", recipe(RING, softmax_layers=[0]), say=said.append)
    rows = [line for line in said if "PASS" in line]
    assert len(rows) == 5 and not [line for line in said if "FAIL" in line]
    assert sum("worst in layer" in line for line in rows) == 4


def damage(out: Path, key: str, edit) -> None:
    tensors = load_file(out / SINGLE)
    edit(tensors[key])
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("memory", [1 << 60, 0], ids=["whole", "layer by layer"])
def test_scrambled_heads_fail_the_checks(memory, recipe, said, tmp_path, monkeypatch):
    """Key heads in cyclic instead of block order, as public converters have written them."""
    folder = tiny_source(tmp_path / "s")
    chosen = recipe(RING)
    out = convert_checkpoint(folder, tmp_path / "out", chosen, verify=False, say=said.append)
    key = "model.layers.1.self_attn.k_proj.weight"
    damage(out, key, lambda w: w.copy_(w.view(2, 8, 32).flip(0).reshape(16, 32)))
    source = open_source(folder)
    model = skeleton(CONVERTED_MODELS["llama"], convert_config(source.config, [RING] * 3))
    plan = plan_weights(source, convert_config(source.config, [RING] * 3), model)
    monkeypatch.setattr(verify, "available_memory", lambda: memory)
    checks = {c.name: c for c in verify_conversion(source, out, plan, chosen, say=said.append)}
    assert checks["copied tensors whose bits differ"].passed is False
    assert checks[verify.RING if memory else verify.IDENTITY].passed is False


@pytest.mark.parametrize("forgotten, row", [("mask", "left padding"), ("state", "prefill in pieces")])
def test_a_mixer_that_forgets_an_argument_is_found(forgotten, row, recipe, said, tmp_path, monkeypatch):
    forward = GatedSlotAttention.forward

    def careless(self, x, **given):
        return forward(self, x, **(given | {forgotten: None}))

    monkeypatch.setattr(GatedSlotAttention, "forward", careless)
    with pytest.raises(RuntimeError, match=row):
        convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", recipe(RING), say=said.append)
    assert sum("FAIL" in line for line in said) == 1


def test_a_failed_check_leaves_nothing_and_names_the_row(recipe, said, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "SAME", -1.0)
    with pytest.raises(RuntimeError, match=r"nothing was left at .*left padding, rel\. error: .*allowed -1"):
        convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", recipe(RING), say=said.append)
    assert left_over(tmp_path) == []


def test_a_number_that_is_nan_never_passes():
    assert verify.Check("x", float("nan"), 1.0).passed is False
    assert verify.Check("x", 1.0, 1.0).passed is True and verify.Check("x", 1.0).passed is None


def test_the_window_control_has_the_reach_of_the_slots():
    config = convert_config(tiny_model().config, [MEMORY, RING, {"name": "softmax"}])
    limit, entries = window_control(config)
    window = {"name": "window", "window": 14, "sinks": 2}
    assert limit is None and entries == [window, window, {"name": "softmax"}]
    config.layer_mixers = config.layer_mixers[1:]
    assert window_control(config)[0] == verify.SAME


def test_uneven_slots_are_held_against_a_window_of_their_mean():
    entry = RING | {"start": "ring", "sinks": 2, "recent": 4}
    layers = [entry | {"num_slots": [30, 10]}, {"name": "softmax"}, entry | {"num_slots": [6, 18]}]
    limit, entries = window_control(SimpleNamespace(layer_mixers=layers))
    window = {"name": "window", "window": 14, "sinks": 2}
    assert limit is None and entries == [window, {"name": "softmax"}, window]


def test_a_pickle_source_is_converted_and_verified(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()
    convert_checkpoint(folder, tmp_path / "out", recipe(MEMORY), allow_pickle=True, say=said.append)
    assert sum("PASS" in line for line in said) == 4 and not any("FAIL" in line for line in said)


# ---- all or nothing


def test_an_output_that_exists_is_not_touched(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ValueError, match="exists already"):
        convert_checkpoint(folder, tmp_path / "out", recipe(RING), say=said.append)
    assert left_over(tmp_path) == ["out"] and (tmp_path / "out" / "mine").exists()


def test_a_place_without_parent_is_refused(recipe, said, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "a" / "out", recipe(RING), say=said.append)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError], ids=lambda e: e.__name__)
def test_an_interrupted_conversion_leaves_nothing(error, recipe, said, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise error

    monkeypatch.setattr(checkpoint, "write_remote_code", stop)  # after the weights were written
    with pytest.raises(error):
        convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", recipe(RING), say=said.append)
    assert left_over(tmp_path) == []


def test_weights_that_are_not_finite_leave_nothing(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    damage(folder, "model.norm.weight", lambda w: w.fill_(float("nan")))
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds NaN or inf"):
        convert_checkpoint(folder, tmp_path / "out", recipe(RING), say=said.append)
    assert left_over(tmp_path) == []


def test_a_disk_too_small_is_seen_before_anything_is_written(recipe, said, tmp_path, monkeypatch):
    folder = tiny_source(tmp_path / "s")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"MiB are needed and 0\.00 MiB are free"):
        convert_checkpoint(folder, tmp_path / "out", recipe(RING), say=said.append)
    assert left_over(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(recipe, said, tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights.os, "fsync", full)
    with pytest.raises(ValueError, match="the disk is full"):
        convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", recipe(RING), say=said.append)
    assert left_over(tmp_path) == []


def test_what_a_killed_run_left_is_removed_and_said(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    stale = tmp_path / f"out.partial-{dead.stdout.strip()}"
    stale.mkdir()
    convert_checkpoint(folder, tmp_path / "out", recipe(RING), verify=False, say=said.append)
    assert left_over(tmp_path) == ["out"] and said[0].startswith(f"removed {stale}")


def test_a_run_that_is_still_writing_is_left_alone(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    busy = tmp_path / f"out.partial-{os.getppid()}"
    busy.mkdir()
    with pytest.raises(ValueError, match="is converting to"):
        convert_checkpoint(folder, tmp_path / "out", recipe(RING), say=said.append)
    assert busy.exists()


SIGNALLED = """
import os, signal, sys
from unsoftmax import cli
from unsoftmax.convert import checkpoint
begun = checkpoint.write_remote_code
def stop(folder):
    begun(folder)
    assert any(folder.iterdir())
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    signal.sigtimedwait([], 5)
checkpoint.write_remote_code = stop
sys.exit(cli.convert_checkpoint(sys.argv[2:]))
"""


@pytest.mark.parametrize("name, status", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_ends_the_work_and_nothing_stays_behind(text, tmp_path, name, status):
    source = tiny_source(tmp_path / "s")
    words = [str(source), str(tmp_path / "out"), "--recipe", "smollm2-135m-gsa", "--no-verify"]
    for change in (
        "mixer={name: gsa, num_slots: 16, sinks: 2}",
        f"calibration.text={text}",
        "calibration.tokens=1024",
    ):
        words += ["--set", change]
    command = [sys.executable, "-c", SIGNALLED, name, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert left_over(tmp_path) == [] and "Traceback" not in done.stderr


def test_a_text_without_a_word_is_refused_by_its_key(recipe, said, tmp_path):
    (tmp_path / "blank.txt").write_text(" ")
    made = recipe({"name": "softmax"}, data={"held_out": str(tmp_path / "blank.txt")})
    with pytest.raises(ValueError, match=r"data\.held_out: .*blank\.txt holds no document"):
        convert_checkpoint(tiny_source(tmp_path / "s"), tmp_path / "out", made, say=said.append)
    with pytest.raises(ValueError, match=r"blank\.txt holds no text to verify with"):
        sample_rows(open_source(tmp_path / "s"), made)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s", vocab_size=200, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with pytest.raises(ValueError, match=r"does not fit: it has token id 258, .* vocab_size 200"):
        convert_checkpoint(folder, tmp_path / "out", recipe(RING), say=said.append)


def test_a_folder_without_tokenizer_is_refused(recipe, said, tmp_path):
    folder = tiny_source(tmp_path / "s")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="no tokenizer files"):
        convert_checkpoint(folder, tmp_path / "out", recipe(RING), say=said.append)
