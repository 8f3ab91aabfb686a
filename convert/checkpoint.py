"""convert-checkpoint: from a source and a recipe to a folder that is ready to train, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from unsoftmax.convert import provenance
from unsoftmax.convert.cache import map_state
from unsoftmax.convert.config import attention_shape, convert_config
from unsoftmax.convert.load import tokenizer as load_tokenizer
from unsoftmax.convert.measure import token_ids, token_rows
from unsoftmax.convert.model import CONVERTED_MODELS
from unsoftmax.convert.remote_code import write_remote_code
from unsoftmax.convert.share import can_share, share_slots, shares_slots, sharing_bytes
from unsoftmax.convert.source import PIECE_BYTES, Source, open_source
from unsoftmax.convert.start import ROW_TOKENS, start_layers
from unsoftmax.convert.verify import Check, sample_rows, verify_conversion
from unsoftmax.convert.weights import Plan, plan_weights, skeleton, write_weights
from unsoftmax.kernels.gsa.layer import GatedSlotAttention
from unsoftmax.kernels.mixer import Mixer, MixerOptions, Rotary
from unsoftmax.recipes.schema import SOFTMAX, Calibration, Recipe, layer_mixers
from unsoftmax.recipes.text import check_text, documents

PARTIAL = ".partial-"
OVERHEAD_BYTES = 700 << 20  # Python and torch themselves
SIDE_BYTES = 16 << 20  # configuration, tokenizer, code
LEAST_STATE_BYTES = 256 << 20  # a sequence's state may have as much whatever the source's cache has
DOCUMENT_CHARACTERS = 8192  # a few thousand tokens of each document, so that calibration sees many
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Everything decided before a byte is written."""

    source: Source
    out: Path
    recipe: Recipe
    config: PretrainedConfig
    model: PreTrainedModel  # on the meta device: names and shapes
    plan: Plan
    device: torch.device

    @property
    def mixers(self) -> dict[int, Mixer]:
        found = {i: layer.self_attn for i, layer in enumerate(self.model.model.layers)}
        return {i: mixer for i, mixer in found.items() if isinstance(mixer, Mixer)}

    @property
    def sharing(self) -> dict[int, GatedSlotAttention]:
        """The layers among whose heads the recipe has slots shared out."""
        if not self.recipe.calibration.sharing_tokens:
            return {}
        slots = {i: m for i, m in self.mixers.items() if isinstance(m, GatedSlotAttention)}
        return {i: mixer for i, mixer in slots.items() if shares_slots(mixer)}


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    recipe: Recipe,
    *,
    dry_run: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Convert a Llama or Mistral checkpoint to the recipe's attention.

    Args:
        source: a folder or a hub id.
        out: the folder to make. It appears whole, after verification, or not at all.
        dry_run: stop after source, plan, budget and a look at the texts; nothing is written.
        verify: hold the result against the source before it is moved to `out`.
        allow_pickle: also read `.bin` weights.
        say: takes each line of the account.

    Returns:
        `out`.

    Raises:
        ValueError: the source, the recipe or the place is unfit; the message says which key or file.
        RuntimeError: a check failed; nothing is left at `out`.
    """
    out = Path(out).expanduser()
    _check_place(out, say)
    job = _prepare(open_source(source, allow_pickle=allow_pickle), out, recipe)
    for line in (*_source_lines(job), *_plan_lines(job), *_budget_lines(job, verify)):
        say(line)
    _check_disk(job)
    _check_rows(job)
    _check_texts(job, verify)
    if dry_run:
        say("dry run: nothing was written")
        return out
    partial = out.with_name(f"{out.name}{PARTIAL}{os.getpid()}")
    try:
        _fill(job, partial, verify, say)
        _sync(*partial.iterdir(), partial)
        partial.rename(out)
        _sync(out.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"{out}: the disk is full; {_gib(_output_bytes(job))} are needed") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"wrote {out}")
    for line in _next_lines(job):
        say(line)
    return out


# ---- before anything is written


def _check_place(out: Path, say: Callable[[str], None]) -> None:
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists already; name a folder that does not, or remove it first")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent}: no such folder, so {out.name} cannot be made in it; make it first")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"{out.parent}: cannot be written to; name an OUT elsewhere")
    for stale in sorted(out.parent.glob(f"{out.name}{PARTIAL}*")):
        pid = stale.name.rpartition("-")[2]
        if pid.isdigit() and int(pid) != os.getpid() and _runs(int(pid)):
            raise ValueError(f"{stale}: process {pid} is converting to {out} right now; name another OUT")
        shutil.rmtree(stale)
        say(f"removed {stale}, left behind by a conversion that was killed")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _prepare(source: Source, out: Path, recipe: Recipe) -> Conversion:
    path = source.folder / "config.json"
    try:
        layers = source.config.num_hidden_layers
        config = convert_config(source.config, layer_mixers(recipe, layers))
        _check_state(source, recipe, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    config.dtype = source.dtype
    model_class = CONVERTED_MODELS[source.family]
    config.architectures = [model_class.__name__]
    model = skeleton(model_class, config)
    plan = plan_weights(source, config, model)
    _check_tokenizer(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Conversion(source, out, recipe, config, model, plan, device)


def _check_state(source: Source, recipe: Recipe, config: PretrainedConfig) -> None:
    """Refuse a state larger than the cache that it replaces could get: making one would fill the memory."""
    options, shape = recipe.mixer.options, attention_shape(config)
    layers = sum(entry["name"] != SOFTMAX for entry in config.layer_mixers)
    if options is None or not layers:
        return
    positions, a_token = config.max_position_embeddings, _cache_bytes(source)
    numbers, most = options.state_numbers(shape), max(positions * a_token, LEAST_STATE_BYTES)
    if 4 * layers * numbers <= most:
        return
    key, works = _largest(options, lambda tried: 4 * layers * tried.state_numbers(shape) > most)
    named = getattr(options, key)
    raise ValueError(
        f"mixer.{key} is {list(named) if isinstance(named, tuple) else named}: a sequence's state would be "
        f"{layers} layers x {numbers:,} numbers x 4 bytes = {4 * layers * numbers:,} bytes; at most {most:,} "
        f"make sense, as much as the source's cache of {positions} tokens"
        + (f" or {_gib(LEAST_STATE_BYTES)}" if most == LEAST_STATE_BYTES else "")
        + f". {works} works"
    )


def _largest(options: MixerOptions, too_large: Callable[[MixerOptions], bool]) -> tuple[str, Any]:
    """The option that is too large even with all others at their defaults, and its own default."""
    usual = type(options)()
    fields = [field.name for field in dataclasses.fields(options)]
    for name in fields:
        with contextlib.suppress(ValueError):  # some go with others only
            if too_large(type(options)(**{name: getattr(options, name)})):
                return name, getattr(usual, name)
    sizes = {n: v for n in fields if isinstance(v := getattr(options, n), int)}
    largest = max(sizes, key=lambda n: sizes[n])
    return largest, getattr(usual, largest)


def _check_tokenizer(source: Source) -> None:
    if not any(name.startswith("tokenizer") for name in source.companions):
        raise ValueError(
            f"{source.folder}: has no tokenizer files; copy tokenizer.json there from the model's page"
        )
    try:
        top = max(load_tokenizer(source.folder).get_vocab().values())
    except ValueError:
        raise
    except Exception as error:  # tokenizers raise bare Exception on a damaged file
        raise ValueError(f"{source.folder}: its tokenizer cannot be read: {error}") from error
    if top >= source.config.vocab_size:
        raise ValueError(
            f"{source.folder}: the tokenizer does not fit: it has token id {top}, and the embedding has "
            f"vocab_size {source.config.vocab_size} rows; use the tokenizer this checkpoint was trained with"
        )


def _check_disk(job: Conversion) -> None:
    free, need = shutil.disk_usage(job.out.parent).free, _output_bytes(job)
    if free < need:
        raise ValueError(
            f"{job.out}: {_gib(need)} are needed and {_gib(free)} are free; name an OUT elsewhere"
        )


def _check_rows(job: Conversion) -> None:
    """Calibration text must give rows that the fits can do with."""
    need = max((mixer.fit_tokens for mixer in job.mixers.values()), default=1)
    tokens = job.recipe.calibration.tokens
    if not job.plan.new or row_tokens(job.source, tokens) >= need:
        return
    longest = min(ROW_TOKENS, job.source.config.max_position_embeddings)
    if longest < need:
        raise ValueError(
            f"mixer.sinks and mixer.recent ask for calibration rows of {need} tokens, and rows have at most "
            f"{longest} here; mixer.recent null needs none"
        )
    enough = Calibration.tokens
    raise ValueError(
        f"calibration.tokens is {tokens}, which gives rows of {row_tokens(job.source, tokens)} tokens; "
        f"{job.recipe.mixer.name} is fitted on rows of {need} or more: such as {enough}"
    )


def _check_texts(job: Conversion, verify: bool) -> None:
    """Open every text that the work will read; found hours later, a wrong path would cost those hours."""
    source, text, own = job.source, job.recipe.calibration.text, job.recipe.data.held_out
    if (job.plan.new or verify) and load_tokenizer(source.folder).eos_token_id is None:
        raise ValueError(
            f"{source.folder}: the tokenizer has no eos token, which ends each document; "
            "set eos_token in tokenizer_config.json"
        )
    if job.plan.new:
        check_text("calibration.text", text, held_out=False)
    if not verify:
        return
    key, spec = ("data.held_out", own) if own else ("calibration.text", text)
    check_text(key, spec)
    try:
        sample_rows(source, job.recipe)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _output_bytes(job: Conversion) -> int:
    copied = sum(job.source.entries[key].num_bytes for key in job.plan.copied)
    return copied + job.plan.new_bytes + SIDE_BYTES


# ---- what is said first


def _gib(n: float) -> str:
    return f"{n / GIB:.2f} GiB" if n >= 0.1 * GIB else f"{n / (1 << 20):.2f} MiB"


def _source_lines(job: Conversion) -> list[str]:
    s, c = job.source, job.source.config
    rope = c.rope_parameters
    files = f"{len(s.files)} file{'s' if len(s.files) > 1 else ''}"
    return [
        f"source {s.name}",
        f"  {s.family}   {c.num_hidden_layers} layers   width {c.hidden_size}   {c.num_attention_heads}/"
        f"{c.num_key_value_heads} heads of {c.head_dim}   vocabulary {c.vocab_size}",
        f"  rope {rope['rope_type']} theta {rope['rope_theta']:g}   "
        f"window {getattr(c, 'sliding_window', None)}   tied {bool(c.tie_word_embeddings)}   "
        f"{str(s.dtype).removeprefix('torch.')}   {files}   {_gib(s.num_bytes)}",
    ]


def _plan_lines(job: Conversion) -> list[str]:
    names = [entry["name"] for entry in job.config.layer_mixers]
    groups = "   ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
    options = job.recipe.mixer.options
    chosen = dataclasses.asdict(options) if options is not None else {}
    shown = "  ".join(f"{key}={value}" for key, value in chosen.items())
    return ["plan", f"  layers {groups}", *([f"  {shown}"] if shown else []), *job.plan.lines()]


def _budget_lines(job: Conversion, verify: bool) -> list[str]:
    total = sum(torch.Size(job.plan.shapes[key]).numel() for key in job.plan.copied)
    lines = [
        "budget",
        f"  output {_gib(_output_bytes(job))}   peak memory about {_gib(peak_bytes(job))} to write"
        + (
            f", {_gib(sharing_bytes(job.source, _sharing_tokens(job)) + OVERHEAD_BYTES)} to share slots out"
            if job.sharing
            else ""
        )
        + (f", {_gib(verify_bytes(job))} to verify" if verify else ""),
        f"  parameters {total:,} + {job.plan.num_new:,} new ({100 * job.plan.num_new / total:.3f} %)",
    ]
    state, kv = state_bytes(job)
    lines.append(
        f"  a sequence's state {_gib(state)} at any length; the source's cache {_gib(4096 * kv)} at 4k, "
        f"{_gib(32768 * kv)} at 32k"
    )
    softmax = len(job.config.layer_mixers) - len(job.mixers)
    if softmax and job.mixers:
        own = kv * softmax / len(job.config.layer_mixers)
        lines.append(
            f"  and {softmax} softmax layers keep a cache: {_gib(4096 * own)} at 4k, "
            f"{_gib(32768 * own)} at 32k"
        )
    return lines


def peak_bytes(job: Conversion) -> int:
    """About what the process takes until the weights are written."""
    layer = sum(
        torch.Size(shape).numel() * 4
        for key, shape in job.plan.shapes.items()
        if key.startswith("model.layers.0.") and key not in job.plan.new
    )
    calibration = 3 * 4 * job.recipe.calibration.tokens * job.config.hidden_size if job.plan.new else 0
    return (
        OVERHEAD_BYTES
        + 4 * PIECE_BYTES
        + job.plan.new_bytes
        + (2 * layer + calibration if job.plan.new else 0)
    )


def verify_bytes(job: Conversion) -> int:
    """About what the process takes to hold two float32 models side by side."""
    return OVERHEAD_BYTES + 2 * 4 * sum(torch.Size(job.plan.shapes[key]).numel() for key in job.plan.copied)


def state_bytes(job: Conversion) -> tuple[int, int]:
    """Bytes a sequence needs in decoding: the converted layers' state, and the source's cache per token."""
    sizes: dict[Any, int] = {}
    total = 0
    for mixer in job.mixers.values():
        key = (type(mixer), mixer.options)
        if key not in sizes:
            sizes[key] = _state_of_one_token(mixer)
        total += sizes[key]
    return total, _cache_bytes(job.source)


def _cache_bytes(source: Source) -> int:
    """Of one token in the source's own cache."""
    c = source.config
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * source.dtype.itemsize


