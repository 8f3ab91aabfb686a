"""Continual pretraining of a converted checkpoint, from a recipe to a Hugging Face folder."""

from __future__ import annotations

import itertools
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from unsoftmax.convert import provenance
from unsoftmax.convert.load import CONVERTED_TYPES, read_config, tokenizer
from unsoftmax.convert.measure import Measurement, measure, token_ids, token_rows
from unsoftmax.recipes.schema import SOFTMAX, TAUGHT, Recipe, accumulation, layer_mixers, total_steps
from unsoftmax.recipes.text import check_text, documents
from unsoftmax.train import checkpoint, engine
from unsoftmax.train.checkpoint import Resumed
from unsoftmax.train.engine import Place
from unsoftmax.train.export import export_newest, start_folder
from unsoftmax.train.packing import Batch, Prefetch, Source, TokenRows, batches
from unsoftmax.train.progress import BadSteps, Progress, short
from unsoftmax.train.stages import Stages, rate, teacher_of


def train(
    recipe: Recipe,
    run: Path,
    *,
    model: str | None = None,
    resume: str | None = None,
    stop_after: int | None = None,
) -> Path | None:
    """Train a converted checkpoint by a recipe; works under deepspeed, torchrun, and as one plain process.

    Args:
        recipe: what to do.
        run: folder that gets log, checkpoints, TensorBoard and, at the end, `export`.
        model: the converted checkpoint's folder; None takes the one the run began with.
        resume: "auto" continues from the newest whole checkpoint in `run`, or begins if there is none.
        stop_after: score, save and stop after this step of the run, for a machine lent for a while; the
            schedule stays that of the whole run, and `resume` goes on from there.

    Returns:
        The exported folder, or None if the run stopped before its end.

    Raises:
        ValueError: the recipe does not fit the number of processes, the run folder or the checkpoint.
        FloatingPointError: train.max_bad_steps steps in a row were not finite.
        RuntimeError: a stage does not continue from the held-out loss at which the one before ended.
    """
    run = Path(run)
    if stop_after is not None and stop_after < 1:
        raise ValueError(f"--stop-after is {stop_after}; it must be a step of the run, 1 or more")
    place = engine.start(recipe.train.seed)
    start = _open_run(recipe, run, model, resume, place)
    job = _prepare(recipe, run, start, place)
    last = total_steps(recipe)
    stop = last if stop_after is None else min(stop_after, last)
    try:
        _train(job, stop)
    finally:
        job.progress.close()
    if stop == last:
        out = _finish(job)
    else:
        out = None
        job.progress.say(_stopped(job.begun.step, stop, last))
    engine.leave_at_exit()
    return out


def _stopped(begun: int, stop: int, last: int) -> str:
    if begun < stop:
        return f"stopped after step {stop} of {last}; --resume auto goes on"
    rest = "to export it" if begun >= last else "to go on"
    return (
        f"nothing to train: the run stands at step {begun} of {last}, and --stop-after is {stop}; "
        f"give --resume auto alone {rest}"
    )


class Job(NamedTuple):
    """Everything that one training run needs."""

    recipe: Recipe
    run: Path
    place: Place
    stages: Stages
    data: Iterator[Batch]
    held_out: torch.Tensor
    progress: Progress
    begun: Resumed


def _train(job: Job, last: int) -> None:
    t, stages = job.recipe.train, job.stages
    step, tokens, _, before = job.begun
    bad = BadSteps(t.max_bad_steps)
    with Prefetch(job.data) as data:
        while step < last:
            if step == stages.plan.end:
                stages.advance()
            if step == stages.plan.begin and job.recipe.stages:
                _begin_stage(job, step, before)
            batch, waited = data.next()
            lr = rate(job.recipe, stages.plan, step)
            result = stages.engine.step(batch, lr)
            step, tokens = step + 1, tokens + batch.tokens
            job.progress.step(step, result, tokens=batch.tokens, lr=lr, waited=waited)
            bad.check(step, result, [] if result.applied else stages.engine.bad_weights())
            ends, before = step == stages.plan.end, None
            if step == last or ends or (t.eval_every_steps and step % t.eval_every_steps == 0):
                found = _score(job, step)
                before = found.nll if ends and step < total_steps(job.recipe) else None
            if step == last or ends or step % t.save_every_steps == 0:
                done = Resumed(step, tokens, batch.position, before)
                checkpoint.save(stages.engine, job.run, job.recipe, job.place, done)
                job.progress.rest()


def _begin_stage(job: Job, step: int, before: float | None) -> None:
    job.progress.enter(job.stages.plan, len(job.stages.plans))
    found = _measured(job)
    job.progress.begins(step, found.nll, before, found.line())
    job.stages.check_continues(step, found.nll, before)


