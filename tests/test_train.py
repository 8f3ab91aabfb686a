import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import tiny_source
from train_worker import perform
from unsoftmax import cli
from unsoftmax.convert import provenance
from unsoftmax.convert.load import load, tokenizer
from unsoftmax.recipes.schema import parse_recipe
from unsoftmax.train import checkpoint, engine, loop, progress
from unsoftmax.train.engine import Engine, Place, StepResult, saved_weights
from unsoftmax.train.export import export, exported_step
from unsoftmax.train.objective import NextToken, summed_cross_entropy
from unsoftmax.train.packing import IGNORE, Batch, Row, batches, collate

BIN = Path(sys.executable).parent
SOFTMAX = {"name": "softmax"}
RING = {"name": "gsa", "num_slots": 8, "sinks": 2}
MEMORY = {**RING, "recent": 3}
PAPER = {"name": "gsa", "num_slots": 8, "start": "paper"}
SKETCH = {"name": "polysketch", "sketch_size": 8, "block": 16, "local": "softmax", "window": 16, "sinks": 2}
DRAWN = {**SKETCH, "sketch": "gaussian", "degree": 8}
STARTS = {  # what a recipe can ask for; the last two, several mixers at once, are for what goes around it
    "start": [MEMORY, SOFTMAX, PAPER],
    "sketch start": [SKETCH, SOFTMAX, DRAWN],
    "mixed": [MEMORY, SOFTMAX, SKETCH],
    "fixed": [MEMORY, SOFTMAX, DRAWN],
}
ZERO = {"torchrun": (0, 1, 2, 3), "deepspeed": (0, 2)}  # ZeRO stages that two ranks train on, by launcher
ENGINES = ["one process", *(f"{name}, ZeRO {', '.join(map(str, z))}" for name, z in ZERO.items())]  # README
FIXED = ("importance.weight", "importance.decay", "sketch.leaf", "sketch.inner")  # never trained
SAFE = "model.safetensors"
ONE_STEP = {"total_tokens": 256, "warmup_steps": 0, "schedule": "constant", "grad_clip": 0.5}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with tiny converted checkpoints, STARTS, their `source`, and text, `text.jsonl`."""
    folder = tmp_path_factory.mktemp("train")
    tiny_source(folder / "source")
    for name, mixers in STARTS.items():
        load(folder / "source", layer_mixers=mixers).save_pretrained(folder / name)
        tokenizer(folder / "source").save_pretrained(folder / name)
    r = random.Random(0)
    texts = ["".join(r.choice("abcdefgh ") for _ in range(r.choice([1, 7, 30, 90]))) for _ in range(600)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


def tree(here, mixer="gsa", **train):
    """A recipe of six steps of 8 rows of 32 tokens; layer 1 keeps its softmax."""
    defaults = {
        "total_tokens": 6 * 256,
        "batch_tokens": 256,
        "micro_batch_sequences": 2,
        "warmup_steps": 2,
        "peak_lr": 1.0e-3,
        "save_every_steps": 2,
        "keep_checkpoints": 9,
        "eval_every_steps": 4,
        "eval_rows": 2,
        "dtype": "fp32",
    }
    return {
        "source": "tiny",
        "mixer": {"name": mixer},
        "softmax_layers": [1],
        "data": {
            "sources": [{"text": str(here / "text.jsonl")}],
            "context_tokens": 32,
            "shuffle_documents": 16,
        },
        "train": {**defaults, **train},
    }


@pytest.fixture(autouse=True)
def plain_empty(monkeypatch):
    """DeepSpeed's large empty buffers are not filled with NaN each time; it would take most of the time."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@pytest.fixture
def alone(monkeypatch):
    """Training in this process; the launcher's variables it sets do not outlive the test."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return engine.start(0)


def rows_logged(run, kind="train"):
    """What a run's log says of its numbers; speeds and memory left out."""
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    keys = ("step", "tokens", "loss", "lr", "grad_norm", "applied", "nll")
    return [{k: row[k] for k in keys if k in row} for row in log if row["kind"] == kind]