@torch.no_grad()
def _state_of_one_token(mixer: Mixer) -> int:
    own = type(mixer)(mixer.shape, mixer.options)
    D = mixer.shape.head_dim
    rotary = Rotary(torch.ones(1, 1, D), torch.zeros(1, 1, D))
    _, state = own(torch.zeros(1, 1, mixer.shape.hidden_size), rotary=rotary, keep_state=True)
    sizes: list[int] = []
    map_state(state, lambda t: sizes.append(t.numel() * t.element_size()) or t)
    return sum(sizes)


# ---- the work


def _fill(job: Conversion, folder: Path, verify: bool, say: Callable[[str], None]) -> None:
    """Write everything into `folder`, verified."""
    folder.mkdir()
    new, fits = _start(job, say)
    _share(job, new, say)
    _write(job, new, folder, say)
    _write_sides(job, folder)
    digest = _hash(job, say)
    checks = verify_conversion(job.source, folder, job.plan, job.recipe, say=say) if verify else []
    _record(job, folder, digest, fits, checks)
    _refuse_failures(job, checks)


def row_tokens(source: Source, wanted: int, *, whole: bool = False) -> int:
    """Tokens of a row of calibration text; see calibration_rows."""
    few = max(wanted // 8, ROW_TOKENS // 4) if wanted < 8 * ROW_TOKENS and not whole else ROW_TOKENS
    return min(few, wanted, source.config.max_position_embeddings)


def calibration_rows(source: Source, recipe: Recipe, wanted: int, *, whole: bool = False) -> torch.Tensor:
    """Rows of calibration text, [R, T] int64, T at most ROW_TOKENS: less if few tokens are wanted, or, if
    `whole`, only where the text has fewer."""
    text = recipe.calibration.text
    length = row_tokens(source, wanted, whole=whole)
    try:
        starts = (document[:DOCUMENT_CHARACTERS] for document in documents(text, held_out=False))
        ids = token_ids(load_tokenizer(source.folder), starts, wanted)
        length = min(length, len(ids)) if whole else length
        return token_rows(ids, length, wanted // length)
    except ValueError as error:
        raise ValueError(f"calibration.text {text}: {error}") from None


def _start(
    job: Conversion, say: Callable[[str], None]
) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, float]]]:
    if not job.plan.new:
        return {}, {}
    new, fits = start_layers(
        job.source,
        job.model,
        job.plan.new,
        lambda: calibration_rows(job.source, job.recipe, job.recipe.calibration.tokens),
        seed=job.recipe.calibration.seed,
        device=job.device,
        say=say,
    )
    for name in dict.fromkeys(name for numbers in fits.values() for name in numbers):
        values = [numbers[name] for numbers in fits.values() if name in numbers]
        mean = sum(values) / len(values)
        span = f"from {min(values):.4g} to {max(values):.4g} over {len(values)} layers"
        say(f"  start    {name}: mean {mean:.4g}, {span}")
    return new, fits