def _batches(recipe: Recipe, rows: TokenRows, place: Place) -> Iterator[Batch]:
    t = recipe.train
    return batches(
        rows,
        batch_rows=t.batch_tokens // recipe.data.context_tokens,
        micro_rows=t.micro_batch_sequences,
        rank=place.rank,
        world=place.world,
    )


def _measured(job: Job) -> Measurement:
    dtype = torch.bfloat16 if job.recipe.train.dtype == "bf16" else None
    with job.stages.engine.scoring() as model:
        return measure(model, job.held_out, batch=job.recipe.train.micro_batch_sequences, dtype=dtype)


def _score(job: Job, step: int) -> Measurement:
    found = _measured(job)
    job.progress.scored(step, found.to_dict(), found.line())
    return found


def _finish(job: Job) -> Path:
    out = job.run / "export"
    if job.place.first:
        export_newest(job.run, out, total_steps(job.recipe), say=job.progress.say)
        words = ["unsoftmax-eval", str(out), "--teacher", _teacher(job)]
        job.progress.say(f"exported to {out}\nnext: {shlex.join(words)}")
    engine.barrier()
    return out


def _teacher(job: Job) -> str:
    """What the run's start was converted from, or the start itself if it keeps softmax in all layers."""
    start = start_folder(job.run)
    if read_config(start).model_type not in CONVERTED_TYPES:
        return str(start)
    return provenance.teacher(start) or job.recipe.source


# ---- preparing


def _open_run(recipe: Recipe, run: Path, model: str | None, resume: str | None, place: Place) -> Path:
    """Check that the run may begin or go on; the start's folder. Nothing is written."""
    accumulation(recipe, place.world)
    if run.exists() and not run.is_dir():
        raise ValueError(f"--run {run} is a file; name a folder, which need not be there yet")
    if resume not in (None, "auto"):
        raise ValueError(f"--resume is {resume!r}; it must be auto")
    if resume is None and (run / "start.txt").exists():
        raise ValueError(
            f"{run} already holds a run; add --resume auto to go on, or name another folder with --run"
        )
    if model is None and not (run / "start.txt").exists():
        raise ValueError(f"{run} is new: name the converted checkpoint to train with --model FOLDER")
    start = Path(model).resolve() if model else start_folder(run)
    if not (start / "config.json").is_file():
        raise ValueError(f"--model {start} is no checkpoint folder: it has no config.json")
    if model is not None and (run / "start.txt").exists():
        _check_same_start(run, start)
    for step in checkpoint.steps_saved(run):
        if checkpoint.damage(checkpoint.folder_of(run, step)) is None:
            checkpoint.check_same_run(checkpoint.folder_of(run, step), recipe, place.world)
            break
    _check_mixers(recipe, start)
    if any(stage.loss in TAUGHT for stage in recipe.stages):
        teacher_of(recipe, start)
    return start


def _check_same_start(run: Path, start: Path) -> None:
    began = Path((run / "start.txt").read_text().strip())
    if began.resolve() != start:
        raise ValueError(
            f"--model is {start}, but {run} began with {began}; leave --model out to go on with that, or "
            f"name another folder with --run (a checkpoint that was moved: correct {run}/start.txt)"
        )


def mixer_names(start: Path) -> list[str]:
    """The mixer of each layer of a checkpoint; all softmax in one that is not converted."""
    config = read_config(start)
    if config.model_type not in CONVERTED_TYPES:
        return [SOFTMAX] * config.num_hidden_layers
    return [entry["name"] for entry in config.layer_mixers]


def _check_mixers(recipe: Recipe, start: Path) -> None:
    """Training keeps a checkpoint's mixers whatever the recipe says, so the two must say the same."""
    have = mixer_names(start)
    want = [entry["name"] for entry in layer_mixers(recipe, len(have))]
    if have == want:
        return
    layer = next(n for n, (a, b) in enumerate(zip(have, want, strict=True)) if a != b)
    kinds, kept = set(have) - {SOFTMAX}, [n for n, name in enumerate(have) if name == SOFTMAX]
    convert = (
        f"convert-checkpoint {recipe.source if kinds else start} FOLDER --recipe RECIPE, then --model FOLDER"
    )
    as_it_is = ""
    if len(kinds) < 2:
        sets = f'--set "mixer={{name: {next(iter(kinds), SOFTMAX)}}}"'
        sets += f' --set "softmax_layers={kept}"' if kinds else ""
        as_it_is = f"\nTo train the checkpoint as it is: {sets}"
    raise ValueError(
        f"{start} has {_counted(have)}; the recipe's mixer and softmax_layers ask for {_counted(want)} "
        f"(layer {layer}: {have[layer]} there, {want[layer]} in the recipe).\n"
        f"To convert first: {convert}{as_it_is}"
    )