def weights(run):
    return load_file(run / "export" / SAFE)


def assert_same_run(run, whole):
    assert rows_logged(run) == rows_logged(whole)
    assert rows_logged(run, "held_out") == rows_logged(whole, "held_out")
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys()
    assert [n for n in theirs if not torch.equal(ours[n], theirs[n])] == []


def launch(folder, jobs, launcher):
    """Run jobs on two ranks, under torchrun or deepspeed."""
    list_of_jobs = folder / f"jobs-{len(list(folder.glob('jobs-*')))}.json"
    list_of_jobs.write_text(json.dumps(jobs))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    words = {
        "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", port, "--no-python"],
        "deepspeed": [
            *("deepspeed", "--num_gpus", "2", "--master_port", port, "--no_python", "--no_local_rank")
        ],
    }[launcher]
    command = [str(BIN / words[0]), *words[1:], sys.executable]
    command += [str(Path(__file__).with_name("train_worker.py")), str(list_of_jobs)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    errors = "\n".join(line for line in done.stderr.splitlines() if "rank0]" in line)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{errors or done.stderr[-5000:]}"
    return done.stdout


# ---- two ranks, two launches


@pytest.fixture(scope="module")
def two_ranks(here):
    """Under torchrun one step on each ZeRO stage, whole runs, first halves; under deepspeed the rest."""
    start = str(here / "start")
    jobs = [
        {"recipe": tree(here, zero_stage=z, **ONE_STEP), "run": str(here / f"one-{z}"), "model": start}
        for z in ZERO["torchrun"]
    ]
    sketch = tree(here, mixer="polysketch", zero_stage=3, **ONE_STEP)
    jobs.append({"recipe": sketch, "run": str(here / "one-3-sketch"), "model": str(here / "sketch start")})
    again = []
    for z in ZERO["deepspeed"]:
        recipe = tree(here, zero_stage=z, dtype="bf16")
        jobs.append({"recipe": recipe, "run": str(here / f"whole-{z}"), "model": start})
        jobs.append({"recipe": recipe, "run": str(here / f"half-{z}"), "model": start, "stop_at": 2})
        again.append({"recipe": recipe, "run": str(here / f"half-{z}"), "resume": "auto"})
    launch(here, jobs, "torchrun")
    said = launch(here, again, "deepspeed")
    return here, said


def plain_adamw_step(here, recipe, start):
    """The start after one step of torch's own AdamW on the run's first batch; and the start."""
    model, t = load(here / start), recipe.train
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    new = {n for n in before if n not in load(here / "source").state_dict()}
    assert new
    groups = [
        {
            "params": [p],
            "lr": t.peak_lr * (t.new_lr_scale if n in new else 1),
            "weight_decay": t.weight_decay if p.ndim >= 2 else 0.0,
        }
        for n, p in model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(t.beta1, t.beta2))
    batch = first_batch(here, recipe, micro=1)
    loss = sum(NextToken(model)(*p) for p in batch.passes) / batch.targets
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.grad_clip)
    optimizer.step()
    return before, {n: p.detach() for n, p in model.named_parameters()}, loss.item(), norm.item()


def first_batch(here, recipe, micro):
    rows = loop.token_rows_of(recipe, tokenizer(here / "start"))
    count = recipe.train.batch_tokens // recipe.data.context_tokens
    return next(batches(rows, batch_rows=count, micro_rows=micro, rank=0, world=1))


@pytest.mark.parametrize("run", [*(f"one-{z}" for z in ZERO["torchrun"]), "one-3-sketch"])
def test_one_step_of_any_zero_stage_on_two_ranks_is_plain_adamw(two_ranks, run):
    here, _ = two_ranks
    start = "sketch start" if "sketch" in run else "start"
    before, after, loss, norm = plain_adamw_step(here, parse_recipe(tree(here, **ONE_STEP)), start)
    [row] = rows_logged(here / run)
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5, "the gradient must be clipped for this test to say something"
    found = weights(here / run)
    for name in after:
        step = after[name] - before[name]
        assert step.norm() > 0, name
        error = (found[name] - after[name]).norm() / step.norm()
        assert error < 1e-3, f"{name}: the step is off by {error:.1e}"


