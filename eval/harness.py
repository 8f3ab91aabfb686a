"""Score a checkpoint, and its teacher under the same settings, with stock lm-eval tasks and held-out text.

This is the only file that imports lm_eval, and it does so inside functions: the import alone takes many
seconds, and wrong arguments should be told at once.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import torch

from unsoftmax.convert.load import load, named_device, named_dtype
from unsoftmax.convert.load import tokenizer as load_tokenizer
from unsoftmax.eval.heldout import (
    PROBE,
    PYTHON_DOCS,
    check_fit,
    filler_tokens,
    held_out_rows,
    measure_rows,
)
from unsoftmax.eval.localdata import MissingData, local_datasets
from unsoftmax.eval.planted import planted_tasks
from unsoftmax.eval.results import assemble, number, versions, write_results
from unsoftmax.eval.suites import Suite, Task, missing_data, named_suite

BOOTSTRAPS = 1_000  # resamples for the standard error of metrics that are not plain means
NO_ANSWER = ("", "[invalid]")  # what lm-eval's filters leave where they find no answer
ENOUGH_TO_JUDGE = 20  # choices before "always A" is said

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Settings:
    suite: Suite
    data: Path | None
    limit: int | None
    batch_size: int
    device: str
    dtype: torch.dtype
    text: str
    answers: Path | None
    max_new_tokens: int | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "limit": self.limit,
            "batch_size": self.batch_size,
            "device": self.device,
            "dtype": str(self.dtype).split(".")[-1],
            "text": self.text,
            "rows": self.suite.rows if self.limit is None else min(self.limit, self.suite.rows),
            "row_tokens": self.suite.row_tokens,
            "data": None if self.data is None else self.data.name,
            "max_new_tokens": self.max_new_tokens,
            "shots": {task.name: task.shots for task in self.suite.tasks},
        }


def evaluate(
    checkpoint: str | Path,
    *,
    teacher: str | Path | None = None,
    suite: str | Suite = "paper",
    data: str | Path | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    batch_size: int = 8,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    text: str | None = None,
    max_new_tokens: int | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Score a checkpoint on a suite.

    Args:
        checkpoint: a converted or plain folder, or a hub id.
        teacher: scored under the same settings, for the teacher and difference columns.
        suite: a name in `unsoftmax.eval.suites.SUITES`, or a Suite.
        data: folder with the data sets (mmlu/, bbh/, nq_open/, ...); None takes them from the hub.
        limit: at most this many items a task and rows of text; None takes all. Marked in the result.
        out: folder for results.json, results.md and `answers/`, from which an interrupted run goes on.
        batch_size: sequences at once.
        device: "cpu", "cuda", ...; None takes the GPU where there is one.
        dtype: "fp32", "bf16", "fp16"; None is bf16 on a GPU and fp32 on a CPU.
        text: held-out text for perplexity and recall, as recipes name texts; None is "python-docs".
        max_new_tokens: tokens a model may write for a problem, in place of what the task file says.
        say: told each step.

    Returns:
        what results.json holds.

    Raises:
        ValueError: unknown suite or dtype, missing data, a teacher that cuts text into other tokens, a model
            that is not finite or has collapsed.
    """
    started = time.time()
    settings = _settings(suite, data, limit, out, batch_size, device, dtype, text, max_new_tokens)
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"--out {out} is a file; name a folder, which need not be there yet")
    not_run = _check_data(settings, say)
    if teacher is not None:
        _check_same_tokens(str(checkpoint), str(teacher))
    ours = _score(str(checkpoint), settings, not_run, say)
    theirs = None if teacher is None else _score(str(teacher), settings, not_run, say)
    result = assemble(settings.suite.name, settings.to_dict(), ours, theirs, not_run, time.time() - started)
    if out is not None:
        say(f"results: {write_results(result, Path(out))}")
    return result


def score_model(
    model: Any,
    tokenizer: Any,
    name: str,
    *,
    suite: str | Suite,
    data: str | Path | None = None,
    limit: int | None = None,
    text: str | None = None,
    batch_size: int = 8,
    say: Say = print,
) -> dict[str, Any]:
    """Score a model that is loaded already: {"text": Measurement's dict, "rows": as in results.json, ...}.

    Arguments and errors as of `evaluate`; no answers are kept.
    """
    dtype, device = next(model.parameters()).dtype, str(model.device)
    settings = _settings(suite, data, limit, None, batch_size, device, dtype, text, None)
    not_run = _check_data(settings, say)
    scored = _score_model(model, tokenizer, name, settings, not_run, say)
    return assemble(settings.suite.name, settings.to_dict(), scored, None, not_run, scored["seconds"])