def _sharing_tokens(job: Conversion) -> int:
    return row_tokens(job.source, job.recipe.calibration.sharing_tokens, whole=True)


def _share(job: Conversion, new: dict[str, torch.Tensor], say: Callable[[str], None]) -> None:
    """Write into the configuration how many slots each head has, where the recipe shares them out."""
    mixers = job.sharing
    if not mixers:
        return
    if not can_share(job.source, job.device, _sharing_tokens(job)):
        say(
            "  share    every head keeps mixer.num_slots: the teacher cannot be run whole here (memory, or "
            "pickled weights); --set calibration.sharing_tokens=0 asks for that"
        )
        return
    wanted = job.recipe.calibration.sharing_tokens
    rows = calibration_rows(job.source, job.recipe, wanted, whole=True)
    for layer, slots in share_slots(job.source, mixers, new, rows, device=job.device, say=say).items():
        job.config.layer_mixers[layer]["num_slots"] = list(slots)
    every = sorted(n for layer in mixers for n in job.config.layer_mixers[layer]["num_slots"])
    say(
        f"  share    slots a head: mean {sum(every) / len(every):.1f}, from {every[0]} to {every[-1]}, "
        f"median {every[len(every) // 2]}"
    )


class _Rate:
    """Says how far a pass over bytes is, every few seconds and at its end."""

    def __init__(self, label: str, total: int, say: Callable[[str], None]) -> None:
        self.label, self.total, self.say = label, max(1, total), say
        self.begun = self.said = time.monotonic()
        self.done = 0

    def reach(self, done: int, what: str = "") -> None:
        self.done, now = done, time.monotonic()
        if now - self.said < 2 and done < self.total:
            return
        self.said = now
        rate = done / max(now - self.begun, 1e-9)
        self.say(
            f"  {self.label:8} {100 * done / self.total:3.0f} %   {rate / 1e6:,.0f} MB/s   "
            f"{(self.total - done) / rate:4.0f} s left   {what}".rstrip()
        )