@pytest.mark.parametrize("run", [*(f"one-{z}" for z in range(4)), "one-3-sketch", "whole-0", "half-2"])
def test_what_is_fitted_or_drawn_leaves_training_as_it_came(two_ranks, run):
    here, _ = two_ranks
    assert parse_recipe(tree(here)).train.weight_decay > 0
    folder = "sketch start" if "sketch" in run else "start"
    start, found = load_file(here / folder / SAFE), weights(here / run)
    fixed = [name for name in start if name.endswith(FIXED)]
    assert len(fixed) == 2
    for name in start:
        assert torch.equal(found[name], start[name]) == (name in fixed), name


@pytest.mark.parametrize("zero", ZERO["deepspeed"])
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(two_ranks, zero):
    here, said = two_ranks
    assert f"resumed from {here / f'half-{zero}'}/checkpoints/step-00000002, step 2" in said
    assert [r["step"] for r in rows_logged(here / f"half-{zero}")] == [1, 2, 3, 4, 5, 6]
    assert_same_run(here / f"half-{zero}", here / f"whole-{zero}")


@pytest.mark.slow
def test_runs_resumed_twice_on_any_zero_stage_are_bit_for_bit_the_same(here):
    folder, start = here / "twice", str(here / "start")
    folder.mkdir()
    recipes = [tree(here, zero_stage=z, dtype="bf16", activation_checkpointing=True) for z in range(4)]
    whole = [{"recipe": r, "run": str(folder / f"whole-{z}"), "model": start} for z, r in enumerate(recipes)]
    parts = [{"recipe": r, "run": str(folder / f"parts-{z}"), "model": start} for z, r in enumerate(recipes)]
    launch(folder, [*whole, *({**p, "stop_at": 2} for p in parts)], "torchrun")
    for stop_at in (4, None):
        launch(folder, [{**p, "resume": "auto", "stop_at": stop_at} for p in parts], "torchrun")
    for z in range(4):
        assert_same_run(folder / f"parts-{z}", folder / f"whole-{z}")


# ---- one process


