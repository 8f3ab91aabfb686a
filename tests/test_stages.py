"""Stages of a run: what each minimises and trains, and that a run in stages stops and goes on exactly."""

import gc
import itertools
import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from test_train import (
    MEMORY,
    PAPER,
    SAFE,
    SKETCH,
    SOFTMAX,
    alone,
    assert_same_run,
    first_batch,
    launch,
    plain_empty,
    rows_logged,
    tree,
    weights,
)
from tiny import tiny_source
from train_worker import perform
from unsoftmax.convert import provenance
from unsoftmax.convert.load import load, tokenizer
from unsoftmax.recipes.schema import parse_recipe, stage_plans, total_steps
from unsoftmax.train import checkpoint, loop, stages
from unsoftmax.train.engine import Engine, count
from unsoftmax.train.objective import Align, Distil, summed_distillation
from unsoftmax.train.packing import IGNORE

__all__ = ["alone", "plain_empty"]  # fixtures
STARTS = {"start": [MEMORY, SOFTMAX, PAPER], "sketch": [SKETCH, SOFTMAX, SKETCH]}
STEP = 256  # tokens
ALIGN = {"loss": "align", "tokens": 2 * STEP, "warmup_steps": 0}
DISTIL = {"loss": "distil", "tokens": 2 * STEP, "warmup_steps": 1, "teacher_weight": 0.7, "temperature": 2.0}
PLAIN = {"loss": "cross_entropy", "tokens": 2 * STEP, "warmup_steps": 0, "peak_lr": 5.0e-4, "train": "new"}
THREE = [ALIGN, DISTIL, PLAIN]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a tiny `source`, checkpoints converted from it, and text, `text.jsonl`."""
    folder = tmp_path_factory.mktemp("stages")
    tiny_source(folder / "source")
    for name, mixers in STARTS.items():
        load(folder / "source", layer_mixers=mixers).save_pretrained(folder / name)
        tokenizer(folder / "source").save_pretrained(folder / name)
        provenance.extend(folder / name, "convert", {"source": str(folder / "source")})
    words = itertools.cycle(["a", "bc", "def ", " gh", "e f g", "hhh", "d b "])
    texts = ["".join(next(words) for _ in range(n % 23 + 1)) for n in range(600)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


def staged(here, plan, mixer="gsa", **train):
    """The recipe of test_train.py in stages."""
    found = tree(here, mixer=mixer, **train)
    del found["train"]["total_tokens"]
    return {**found, "stages": plan}


def refusal(here, plan, **changes):
    with pytest.raises(ValueError) as caught:
        parse_recipe({**staged(here, plan), **changes})
    return str(caught.value)


# ---- the recipe


MISTAKES = {
    "a key that no stage has": (
        {"peek_lr": 0.1},
        "stages.0.peek_lr is not a key. Did you mean stages.0.peak_lr?",
    ),
    "a loss that there is not": (
        {"loss": "alin"},
        "stages.0.loss: alin is not a choice. Did you mean align?",
    ),
    "a rate of zero": ({"peak_lr": 0.0}, "stages.0.peak_lr is 0.0; it must be above 0 and below 1"),
    "no tokens": ({"tokens": 0}, "stages.0.tokens is 0; it must be at least 1"),
    "more than the whole loss": (
        {"teacher_weight": 1.5},
        "stages.0.teacher_weight is 1.5; it must be from 0 to 1",
    ),
    "no temperature": ({"temperature": 0.0}, "stages.0.temperature is 0.0; it must be above 0, such as 1.0"),
    "a weight of no teacher": (
        {"loss": "cross_entropy"},
        "stages.0.teacher_weight is 0.7; it must be left out: the loss is cross_entropy, not distil",
    ),
    "all layers aligned": (
        {"loss": "align", "train": "all"},
        "stages.0.train is all; it must be attention or new: align reaches no more",
    ),
    "a warm-up as long as the stage": (
        {"warmup_steps": 2},
        "stages.0.warmup_steps is 2; it must be below the stage's 2 steps (tokens 512 / train.batch_tokens",
    ),
    "the run's warm-up, as long as the stage": (
        {"warmup_steps": None},
        "stages.0.warmup_steps is 2 (from train); it must be below the stage's 2 steps",
    ),
}


@pytest.mark.parametrize("change, said", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_stage_names_the_key_and_the_remedy(here, change, said):
    assert said in refusal(here, [{**DISTIL, **change}])


def test_keys_that_no_stage_reads_or_that_contradict_the_stages_are_refused(here):
    assert "teacher is x; it must be left out: no stage has" in refusal(here, [PLAIN], teacher="x")
    assert "teacher is x; it must be left out: no stage has" in refusal(here, [], teacher="x")
    said = refusal(
        here, [PLAIN], train={"total_tokens": 300, "batch_tokens": STEP, "micro_batch_sequences": 2}
    )
    assert "train.total_tokens is 300; it must be left out, or 512: the sum of the stages' tokens" in said
    assert "stages is a list of keys; it must be a list, such as [{loss: distil" in refusal(here, {"loss": 1})
    assert "stages.1.loss is missing" in refusal(here, [PLAIN, {"tokens": 4}])


def test_stages_take_from_train_what_they_do_not_say_and_are_rounded_up_each(here):
    recipe = parse_recipe(
        staged(here, [{**DISTIL, "tokens": 257}, ALIGN, {"loss": "cross_entropy", "tokens": 1025}])
    )
    assert recipe.train.total_tokens == 257 + 512 + 1025
    assert total_steps(recipe) == 2 + 2 + 5
    assert parse_recipe(recipe.to_dict()) == recipe
    first, second, third = stage_plans(recipe)
    assert [(p.begin, p.end) for p in (first, second, third)] == [(0, 2), (2, 4), (4, 9)]
    assert (first.peak_lr, first.warmup_steps, first.train, first.teacher_weight) == (1e-3, 1, "all", 0.7)
    assert (second.train, third.train, third.warmup_steps) == ("attention", "all", 2)
    assert [stages.rate(recipe, third, s) for s in (4, 5)] == [pytest.approx(5e-4), 1e-3]


def test_a_recipe_without_stages_is_written_as_it_was_before_there_were_any(here):
    recipe = parse_recipe(tree(here))
    assert list(recipe.to_dict()) == ["source", "mixer", "softmax_layers", "calibration", "data", "train"]
    assert parse_recipe({**tree(here), "stages": []}) == recipe
    [only] = stage_plans(recipe)
    assert (only.loss, only.train, only.begin, only.end) == ("cross_entropy", "all", 0, total_steps(recipe))


# ---- objectives


def test_distillation_is_the_mix_of_its_definition_and_chunks_change_nothing():
    torch.manual_seed(0)
    head, teacher_head = torch.nn.Linear(8, 50, bias=False), torch.nn.Linear(6, 50, bias=False)
    hidden, taught, labels = torch.randn(37, 8), torch.randn(37, 6), torch.randint(0, 50, (37,))
    labels[[3, 4, 20]] = IGNORE
    for w, tau in ((0.3, 2.0), (1.0, 1.0), (0.0, 1.0), (0.5, 1.0)):
        h, matrix = hidden.double().requires_grad_(), head.weight.detach().double().requires_grad_()
        logits, real = h @ matrix.T, labels != IGNORE
        q = (taught.double() @ teacher_head.weight.detach().double().T / tau).softmax(-1)
        kl = (q * (q.log() - (logits / tau).log_softmax(-1))).sum(-1)[real].sum()
        gold = (1 - w) * F.cross_entropy(logits[real], labels[real], reduction="sum") + w * tau**2 * kl
        wanted = (gold, *torch.autograd.grad(gold, (h, matrix)))
        for chunk in (37, 5):
            x = hidden.clone().requires_grad_()
            loss = summed_distillation(
                head, x, teacher_head, taught, labels, chunk, weight=w, temperature=tau
            )
            found = (loss, *torch.autograd.grad(loss, (x, head.weight)))
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours.dtype == torch.float32
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_student_that_is_its_teacher_has_no_divergence(here):
    teacher = stages.load_kept(here / "source", torch.float32)
    batch = first_batch(here, parse_recipe(tree(here)), micro=4)
    loss = Distil(teacher, teacher, weight=1.0, temperature=1.0)(*batch.passes[0])
    assert loss.abs() < 1e-3


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("apart", [True, False])
def test_alignment_is_each_layers_own_error_on_the_teachers_input_and_reaches_no_further(
    here, apart, recompute
):
    tokens = first_batch(here, parse_recipe(tree(here)), micro=4).passes[0]
    inputs = tokens if apart else tokens._replace(cu_seqlens=None)
    teacher, student = stages.load_kept(here / "source", torch.float32), load(here / "start")
    found = Align(student, teacher, recompute=recompute)(*inputs)
    found.backward()
    ours = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}

    gold_teacher, gold = teacher.double(), load(here / "start").double()
    errors, hooks = {}, []
    for n, layer in enumerate(gold_teacher.model.layers):

        def hook(module, args, kwargs, out, n=n):
            x, y = kwargs["hidden_states"], out[0]
            z = gold.model.layers[n].mix(
                x,
                position_embeddings=kwargs["position_embeddings"],
                attention_mask=kwargs["attention_mask"],
                cu_seqlens=None if inputs.cu_seqlens is None else inputs.cu_seqlens.long(),
            )
            errors[n] = (z - y).square().sum() / y.square().sum()

        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    gold_teacher.requires_grad_(False).model(input_ids=inputs.input_ids, cu_seqlens=inputs.cu_seqlens)
    total = (errors[0] + errors[2]) * (inputs.labels != IGNORE).sum()
    total.backward()
    assert errors[1] == 0, "the layer that keeps its softmax is the teacher's"
    torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=0)
    theirs = {n: p.grad for n, p in gold.named_parameters() if p.grad is not None and "layers.1." not in n}
    assert ours.keys() == theirs.keys()
    assert {n.split(".")[3] for n in ours} == {"self_attn"}
    for name, grad in theirs.items():
        assert (ours[name].double() - grad).norm() <= 1e-4 * grad.norm() + 1e-9, name


# ---- runs


def one_plain_step(here, recipe, objective, student, learns):
    """torch's own AdamW on the run's first batch: parameters before and after, loss."""
    t = recipe.train
    before = {n: p.detach().clone() for n, p in student.named_parameters()}
    new = {n for n in before if n not in load(here / "source").state_dict()}
    groups = [
        {
            "params": [p],
            "lr": t.peak_lr * (t.new_lr_scale if n in new else 1),
            "weight_decay": t.weight_decay if p.ndim >= 2 else 0.0,
        }
        for n, p in student.named_parameters()
        if learns(n, n in new)
    ]
    batch = first_batch(here, recipe, micro=t.micro_batch_sequences)
    loss = sum(objective(*p) for p in batch.passes) / batch.targets
    loss.backward()
    parameters = [g["params"][0] for g in groups]
    torch.nn.utils.clip_grad_norm_(parameters, t.grad_clip)
    torch.optim.AdamW(groups, betas=(t.beta1, t.beta2)).step()
    return before, {n: p.detach() for n, p in student.named_parameters()}, loss.item()


def projection(name, new):
    return "self_attn" in name and "layers.1." not in name


SINGLE = {  # a stage of one step; what of the start it moves
    "distil": ({**DISTIL, "warmup_steps": 0}, lambda name, new: True),
    "distil, attention": ({**DISTIL, "warmup_steps": 0, "train": "attention"}, projection),
    "distil, new": ({**DISTIL, "warmup_steps": 0, "train": "new"}, lambda name, new: new),
    "align": (ALIGN, projection),
    "align, new": ({**ALIGN, "train": "new"}, lambda name, new: new),
}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("case", SINGLE)
def test_one_step_of_a_stage_is_plain_adamw_and_the_rest_stays_bit_for_bit(here, alone, case, zero, tmp_path):
    stage, learns = SINGLE[case]
    recipe = parse_recipe(
        staged(here, [{**stage, "tokens": STEP}], zero_stage=zero, grad_clip=0.05, schedule="constant")
    )
    teacher, student = stages.load_kept(here / "source", torch.float32), load(here / "start")
    if stage["loss"] == "align":
        objective = Align(student, teacher, recompute=False)
    else:
        objective = Distil(student, teacher, weight=0.7, temperature=2.0)
    before, after, loss = one_plain_step(here, recipe, objective, student, learns)
    loop.train(recipe, tmp_path / "run", model=str(here / "start"))
    [row] = rows_logged(tmp_path / "run")
    assert row["loss"] == pytest.approx(loss, rel=1e-5)
    found, new = weights(tmp_path / "run"), before.keys() - load(here / "source").state_dict().keys()
    for name in before:
        step = after[name] - before[name]
        assert (step.norm() > 0) == learns(name, name in new), name
        if step.norm() > 0:
            error = (found[name] - after[name]).norm() / step.norm()
            assert error < 2e-3, f"{name}: the step is off by {error:.1e}"
        else:
            assert torch.equal(found[name], before[name]), name


def half(here, name, recipe, stop_at, start="start"):
    return {"recipe": recipe, "run": str(here / name), "model": str(here / start), "stop_at": stop_at}


def logged(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def begun(run):
    """What the log says of where each stage began."""
    return [row for row in logged(run) if row["kind"] == "stage"]


def test_a_run_in_stages_goes_on_bit_for_bit_from_any_step(here, alone, capsys):
    recipe = staged(here, THREE, save_every_steps=1, eval_every_steps=0)
    perform(half(here, "whole", recipe, None))
    said = capsys.readouterr().out
    assert "stage   loss                  tokens   steps   peak lr   new lr   schedule" in said
    assert (
        "2       distil w 0.7, tau 2   512      3-4     1.0e-03   x 10     1 up, linear to 0.3   all, "
        in said
    )
    assert "step     3/6   stage 2/3 distil   768 tok   loss" in said
    for step in range(1, 6):
        perform(half(here, f"half-{step}", recipe, step))
        if step == 3:  # as if it had ended after the second stage began, but before a checkpoint of it
            shutil.rmtree(here / "half-3/checkpoints/step-00000003")
        loop.train(parse_recipe(recipe), here / f"half-{step}", resume="auto")
        assert_same_run(here / f"half-{step}", here / "whole")
        assert begun(here / f"half-{step}") == begun(here / "whole")
    log = logged(here / "whole")
    assert [r["objective"] for r in log if r["kind"] == "train"] == [
        *("align", "align", "distil", "distil", "cross_entropy", "cross_entropy")
    ]
    begins = begun(here / "whole")
    scores = {r["step"]: r["nll"] for r in log if r["kind"] == "held_out"}
    assert [(r["step"], r["before"]) for r in begins] == [(0, None), (2, scores[2]), (4, scores[4])]
    assert [r["nll"] for r in begins[1:]] == [scores[2], scores[4]]


def test_stages_take_the_text_on_from_where_the_one_before_stopped(here, alone, monkeypatch):
    seen = {}
    for name, recipe in (("plain", tree(here)), ("staged", staged(here, THREE))):
        step, rows = Engine.step, []

        def watched(self, batch, lr, step=step, rows=rows):
            rows.append(torch.cat([p.input_ids.flatten() for p in batch.passes]))
            return step(self, batch, lr)

        monkeypatch.setattr(Engine, "step", watched)
        loop.train(parse_recipe(recipe), here / f"text {name}", model=str(here / "start"))
        monkeypatch.setattr(Engine, "step", step)
        seen[name] = torch.stack(rows)
    assert torch.equal(seen["plain"], seen["staged"])


def test_a_stage_that_begins_with_other_weights_stops_the_run(here, alone, monkeypatch):
    wrong = {n: p.clone() for n, p in load_file(here / "start" / SAFE).items()}
    monkeypatch.setattr(Engine, "weights", lambda self: {f"model.{n}": p for n, p in wrong.items()})
    recipe = parse_recipe(staged(here, [DISTIL, PLAIN]))
    with pytest.raises(
        RuntimeError, match=r"stage 2 \(cross_entropy\), step 2: it continues from a held-out"
    ):
        loop.train(recipe, here / "other weights", model=str(here / "start"))


def tensor_bytes():
    """Bytes of all that tensors of this process hold, shared ones once."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_that_is_over_leaves_no_memory_behind(here, alone, zero):
    plan = [{**DISTIL, "tokens": STEP, "warmup_steps": 0}] * 3
    recipe = parse_recipe(staged(here, plan, zero_stage=zero))
    built = stages.Stages(recipe, alone, here / "start", 0)
    held = []
    for n in range(3):
        if n:
            built.advance()
        assert built.engine.step(first_batch(here, recipe, micro=2), lr=1e-3).applied
        held.append(tensor_bytes())
    assert held[2] - held[1] < 0.05 * 4 * count(built.engine.model.parameters()), held