def _write(job: Conversion, new: dict[str, torch.Tensor], folder: Path, say: Callable[[str], None]) -> None:
    rate = _Rate("write", _output_bytes(job) - SIDE_BYTES, say)
    names = list(job.plan.files)
    write_weights(
        job.source,
        job.plan,
        new,
        folder,
        lambda file, n: rate.reach(rate.done + n, f"file {names.index(file) + 1}/{len(names)}"),
    )


def _write_sides(job: Conversion, folder: Path) -> None:
    """Everything but the weights: companions untouched, then the configuration and the code."""
    for name in job.source.companions:
        shutil.copyfile(job.source.folder / name, folder / name)
    job.config.save_pretrained(folder)
    write_remote_code(folder)


def _hash(job: Conversion, say: Callable[[str], None]) -> str:
    size = sum((job.source.folder / name).stat().st_size for name in ("config.json", *job.source.files))
    rate = _Rate("hash", size, say)
    return job.source.sha256(rate.reach)


def _record(
    job: Conversion, folder: Path, digest: str, fits: dict[int, dict[str, float]], checks: list[Check]
) -> None:
    if (job.source.folder / provenance.NAME).is_file():
        shutil.copyfile(job.source.folder / provenance.NAME, folder / provenance.NAME)
    entry = {
        "source": job.source.name,
        "source_revision": job.source.revision,
        "source_sha256": digest,
        "recipe": job.recipe.to_dict(),
        "seed": job.recipe.calibration.seed,
        "tensors": {
            "copied": len(job.plan.copied),
            "derived": job.plan.derived,
            "new": len(job.plan.new),
            "unused": job.plan.unused,
        },
        "new_parameters": job.plan.num_new,
        "start": {str(layer): numbers for layer, numbers in fits.items()},
        "checks": [dataclasses.asdict(check) for check in checks],
    }
    provenance.extend(folder, "convert", entry)


def _refuse_failures(job: Conversion, checks: list[Check]) -> None:
    failed = [check for check in checks if check.passed is False]
    if failed:
        rows = "; ".join(f"{c.name}: {c.value:.3g}, allowed {c.limit:.3g}" for c in failed)
        raise RuntimeError(f"verification failed, so nothing was left at {job.out}: {rows}")


def _sync(*paths: Path) -> None:
    """Make files, and the names in folders, durable."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _next_lines(job: Conversion) -> list[str]:
    return [
        "next",
        f"  unsoftmax-train RECIPE --model {job.out} --run {job.out}-run",
        f"  unsoftmax-eval {job.out} --teacher {job.source.name}",
    ]