@pytest.fixture(scope="module")
def whole(here):
    """A run of one process that never stopped, with checkpoints at steps 2, 4 and 6."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")
            patch.delenv(name)
        perform({"recipe": tree(here), "run": str(here / "alone"), "model": str(here / "start")})
    return here / "alone"


def broken_off(here, whole, name):
    """A copy of `whole` as if it had been killed after its last checkpoint."""
    run = here / name
    shutil.copytree(whole, run)
    shutil.rmtree(run / "export")
    return run


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE = {
    "a bit of the optimizer state flipped": ("*optim_states.pt", flip_a_bit, "SHA-256 differs"),
    "the data position cut short": ("data.pt", truncate, "bytes, not"),
    "the generators gone": ("rank-00000.pt", Path.unlink, "is missing"),
    "the manifest changed": ("manifest.json", flip_a_bit, "manifest.json"),
    "the manifest gone": ("manifest.json", Path.unlink, "manifest.json cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(here, whole, alone, case, capsys):
    pattern, hurt, complaint = DAMAGE[case]
    run = broken_off(here, whole, case)
    [file] = (run / "checkpoints" / "step-00000006").glob(pattern)
    hurt(file)
    loop.train(parse_recipe(tree(here)), run, resume="auto")
    said = capsys.readouterr().out
    assert "step-00000006 is damaged" in said
    assert complaint in said
    assert "step-00000004, step 4" in said
    assert_same_run(run, whole)


def test_a_run_without_a_whole_checkpoint_is_refused(here, whole, alone):
    run = broken_off(here, whole, "all damaged")
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        loop.train(parse_recipe(tree(here)), run, resume="auto")


def test_what_a_kill_leaves_half_written_is_passed_over(here, whole, alone):
    run = broken_off(here, whole, "half written")
    shutil.move(run / "checkpoints/step-00000006", run / "checkpoints/.writing-step-00000006")
    loop.train(parse_recipe(tree(here)), run, resume="auto")
    assert_same_run(run, whole)
    assert not list(run.glob("checkpoints/.writing*"))


def test_a_changed_recipe_is_refused_with_the_keys_that_differ(here, whole, alone):
    changed = tree(here, peak_lr=2.0e-3, log_every_steps=3)
    changed["data"]["context_tokens"] = 16
    with pytest.raises(ValueError) as refusal:
        loop.train(parse_recipe(changed), whole, resume="auto")
    lines = str(refusal.value).splitlines()[1:-1]
    assert [line.split(":")[0].strip() for line in lines] == ["data.context_tokens", "train.peak_lr"]
    assert "0.001 there, 0.002 here" in str(refusal.value)


def test_another_number_of_processes_is_refused(here, whole):
    with pytest.raises(ValueError, match="world size: 1 there, 2 here"):
        checkpoint.check_same_run(whole / "checkpoints/step-00000006", parse_recipe(tree(here)), 2)


BAD_CALLS = {
    "a run that exists": ({}, "already holds a run; add --resume auto"),
    "a resume that is not auto": ({"resume": "yes"}, "--resume is 'yes'; it must be auto"),
    "another start": ({"model": "nowhere", "resume": "auto"}, "nowhere is no checkpoint folder"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_call_that_makes_no_sense_says_what_would(here, whole, alone, case):
    arguments, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=message):
        loop.train(parse_recipe(tree(here)), whole, **arguments)


def test_a_run_folder_that_is_a_file_is_refused(here, alone, tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ValueError, match=r"--run .*run is a file; name a folder"):
        loop.train(parse_recipe(tree(here)), tmp_path / "run", model=str(here / "start"))
    assert (tmp_path / "run").read_text() == "mine"


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_says_what_goes_on(
    here, alone, tmp_path, monkeypatch
):
    def full(self, folder):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"x")
        raise RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 64 vs 0\nframes")

    monkeypatch.setattr(Engine, "save", full)
    with pytest.raises(OSError, match=r"step 1 not written.*--resume auto goes on.*unexpected pos 64 vs 0$"):
        loop.train(parse_recipe(tree(here)), tmp_path / "run", model=str(here / "start"), stop_after=1)
    assert not list((tmp_path / "run").rglob("half"))


def test_a_refused_new_run_leaves_nothing_behind(here, alone):
    with pytest.raises(ValueError, match="name the converted checkpoint to train with --model"):
        loop.train(parse_recipe(tree(here)), here / "never")
    with pytest.raises(ValueError, match=r"train\.batch_tokens"):
        Engine(parse_recipe(tree(here)), Place(0, 3, torch.device("cpu")), lambda: None)
    assert not (here / "never").exists()


UNREADABLE = {
    "text that is not there": ({"sources": [{"text": "{here}/gone.jsonl"}]}, "gone.jsonl does not exist"),
    "text with NUL": (
        {"sources": [{"text": "{here}/nul.txt"}], "held_out": "{here}/text.jsonl"},
        "NUL characters",
    ),
    "too little held-out text": (
        {"held_out": "{here}/short.txt"},
        r"^data\.held_out: .*short\.txt: .*at least 32 are needed for one row",
    ),
    "held-out text that is not there": (
        {"held_out": "{here}/gone.txt"},
        r"^data\.held_out: .*gone\.txt does not exist",
    ),
    "held-out text without a word": ({"held_out": "{here}/blank.txt"}, r"^data\.held_out: .*no document"),
    "a corpus that sets nothing aside": (
        {"sources": [{"text": "{here}/one.txt"}]},
        r"^data\.sources\[0\]\.text: .*one\.txt holds no document .* set aside for scoring",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_run_whose_text_cannot_be_read_leaves_nothing_and_the_corrected_one_begins(here, alone, case):
    (here / "nul.txt").write_text("abc\0def")
    (here / "short.txt").write_text("abc")
    (here / "blank.txt").write_text(" ")
    (here / "one.txt").write_text("abc def " * 400)
    changes, message = UNREADABLE[case]
    recipe, run = tree(here, total_tokens=256, warmup_steps=0), here / f"failed {case}"
    bad = {
        **recipe,
        "data": {**recipe["data"], **json.loads(json.dumps(changes).replace("{here}", str(here)))},
    }
    with pytest.raises(ValueError, match=message):
        loop.train(parse_recipe(bad), run, model=str(here / "start"))
    assert not run.exists()
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=message):
        loop.train(parse_recipe(bad), run, model=str(here / "start"))
    assert [p.name for p in run.iterdir()] == ["notes.txt"]
    assert loop.train(parse_recipe(recipe), run, model=str(here / "start")) == run / "export"


def test_the_time_left_does_not_count_the_start_up(tmp_path, monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    device = torch.device("cpu")
    lines = progress.Progress(tmp_path, total_steps=10, every=1, done=(0, 0), device=device, speaks=True)
    for number, seconds in ((1, 100.0), (2, 1.0), (3, 3.0)):
        now += seconds
        lines.step(number, StepResult(2.0, 1.0, True, []), tokens=8, lr=1e-3, waited=0.0)
    lines.close()
    assert [line.split("   ")[-1] for line in capsys.readouterr().out.splitlines()] == [
        "eta ?",
        "eta 8s",
        "eta 14s",
    ]
    logged = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert [row["seconds_left"] for row in logged] == [None, 8.0, 14.0]


def test_a_run_goes_on_from_its_own_start_only(here, whole, alone):
    other = here / "other start"
    shutil.copytree(here / "start", other)
    before = {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    with pytest.raises(ValueError) as refusal:
        loop.train(parse_recipe(tree(here, log_every_steps=3)), whole, model=str(other), resume="auto")
    assert str(other) in str(refusal.value)
    assert f"began with {here / 'start'}" in str(refusal.value)
    assert {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()} == before
    run = broken_off(here, whole, "same start")
    assert loop.train(parse_recipe(tree(here)), run, model=str(here / "start"), resume="auto")


def test_the_command_that_a_run_ends_with_names_the_teacher_that_its_start_was_converted_from(
    here, whole, alone, capsys, tmp_path
):
    run = broken_off(here, whole, "teacher")
    (run / "start.txt").write_text(f"{tmp_path / 'start'}\n")
    shutil.copytree(here / "start", tmp_path / "start")
    provenance.extend(tmp_path / "start", "convert", {"source": str(here / "my source")})
    loop.train(parse_recipe(tree(here)), run, resume="auto")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"next: unsoftmax-eval {run / 'export'} --teacher '{here / 'my source'}'"


def test_a_run_names_its_layers_mixers_and_where_it_stands(here, whole, alone, capsys):
    run = broken_off(here, whole, "stands")
    recipe = parse_recipe(tree(here))
    for stop, step in ((3, 6), (6, 6)):
        loop.train(recipe, run, resume="auto", stop_after=stop)
        said = capsys.readouterr().out
        assert "on cpu; gsa in 2 layers, softmax in 1 layer\n" in said
        assert (f"stands at step {step} of 6" in said) == (stop == 3)
    shutil.rmtree(run)
    loop.train(recipe, run, model=str(here / "start"), stop_after=4)
    said = capsys.readouterr().out
    assert "stopped after step 4 of 6; --resume auto goes on" in said
    assert "held out: ppl" in said
    assert "nan" not in said, "rows of 32 tokens have no recall tokens, so recall is not named"
    assert loop.train(recipe, run, resume="auto", stop_after=2) is None
    assert "stands at step 4 of 6, and --stop-after is 2" in capsys.readouterr().out


OTHER_MIXERS = {
    "a plain source and gsa": (
        *("source", "gsa", None),
        ["has softmax in 3 layers", "layer 0: softmax there, gsa in the recipe"],
        'as it is: --set "mixer={name: softmax}"',
    ),
    "gsa and polysketch": (
        *("start", "polysketch", None),
        ["layer 0: gsa there", "convert-checkpoint tiny FOLDER"],
        'as it is: --set "mixer={name: gsa}" --set "softmax_layers=[1]"',
    ),
    "one softmax layer more": (
        *("start", "gsa", [0, 1]),
        ["layer 0: gsa there, softmax in"],
        "mixer={name: gsa}",
    ),
    "a mix no recipe has": (*("mixed", "gsa", None), ["layer 2: polysketch there", "convert first"], None),
}


@pytest.mark.parametrize("case", OTHER_MIXERS)
def test_a_checkpoint_whose_mixers_are_not_the_recipes_is_refused_with_the_remedy(here, alone, case):
    start, mixer, softmax_layers, messages, remedy = OTHER_MIXERS[case]
    recipe = tree(here, mixer=mixer)
    recipe["softmax_layers"] = softmax_layers or recipe["softmax_layers"]
    with pytest.raises(ValueError) as refusal:
        loop.train(parse_recipe(recipe), here / "never", model=str(here / start))
    assert all(m in str(refusal.value) for m in [str(here / start), *messages])
    assert ("as it is" in str(refusal.value)) == (remedy is not None)
    assert (remedy or "") in str(refusal.value)
    assert not (here / "never").exists()


def test_only_as_many_checkpoints_are_kept_as_asked_for(here, alone):
    recipe = parse_recipe(tree(here, keep_checkpoints=2))
    loop.train(recipe, here / "kept", model=str(here / "start"))
    assert checkpoint.steps_saved(here / "kept") == [6, 4]
    assert (here / "kept/checkpoints/latest").read_text() == "step-00000006"


def test_the_export_is_the_start_with_trained_numbers(here, whole):
    start, out = load_file(here / "start/model.safetensors"), weights(whole)
    assert {n: (t.shape, t.dtype) for n, t in out.items()} == {
        n: (t.shape, t.dtype) for n, t in start.items()
    }
    assert (whole / "export/config.json").read_text() == (here / "start/config.json").read_text()
    model = load(whole / "export")
    trained = saved_weights(whole / "checkpoints/step-00000006", parse_recipe(tree(here)).train.zero_stage)
    assert [n for n, p in model.named_parameters() if not torch.equal(p, trained[n])] == []
    steps = json.loads((whole / "export/provenance.json").read_text())["steps"]
    assert steps[-1]["step"] == "train"
    assert steps[-1]["tokens"] == 1536


def test_an_export_of_an_earlier_step_gives_way_at_the_end(here, whole, alone, capsys):
    run, recipe = here / "exported early", parse_recipe(tree(here))
    loop.train(recipe, run, model=str(here / "start"), stop_after=4)
    export(run, run / "export")
    assert exported_step(run / "export") == 4
    out = loop.train(recipe, run, resume="auto")
    assert exported_step(out) == 6
    assert_same_run(run, whole)
    assert [p.name for p in run.glob(".export*")] == []
    assert f"{out} holds step 4; it is replaced by step 6" in capsys.readouterr().out
    made = out.stat().st_ino
    loop.train(recipe, run, resume="auto")
    assert out.stat().st_ino == made


def test_a_folder_in_the_place_of_the_export_that_is_none_is_left_as_it_is(here, whole, alone):
    run = broken_off(here, whole, "own folder")
    (run / "export").mkdir()
    (run / "export/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is no export, so it is left as it is"):
        loop.train(parse_recipe(tree(here)), run, resume="auto")
    assert (run / "export/notes.txt").read_text() == "mine"


OTHER_STARTS = {
    "the plain source": ({}, "model.layers.0.self_attn.importance"),
    "a source of another width": ({"intermediate_size": 40}, r"mlp\.\w+\.weight has shape \[.*40.*48"),
}


@pytest.mark.parametrize("case", OTHER_STARTS)
def test_an_export_into_a_start_that_does_not_fit_is_refused_by_name(here, whole, case, capsys):
    geometry, message = OTHER_STARTS[case]
    run = broken_off(here, whole, f"pointed at {case}")
    (run / "start.txt").write_text(f"{tiny_source(here / case, **geometry)}\n")
    assert cli.main(["export", str(run), str(run / "export")]) == cli.WRONG_INPUT
    assert re.search(message, capsys.readouterr().err)
    assert [p.name for p in run.iterdir() if "export" in p.name] == []


def test_an_export_never_overwrites(here, whole):
    with pytest.raises(ValueError, match="exists"):
        export(whole, whole / "export")


def test_a_tied_bfloat16_start_exports_as_it_came(here, alone):
    tiny_source(here / "tied", tie_word_embeddings=True, dtype=torch.bfloat16)
    recipe = parse_recipe(tree(here, mixer="softmax", zero_stage=2))
    loop.train(recipe, here / "tied run", model=str(here / "tied"))
    found, start = weights(here / "tied run"), load_file(here / "tied/model.safetensors")
    assert "lm_head.weight" not in found
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in start.items()}


# ---- engine


def build(here, place, start="mixed", **train):
    return Engine(parse_recipe(tree(here, **train)), place, lambda: load(here / start))


def state(built):
    return {n: p.detach().clone() for n, p in built.model.named_parameters()}


@pytest.mark.parametrize("zero", [0, 2])
def test_four_passes_of_one_row_are_one_pass_of_four_rows_also_with_ragged_documents(here, alone, zero):
    rows = list(itertools.islice(loop.token_rows_of(parse_recipe(tree(here)), tokenizer(here / "start")), 4))
    ragged = [r._replace(labels=r.labels.copy()) for r in rows]
    ragged[1].labels[3:] = IGNORE  # most of a row predicts nothing
    after = []
    for micro in (4, 1):
        built = build(
            here, alone, zero_stage=zero, batch_tokens=128, micro_batch_sequences=micro, peak_lr=0.01
        )
        passes = [collate(ragged[i : i + micro], apart=True) for i in range(0, 4, micro)]
        targets = sum(int((r.labels != IGNORE).sum()) for r in ragged)
        result = built.step(Batch(passes, targets, 128, {}), lr=0.01)
        after.append((result.loss, result.grad_norm, state(built)))
    (loss, norm, once), (loss4, norm4, four) = after
    assert loss4 == pytest.approx(loss, rel=1e-6)
    assert norm4 == pytest.approx(norm, rel=1e-5)
    start = dict(load(here / "mixed").named_parameters())
    for name in once:
        error = (once[name] - four[name]).norm() / (once[name] - start[name]).norm()
        assert error < 1e-3, f"{name}: {error:.1e}"


def test_every_parameter_moves_at_a_small_rate_under_bf16(here, alone):
    built = build(here, alone, dtype="bf16", zero_stage=1, weight_decay=0.0, new_lr_scale=1.0)
    recipe = parse_recipe(tree(here))
    rows = loop.token_rows_of(recipe, tokenizer(here / "start"))
    before = state(built)
    assert {p.dtype for p in before.values()} == {torch.float32}
    for batch in itertools.islice(batches(rows, batch_rows=8, micro_rows=2, rank=0, world=1), 100):
        built.step(batch, lr=3.0e-5)
    moved = {n: (p - before[n]).abs().max().item() for n, p in state(built).items()}
    assert [n for n, far in moved.items() if not 1e-5 < far < 1e-2] == []


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_no_optimizer_touches_what_is_fitted_or_drawn_and_a_checkpoint_holds_it(here, alone, zero, tmp_path):
    start = load_file(here / "fixed" / SAFE)
    fixed = {name: x for name, x in start.items() if name.endswith(FIXED)}
    assert len(fixed) == len(FIXED)
    built = build(here, alone, "fixed", zero_stage=zero, weight_decay=0.5, dtype="bf16")
    rows = loop.token_rows_of(parse_recipe(tree(here)), tokenizer(here / "start"))
    for batch in itertools.islice(batches(rows, batch_rows=8, micro_rows=2, rank=0, world=1), 3):
        assert built.step(batch, lr=0.01).applied
    built.save(tmp_path / "saved")
    saved = saved_weights(tmp_path / "saved", zero)
    assert saved.keys() == start.keys()
    for name, x in start.items():
        assert torch.equal(saved[name], x) == (name in fixed), name
    other = build(here, alone, "fixed", zero_stage=zero, weight_decay=0.5, dtype="bf16")
    for module in (built, other):
        for name, x in fixed.items():
            assert torch.equal(module.model.state_dict()[name], x), name
            module.model.get_buffer(name).add_(1.0)
    other.load(tmp_path / "saved")
    for name, x in fixed.items():
        assert torch.equal(other.model.get_buffer(name), x), name


def test_activation_checkpointing_leaves_the_step_as_it_is(here, alone):
    batch = first_batch(here, parse_recipe(tree(here)), micro=2)
    results = []
    for on in (False, True):
        built = build(here, alone, activation_checkpointing=on)
        results.append((built.step(batch, lr=1e-3), state(built)))
    (plain, weights_plain), (saving, weights_saving) = results
    assert saving == plain
    assert [n for n in weights_plain if not torch.equal(weights_plain[n], weights_saving[n])] == []


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_is_skipped_and_the_next_one_counts(here, alone, zero):
    good = first_batch(here, parse_recipe(tree(here)), micro=2)
    built, other = (build(here, alone, zero_stage=zero) for _ in range(2))
    poison = built.model.model.norm.register_forward_hook(lambda m, i, o: o * float("nan"))
    result = built.step(good, lr=1e-3)
    poison.remove()
    assert not result.applied
    assert "model.layers.0.mlp.up_proj.weight" in result.bad
    ours, theirs = built.step(good, lr=1e-3), other.step(good, lr=1e-3)
    assert ours == theirs
    assert ours.applied


def test_too_many_bad_steps_stop_the_run_and_name_step_and_parameters(here, alone):
    shutil.copytree(here / "start", here / "sick")
    sick = load_file(here / "sick/model.safetensors")
    sick["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(sick, here / "sick/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FloatingPointError) as stop:
        loop.train(parse_recipe(tree(here, max_bad_steps=2)), here / "sick run", model=str(here / "sick"))
    message = str(stop.value)
    assert message.startswith("step 2: 2 steps in a row (train.max_bad_steps)")
    assert "parameters not finite    model.layers.1.mlp.up_proj.weight\n" in message
    assert [r["applied"] for r in rows_logged(here / "sick run")] == [False, False]


# ---- objective


def test_packed_documents_do_not_leak_into_each_other_forward_or_backward(here):
    model = load(here / "mixed")
    documents = [torch.randint(0, 256, (n,)).numpy() for n in (5, 20, 1, 38)]
    ends = [*itertools.accumulate(len(d) for d in documents)]
    tokens = torch.cat([torch.from_numpy(d) for d in documents]).numpy()
    rows = [
        Row(tokens[:32], tokens[1:33], [0, 5, 25, 26]),
        Row(tokens[32:], tokens[[*range(33, 64), 0]], [0]),
    ]
    batch = collate(rows, apart=True)
    embedded = []
    model.model.embed_tokens.register_forward_hook(lambda m, i, o: embedded.append(o) or o.retain_grad())
    hidden = model.model(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens)[0]
    pieces = [0, 5, 25, 26, 32, 64]
    for a, b in itertools.pairwise(pieces):
        apart = model.model(input_ids=batch.input_ids[:, a:b])[0]
        torch.testing.assert_close(hidden[:, a:b], apart, rtol=1e-4, atol=1e-5)
    hidden[:, 5:25].square().sum().backward()
    reach = embedded[0].grad[0].abs().sum(-1).nonzero().flatten()
    assert ends == [5, 25, 26, 64]
    assert reach.tolist() == list(range(5, 25))


def test_the_loss_in_chunks_is_the_loss_at_once_and_so_are_its_gradients():
    head = torch.nn.Linear(8, 50, bias=False)
    hidden, labels = torch.randn(37, 8), torch.randint(0, 50, (37,))
    labels[[3, 4, 20]] = IGNORE
    found = []
    for chunk in (37, 5):
        h = hidden.clone().requires_grad_()
        head.weight.grad = None
        loss = summed_cross_entropy(head, h, labels, chunk)
        loss.backward()
        found.append((loss, h.grad, head.weight.grad))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts)