def test_a_teacher_is_let_go_where_no_stage_needs_it(here, alone):
    built = stages.Stages(parse_recipe(staged(here, [ALIGN, DISTIL, PLAIN])), alone, here / "start", 0)
    teacher = weakref.ref(built._teacher)
    built.advance()
    assert built._teacher is teacher()
    assert teacher() is not None
    built.advance()
    assert teacher() is None


NO_TEACHER = {
    "no conversion known": (
        "unknown",
        "start",
        {},
        r"stages\.0\.loss is distil, but .*provenance\.json names no",
    ),
    "a teacher that is gone": (
        "gone",
        "start",
        {"teacher": "no/where"},
        r"the teacher: no/where is no checkpoint",
    ),
    "a teacher of other words": (
        "words",
        "start",
        {"teacher": "{here}/words"},
        "has vocab_size 300, and .* has 264",
    ),
    "a teacher of fewer layers": (
        "layers",
        "start",
        {"teacher": "{here}/layers", "stages": [ALIGN]},
        "has num_hidden_layers 2, and .* has 3",
    ),
}


@pytest.mark.parametrize("case", NO_TEACHER)
def test_a_stage_without_a_teacher_that_fits_is_refused_before_anything_is_made(here, alone, case, tmp_path):
    name, start, changes, said = NO_TEACHER[case]
    start = here / start
    if name == "unknown":
        load(start).save_pretrained(tmp_path / "start")
        tokenizer(start).save_pretrained(tmp_path / "start")
        start = tmp_path / "start"
    others = {"words": {"vocab_size": 300}, "layers": {"num_hidden_layers": 2}}
    if name in others:
        tiny_source(here / name, **others[name])
    recipe = {**staged(here, [DISTIL]), **json.loads(json.dumps(changes).replace("{here}", str(here)))}
    with pytest.raises(ValueError, match=said):
        loop.train(parse_recipe(recipe), tmp_path / "run", model=str(start))
    assert not (tmp_path / "run").exists()