def _counted(names: list[str]) -> str:
    """Such as `gsa in 28 layers, softmax in 2`."""
    counts = Counter(names).items()
    return ", ".join(f"{name} in {n} layer{'s' if n > 1 else ''}" for name, n in counts)


def _note(recipe: Recipe, run: Path, start: Path) -> None:
    """Write in the run's folder what it is. Only then does the folder hold a run."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.json").write_text(json.dumps(recipe.to_dict(), indent=1) + "\n")
    (run / "start.txt").write_text(f"{start}\n")


def _prepare(recipe: Recipe, run: Path, start: Path, place: Place) -> Job:
    words = tokenizer(str(start))
    rows = token_rows_of(recipe, words)
    data = _batches(recipe, rows, place)
    if not checkpoint.steps_saved(run):
        data = itertools.chain([next(data)], data)  # text that cannot be read shows before anything is made
    held_out = _held_out_rows(recipe, words)
    say = print if place.first else _quiet
    found = checkpoint.find(run, recipe, place, say)
    begun = Resumed(0, 0, {})
    stages = Stages(recipe, place, start, checkpoint.read_manifest(found)["step"] if found else 0)
    if found:
        begun = checkpoint.resume(stages.engine, found, place, say)
        rows.load_state_dict(begun.position)
    engine.barrier()  # no process looks for start.txt any more
    if place.first:
        _note(recipe, run, start)
    progress = Progress(
        run,
        total_steps=total_steps(recipe),
        every=recipe.train.log_every_steps,
        done=(begun.step, begun.tokens),
        device=place.device,
        speaks=place.first,
    )
    progress.say(_plan(recipe, place, mixer_names(start)))
    if recipe.stages:
        progress.say(stages.table())
        progress.enter(stages.plan, len(stages.plans))
    return Job(recipe, run, place, stages, data, held_out, progress, begun)


def _quiet(text: str) -> None:
    """What ranks other than the first say."""


def _plan(recipe: Recipe, place: Place, mixers: list[str]) -> str:
    t = recipe.train
    return (
        f"{total_steps(recipe)} steps of {t.batch_tokens} tokens ({short(t.total_tokens)} in all): "
        f"{place.world} x {accumulation(recipe, place.world)} passes x {t.micro_batch_sequences} rows x "
        f"{recipe.data.context_tokens} tokens, ZeRO {t.zero_stage}, {t.dtype}, on {place.device.type}; "
        f"{_counted(mixers)}"
    )


def sources(recipe: Recipe) -> list[Source]:
    """The recipe's training text. Documents set aside for scoring never come out of it."""
    apart = _set_aside(recipe)

    def reader(text: str, field: str) -> Callable[[], Iterator[str]]:
        return lambda: documents(text, held_out=False if apart else None, text_field=field)

    return [Source(s.text, reader(s.text, s.text_field), s.weight) for s in recipe.data.sources]


def _set_aside(recipe: Recipe) -> bool:
    """Whether held-out text comes out of the training sources, which then give only the rest."""
    d = recipe.data
    return d.held_out is None or d.held_out in [s.text for s in d.sources]


def token_rows_of(recipe: Recipe, words: PreTrainedTokenizerBase) -> TokenRows:
    """The recipe's training text as rows, from the first one."""
    return TokenRows(
        sources(recipe),
        words,
        row_tokens=recipe.data.context_tokens,
        apart=recipe.data.pack == "documents",
        shuffle_documents=recipe.data.shuffle_documents,
        seed=recipe.train.seed,
    )


def _held_out_rows(recipe: Recipe, words: PreTrainedTokenizerBase) -> torch.Tensor:
    """The first train.eval_rows rows of held-out text."""
    d, rows = recipe.data, recipe.train.eval_rows
    key, spec = ("data.held_out", d.held_out) if d.held_out else ("data.sources[0].text", d.sources[0].text)
    apart, field = True if _set_aside(recipe) else None, d.sources[0].text_field
    check_text(key, spec, held_out=apart, text_field=field)
    try:
        texts = documents(spec, held_out=apart, text_field=field)
        ids = token_ids(words, texts, limit=rows * d.context_tokens)
        return token_rows(ids, d.context_tokens, rows)
    except ValueError as error:
        raise ValueError(f"{key}: {spec}: held-out text: {error}; name a longer one") from None