def _settings(
    suite: str | Suite,
    data: str | Path | None,
    limit: int | None,
    out: str | Path | None,
    batch_size: int,
    device: str | None,
    dtype: str | torch.dtype | None,
    text: str | None,
    max_new_tokens: int | None,
) -> _Settings:
    return _Settings(
        suite=named_suite(suite),
        data=None if data is None else Path(data).resolve(),
        limit=_at_least_one("--limit", limit),
        batch_size=_at_least_one("--batch-size", batch_size) or 8,
        device=named_device(device),
        dtype=named_dtype(dtype, named_device(device)),
        text=text or PYTHON_DOCS,
        answers=None if out is None else Path(out) / "answers",
        max_new_tokens=_at_least_one("--max-new-tokens", max_new_tokens),
    )


def _at_least_one(key: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{key} is {value!r}; it must be a whole number of at least 1, such as 8")
    return value


def _check_data(settings: _Settings, say: Say) -> dict[str, str]:
    """Task to reason, for optional tasks without data; ValueError for the others."""
    if settings.data is None:
        return {}
    missing = missing_data(settings.suite, settings.data)
    required = [missing[t.name] for t in settings.suite.tasks if t.name in missing and not t.optional]
    if required:
        raise ValueError(
            f"suite {settings.suite.name}: {'; '.join(required)}. Put parquet files there, or leave --data "
            "out to take the data sets from the hub."
        )
    for reason in missing.values():
        say(f"not run: {reason}")
    return missing


def _check_same_tokens(checkpoint: str, teacher: str) -> None:
    """ValueError if the two cut text into other tokens: perplexities a token would not compare."""
    ours, theirs = (load_tokenizer(path)(PROBE).input_ids for path in (checkpoint, teacher))
    if ours != theirs:
        raise ValueError(
            f"--teacher {teacher} cuts text into other tokens than {checkpoint} ({len(theirs)} against "
            f"{len(ours)} for the same text), so losses a token do not compare; give the checkpoint that it "
            "was converted from"
        )


# One model


def _score(path: str, settings: _Settings, not_run: dict[str, str], say: Say) -> dict[str, Any]:
    """Load a model and measure everything. Optional tasks that cannot run are added to `not_run`."""
    say(f"loading {path} ({str(settings.dtype).split('.')[-1]} on {settings.device})")
    model = load(path, dtype=settings.dtype, device=settings.device)
    scored = _score_model(model, load_tokenizer(path), path, settings, not_run, say)
    del model
    gc.collect()
    return scored


def _score_model(
    model: Any, tokenizer: Any, path: str, settings: _Settings, not_run: dict[str, str], say: Say
) -> dict[str, Any]:
    started = time.time()
    check_fit(model, tokenizer, path)
    scored: dict[str, Any] = {"path": path, **_describe(model), "tasks": {}, "text": None, "data": {}}
    if settings.suite.rows:
        rows = held_out_rows(settings.text, tokenizer, settings.suite, settings.limit)
        say(f"held-out text {settings.text}: {rows.shape[0]} rows of {rows.shape[1]:,} tokens")
        scored["text"] = measure_rows(model, rows, batch_size=settings.batch_size, progress=_to_stderr)
    if settings.suite.planted:
        scored["tasks"] |= _score_planted(model, tokenizer, settings, not_run, say)
    if settings.suite.tasks:
        with local_datasets(settings.data) as read_files, _quiet_lm_eval():
            scored["tasks"] |= _score_tasks(model, tokenizer, scored["hash"], settings, not_run, say)
        scored["data"] = dict(sorted(read_files.items()))
    scored["seconds"] = round(time.time() - started, 1)
    return scored


def _score_planted(
    model: Any, tokenizer: Any, settings: _Settings, not_run: dict[str, str], say: Say
) -> dict[str, Any]:
    suite, reach = settings.suite, model.config.max_position_embeddings
    lengths = [length for length in suite.planted if length <= reach]
    for length in sorted(set(suite.planted) - set(lengths)):
        name = f"planted facts in {length:,} tokens"
        not_run[name] = f"{name}: max_position_embeddings of config.json is {reach:,}"
    filler = filler_tokens(settings.text, tokenizer, max(lengths, default=0))
    return planted_tasks(model, tokenizer, filler, lengths, suite.planted_rows, settings.limit, not_run, say)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _describe(model: Any) -> dict[str, Any]:
    layers = getattr(model.config, "layer_mixers", None)
    names = [layer["name"] for layer in layers] if layers else ["softmax"] * model.config.num_hidden_layers
    return {
        "hash": model_hash(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "mixers": dict(Counter(names)),
    }


def model_hash(model: Any) -> str:
    """SHA-256 of a model's configuration and tensors, as loaded."""
    config = json.dumps(model.config.to_diff_dict(), sort_keys=True, default=str)
    digest = hashlib.sha256(config.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(memoryview(tensor.detach().cpu().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()


# Its tasks


@contextlib.contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """For the block, print lm-eval's errors and progress bars, but no notes of it or of what it calls."""
    import lm_eval.evaluator as evaluator

    logger, stock = logging.getLogger("lm_eval"), evaluator.get_git_commit_hash
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()  # preparing local rows takes a moment and would drown the real bars
    evaluator.get_git_commit_hash = lambda: (
        None
    )  # runs git in the user's folder, which may print "fatal: ..."
    try:
        yield
    finally:
        logger.setLevel(level)
        evaluator.get_git_commit_hash = stock
        if not bars:
            datasets.enable_progress_bars()


def _score_tasks(
    model: Any, tokenizer: Any, digest: str, settings: _Settings, not_run: dict[str, str], say: Say
) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    wrap: Any = HFLM  # its registration decorator hides the constructor from type checkers
    language_model = wrap(pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size)
    manager, scores = _task_manager(), {}
    for task in settings.suite.tasks:
        if task.name in not_run:
            continue
        started = time.time()
        try:
            scores[task.name] = _score_task(task, manager, language_model, digest, settings)
        except (MissingData, ImportError, OSError) as error:
            if not task.optional:
                raise ValueError(f"{task.name}: {error}") from error
            not_run[task.name] = f"{task.name}: {error}"
            say(f"not run: {not_run[task.name]}")
            continue
        shown = ", ".join(f"{m['metric']} {number(m['score'])}" for m in scores[task.name]["metrics"])
        say(f"{task.name} ({task.shots} shots): {shown} · {time.time() - started:.0f} s")
    return scores


@functools.cache
def _task_manager() -> Any:
    """lm-eval's index of all its task files: 8 seconds, so once a process."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _score_task(
    task: Task, manager: Any, language_model: Any, digest: str, settings: _Settings
) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate

    loaded = manager.load([task.name])
    for name, member in loaded["tasks"].items():
        _check_items(name, member, task.shots)
        _check_length(name, member, language_model.max_length, settings.max_new_tokens)
    group = loaded["groups"].get(task.name)
    raw: Any = simple_evaluate(
        model=language_model,
        tasks=[group] if group is not None else list(loaded["tasks"].values()),
        task_manager=manager,
        num_fewshot=task.shots,
        limit=settings.limit,
        use_cache=_answers(settings, digest),
        gen_kwargs={"max_gen_toks": settings.max_new_tokens} if settings.max_new_tokens else None,
        bootstrap_iters=BOOTSTRAPS,
    )
    if raw is None:
        raise RuntimeError(f"{task.name}: lm-eval returned nothing; run one process, without a launcher")
    return _read_result(task, raw, loaded["tasks"])


def _answers(settings: _Settings, digest: str) -> str | None:
    """Where lm-eval keeps answers: it knows a request by its text alone, so the path must name the model."""
    if settings.answers is None:
        return None
    settings.answers.mkdir(parents=True, exist_ok=True)
    made_by = versions()
    dtype = str(settings.dtype).split(".")[-1]
    return str(settings.answers / f"{digest[:20]}-{dtype}-{made_by['unsoftmax']}-{made_by['lm_eval']}")


def _check_items(name: str, member: Any, shots: int) -> None:
    """Raise MissingData unless there are items to score and as many worked examples as asked."""
    config = member.config
    scored = config.test_split or config.validation_split
    scored = scored or ("test" if member.has_test_docs() else "validation")
    if not len(member.dataset[scored]):
        raise MissingData(f"{name}: its data set has no items in the split {scored!r}, which is scored")
    written_out = getattr(config.fewshot_config, "samples", None) is not None
    split = config.fewshot_split or config.training_split or config.validation_split or scored
    # The stock sampler draws one more than it shows, in case it draws the problem itself.
    needed = shots + (getattr(config.fewshot_config, "sampler", "default") == "default")
    if shots and not written_out and len(member.dataset[split]) < needed:
        raise MissingData(
            f"{name} needs {needed} items to take {shots} worked examples from, and its data set has "
            f"{len(member.dataset[split])} in the split {split!r}"
        )


def _check_length(name: str, member: Any, max_length: int, max_new_tokens: int | None) -> None:
    if member.OUTPUT_TYPE != "generate_until":
        return
    tokens = max_new_tokens or (member.config.generation_kwargs or {}).get("max_gen_toks", 256)
    if tokens >= max_length:
        raise ValueError(
            f"{name} lets the model write {tokens:,} tokens, but max_position_embeddings of its config.json "
            f"is {max_length:,}; give --max-new-tokens {max_length // 2}"
        )


# What lm-eval returned


def _read_result(task: Task, raw: dict[str, Any], members: dict[str, Any]) -> dict[str, Any]:
    """Scores of the task or group itself and of its members, and how the model answered."""
    scores = {name: _metrics(raw, name) for name in (task.name, *members) if name in raw["results"]}
    counts = [raw["n-samples"][name] for name in members]
    first = next(iter(members))
    return {
        "metrics": scores.get(task.name) or scores[first],
        "version": raw["versions"].get(task.name, raw["versions"].get(first)),
        "shots": sorted({raw["n-shot"].get(name, task.shots) for name in members}),
        "items": sum(count["effective"] for count in counts),
        "items_in_full": sum(count["original"] for count in counts),
        "members": {
            name: {"metrics": scores[name], "version": raw["versions"].get(name)}
            for name in members
            if name != task.name
        },
        "letters": count_letters(raw["samples"], members),
        "generated": _generated(raw["samples"], members),
    }


def _metrics(raw: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Metric, filter, score and standard error; lm-eval's keys are "metric,filter"."""
    values, higher = raw["results"][name], raw.get("higher_is_better", {}).get(name, {})
    found = []
    for key, score in values.items():
        metric, _, kept = key.partition(",")
        if kept and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{kept}")
            found.append(
                {
                    "metric": metric,
                    "filter": kept,
                    "score": float(score),
                    "stderr": None if error is None or isinstance(error, str) else float(error),
                    "higher_is_better": higher.get(metric),
                }
            )
    return found


def count_letters(samples: dict[str, Any], members: dict[str, Any]) -> dict[str, Any] | None:
    """Of multiple-choice items, how often each place was chosen and how often it was right."""
    chosen: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for name, member in members.items():
        if member.OUTPUT_TYPE != "multiple_choice":
            continue
        for sample in samples[name]:
            likelihoods = [response[0] for response in sample["filtered_resps"]]
            chosen[_letter(likelihoods.index(max(likelihoods)))] += 1
            if str(sample["target"]).isdigit():
                right[_letter(int(sample["target"]))] += 1
    if not chosen:
        return None
    top, count = chosen.most_common(1)[0]
    stuck = chosen.total() >= ENOUGH_TO_JUDGE and count > 0.95 * chosen.total() > 1.5 * right[top]
    return {
        "chosen": dict(sorted(chosen.items())),
        "right": dict(sorted(right.items())),
        "always": top if stuck else None,
    }


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place)


def _generated(samples: dict[str, Any], members: dict[str, Any]) -> dict[str, Any] | None:
    """Of generated answers: shares where the filter found none, and where the stop rule allows none."""
    no_answer = unreachable = total = 0
    stop_rules: set[str] = set()
    for name, member in members.items():
        if member.OUTPUT_TYPE != "generate_until":
            continue
        stops = [stop for stop in (member.config.generation_kwargs or {}).get("until") or () if stop]
        stop_rules.update(stops)
        for sample in samples[name]:
            answer = sample["filtered_resps"][0]
            answer = answer[0] if isinstance(answer, list) and answer else answer
            total += 1
            no_answer += str(answer).strip() in NO_ANSWER
            unreachable += all(any(s in str(t) for s in stops) for t in _accepted(sample["target"]))
    if not total:
        return None
    return {
        "no_answer": no_answer / total,
        "unreachable": unreachable / total,
        "stop": sorted(stop_rules),
    }


def _accepted(target: Any) -> list[Any]:
    """The accepted answers. nq_open's task file renders its list of them as text."""
    if isinstance(target, str) and target.startswith("["):
        with contextlib.suppress(ValueError, SyntaxError):
            target = ast.literal_eval(target)
    return list(target) if isinstance(target, (list, tuple)) and target else [target]