NOTHING_LEARNS = {
    "align of plain softmax": (
        [{**ALIGN}],
        "softmax",
        r"stages\.0: align trains attention, .* no layer is converted",
    ),
    "new of a ring": (
        [DISTIL, PLAIN],
        "gsa",
        r"stages\.1: cross_entropy trains new, .* add nothing that learns",
    ),
}


@pytest.mark.parametrize("case", NOTHING_LEARNS)
def test_a_stage_in_which_nothing_would_learn_is_refused_before_anything_is_made(here, alone, case, tmp_path):
    plan, mixer, said = NOTHING_LEARNS[case]
    start = here / "source"
    if mixer == "gsa":
        start = tmp_path / "ring"
        load(here / "source", layer_mixers=[MEMORY, SOFTMAX, MEMORY]).save_pretrained(start)
        tokenizer(here / "source").save_pretrained(start)
    recipe = {**staged(here, plan, mixer=mixer), "teacher": str(here / "source")}
    with pytest.raises(ValueError, match=said):
        loop.train(parse_recipe(recipe), tmp_path / "run", model=str(start))
    assert not (tmp_path / "run").exists()


# ---- two ranks


def check_two_ranks(folder, cases, every=3):
    """cases: ZeRO stage to the steps at which bf16 runs stop, to be compared with one that does not."""
    folder.mkdir()
    jobs, again = [], []
    for z, stops in cases.items():
        recipe = staged(folder.parent, THREE, zero_stage=z, dtype="bf16", save_every_steps=every)
        start = str(folder.parent / "start")
        jobs.append({"recipe": recipe, "run": str(folder / f"{z}"), "model": start})
        for stop in stops:
            run = str(folder / f"{z}-{stop}")
            jobs.append({"recipe": recipe, "run": run, "model": start, "stop_at": stop})
            again.append({"recipe": recipe, "run": run, "resume": "auto"})
    launch(folder, jobs, "torchrun")
    launch(folder, again, "torchrun")
    for z, stops in cases.items():
        for stop in stops:
            assert_same_run(folder / f"{z}-{stop}", folder / f"{z}")
        assert checkpoint.steps_saved(folder / f"{z}")[::-1] == sorted({2, 4, 6, *range(every, 6, every)})


def test_a_run_in_stages_on_two_ranks_goes_on_bit_for_bit(here):
    check_two_ranks(here / "two ranks", {3: [3, 4]})


@pytest.mark.slow
def test_a_run_in_stages_on_two_ranks_and_any_zero_stage_goes_on_bit_for_bit(here):
    check_two_ranks(here / "any stage", {z: [1, 2, 3, 4] for z in range(4)}, every=1)
