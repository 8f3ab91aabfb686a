"""What a run is: every recipe key with its unit, default and check, and the strict YAML reader.

A recipe is a YAML file that holds only what differs from the defaults below. Reading is strict: an unknown
key, a number written as text, true for a number or a key given twice is an error that says what to write.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

if typing.TYPE_CHECKING:
    from unsoftmax.kernels.mixer import MixerOptions

FOLDER = Path(__file__).parent
SEEDS = 2**32  # as many as every generator takes
SOFTMAX = "softmax"  # the source's own attention, kept as it is
Schedule = Literal["cosine", "linear", "wsd", "constant"]


def _need(ok: bool, key: str, value: object, must: str) -> None:
    if not ok:
        raise ValueError(f"{key} is {value}; it must be {must}")


@dataclasses.dataclass(frozen=True)
class MixerChoice:
    """The attention that takes the source's place: a name and that mixer's own options."""

    name: str
    """gsa, polysketch, window, or softmax (keeps the source's attention: the ceiling of a comparison)."""

    options: MixerOptions | None = None
    """The mixer's options, which it checks itself. In YAML they stand beside `name`. None for softmax."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Text on which new parameters get their closed-form start; no gradient step is taken."""

    text: str = "python-docs"
    """Where the text comes from: see recipes/text.py for what may stand here."""

    tokens: int = 30_720
    """Tokens read, counted in the source's tokenizer."""

    sharing_tokens: int = 16_384
    """Tokens on which the teacher's loss tells how mixer.num_slots is shared out among the heads: the mean
    stays num_slots, heads that need more get more (GSA with mixer.recent). 0: every head gets num_slots."""

    seed: int = 0
    """Seed of whatever a start draws at random."""

    def __post_init__(self) -> None:
        _need(self.tokens >= 1, "calibration.tokens", self.tokens, "at least 1, such as 30720")
        _need(
            self.sharing_tokens >= 0,
            "calibration.sharing_tokens",
            self.sharing_tokens,
            "0 or more, such as 16384",
        )
        _need(0 <= self.seed < SEEDS, "calibration.seed", self.seed, f"from 0 to {SEEDS - 1}")


@dataclasses.dataclass(frozen=True)
class TextSource:
    """One source of training text."""

    text: str
    """python-docs, a file, a folder or pattern of files, or a hub data set: see recipes/text.py."""

    weight: float = 1.0
    """Share of the tokens drawn from here, relative to the other sources."""

    text_field: str = "text"
    """Field or column that holds a document's text (jsonl, parquet and hub data sets)."""

    def __post_init__(self) -> None:
        _need(self.text != "", "data.sources text", "empty", "a file, a folder, a hub id or python-docs")
        _need(self.weight > 0, "data.sources weight", self.weight, "above 0, such as 1.0")


@dataclasses.dataclass(frozen=True)
class Data:
    """Training text and how it is cut."""

    sources: tuple[TextSource, ...] = (TextSource("python-docs"),)
    """Sources mixed by weight."""

    held_out: str | None = None
    """Text that is only ever scored. null: a fixed tenth of the sources' documents is set aside for it."""

    context_tokens: int = 2048
    """Tokens in one row. A row is filled with documents; a long one goes on in the next row."""

    pack: Literal["documents", "stream"] = "documents"
    """documents: those in one row never see each other. stream: a row is plain text, ends of text marked."""

    shuffle_documents: int = 1024
    """Documents held back to draw the next one from; 1 keeps the sources' order."""

    def __post_init__(self) -> None:
        _need(len(self.sources) > 0, "data.sources", "empty", "a list of at least one {text: ...}")
        _need(
            self.context_tokens >= 2, "data.context_tokens", self.context_tokens, "at least 2, such as 2048"
        )
        _need(self.shuffle_documents >= 1, "data.shuffle_documents", self.shuffle_documents, "at least 1")


@dataclasses.dataclass(frozen=True)
class Train:
    """Continual pretraining. Rates are AdamW's; everything in tokens counts all processes together."""

    total_tokens: int = 8_192_000
    """Tokens of the whole run; rounded up to whole optimizer steps. With stages: left out, or their sum."""

    batch_tokens: int = 32_768
    """Tokens an optimizer step, over all processes."""

    micro_batch_sequences: int = 4
    """Rows one process takes in one pass; how often passes are accumulated follows from it."""

    peak_lr: float = 2.0e-4
    """Highest learning rate of the source's own parameters. With the dot: YAML reads 2e-4 as text."""

    new_lr_scale: float = 10.0
    """Learning rate of the mixers' new parameters, as a multiple of the others'; 0 keeps their start."""

    min_lr_ratio: float = 0.3
    """Learning rate at the end, as a share of the peak."""

    warmup_steps: int = 20
    """Optimizer steps over which the rate rises from 0 to its peak."""

    schedule: Schedule = "linear"
    """After warm-up: cosine or linear decay to min_lr_ratio; constant; wsd holds, then decays linearly."""

    decay_share: float = 0.2
    """Share of all steps that wsd's decay takes, at the end. Other schedules ignore it."""

    weight_decay: float = 0.01
    """AdamW's decoupled decay, on matrices only."""

    beta1: float = 0.9
    """Decay of AdamW's first moment."""

    beta2: float = 0.95
    """Decay of AdamW's second moment."""

    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What DeepSpeed shards: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of the passes. Master weights, moments and the mixers' scalars are float32 either way."""

    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""

    seed: int = 0
    """Seed of data order and of anything drawn at random."""

    save_every_steps: int = 500
    """Optimizer steps between checkpoints; the last step always saves."""

    keep_checkpoints: int = 2
    """Checkpoints kept, newest first."""

    eval_every_steps: int = 250
    """Optimizer steps between held-out scores; 0 scores only at the end."""

    log_every_steps: int = 1
    """Optimizer steps between progress lines."""

    eval_rows: int = 32
    """Held-out rows of data.context_tokens scored each time."""

    max_bad_steps: int = 8
    """Steps in a row whose loss or gradient is not finite (such a step is skipped) before the run stops."""

    def __post_init__(self) -> None:
        for name in ("total_tokens", "batch_tokens", "micro_batch_sequences", "save_every_steps"):
            _need(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        for name in ("keep_checkpoints", "log_every_steps", "eval_rows", "max_bad_steps"):
            _need(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        _need(0 <= self.seed < SEEDS, "train.seed", self.seed, f"from 0 to {SEEDS - 1}")
        for name in ("warmup_steps", "eval_every_steps"):
            _need(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        for name in ("weight_decay", "grad_clip"):
            _need(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more, such as 1.0")
        _need(0 < self.peak_lr < 1, "train.peak_lr", self.peak_lr, "above 0 and below 1, such as 3.0e-5")
        _need(self.new_lr_scale >= 0, "train.new_lr_scale", self.new_lr_scale, "0 or more, such as 10.0")
        _need(
            0 <= self.min_lr_ratio <= 1, "train.min_lr_ratio", self.min_lr_ratio, "from 0 to 1, such as 0.3"
        )
        _need(
            0 < self.decay_share <= 1,
            "train.decay_share",
            self.decay_share,
            "above 0, at most 1, such as 0.2",
        )
        for name in ("beta1", "beta2"):
            _need(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "0 or more and below 1")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One of a run's stages: a loss, for so many tokens. A key left out has its value in `train`."""

    loss: Literal["cross_entropy", "distil", "align"]
    """cross_entropy: of the text. distil: the teacher's whole distribution too, on the same text. align: each
    converted layer alone, held to what the teacher's attention makes of the teacher's own input there; the
    loss is the relative squared error, summed over those layers. All are in train/objective.py."""

    tokens: int
    """Tokens of the stage; rounded up to whole optimizer steps. The text goes on from stage to stage."""

    peak_lr: float | None = None
    """As train.peak_lr. The schedule runs anew in each stage, and so does AdamW."""

    new_lr_scale: float | None = None
    """As train.new_lr_scale."""

    warmup_steps: int | None = None
    """As train.warmup_steps."""

    schedule: Schedule | None = None
    """As train.schedule."""

    min_lr_ratio: float | None = None
    """As train.min_lr_ratio."""

    train: Literal["all", "attention", "new"] | None = None
    """What learns: all; attention: the projections and new parameters of converted layers; new: what the
    mixers added. null: attention for align, else all."""

    teacher_weight: float | None = None
    """distil: share w of the loss (1 - w) cross-entropy + w KL(teacher || student). null: 0.5."""

    temperature: float | None = None
    """distil: divides both models' logits in the KL, which is then multiplied by its square. null: 1."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One run: what is converted to what, and how it is trained."""

    source: str
    """The checkpoint the recipe is for: a hub id, or a name that `unsoftmax fetch` knows."""

    mixer: MixerChoice
    """What takes the place of softmax attention."""

    softmax_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that keep the source's own attention."""

    calibration: Calibration = Calibration()
    data: Data = Data()
    train: Train = Train()

    stages: tuple[Stage, ...] = ()
    """What the run does one after another; empty: cross-entropy on train.total_tokens."""

    teacher: str | None = None
    """The checkpoint that distil and align learn from, a folder or a hub id; every process holds it whole, in
    train.dtype. null: the one that the start was converted from."""

    def __post_init__(self) -> None:
        _need(self.source != "", "source", "empty", "a hub id or a known name, such as smollm2-135m")
        for layer in self.softmax_layers:
            _need(layer >= 0, "softmax_layers", f"{layer} in {list(self.softmax_layers)}", "0 or more")
        twice = [n for n in self.softmax_layers if self.softmax_layers.count(n) > 1]
        _need(not twice, "softmax_layers", f"{list(self.softmax_layers)}", "a list that names a layer once")
        accumulation(self, 1)
        if self.stages:
            _check_stages(self)
            return
        _need(self.teacher is None, "teacher", self.teacher, TEACHER_UNREAD)
        _need(
            self.train.warmup_steps < max(total_steps(self), 1) or self.train.warmup_steps == 0,
            "train.warmup_steps",
            self.train.warmup_steps,
            f"below the run's {total_steps(self)} steps (train.total_tokens {self.train.total_tokens} / "
            f"train.batch_tokens {self.train.batch_tokens}), such as {total_steps(self) // 10}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as plain YAML types; `parse_recipe` reads it back to an equal recipe.

        A run without stages has neither that key nor teacher, so that runs from before there were any go on.
        """
        plain = _plain(self)
        plain["mixer"] = mixer_entry(self.mixer)
        if not self.stages:
            del plain["stages"], plain["teacher"]
        return plain


TEACHER_UNREAD = "left out: no stage has the loss distil or align"


def _check_stages(recipe: Recipe) -> None:
    total = sum(s.tokens for s in recipe.stages)
    for n, (stage, plan) in enumerate(zip(recipe.stages, stage_plans(recipe), strict=True)):
        _check_stage(f"stages.{n}", stage, plan, recipe.train.batch_tokens)
    if not any(s.loss in TAUGHT for s in recipe.stages):
        _need(recipe.teacher is None, "teacher", recipe.teacher, TEACHER_UNREAD)
    _need(recipe.teacher != "", "teacher", "empty", "a folder or a hub id, or left out")
    _need(
        recipe.train.total_tokens == total,
        "train.total_tokens",
        recipe.train.total_tokens,
        f"left out, or {total}: the sum of the stages' tokens",
    )


def _check_stage(key: str, stage: Stage, plan: StagePlan, batch_tokens: int) -> None:
    checks: tuple[tuple[str, bool, str], ...] = (
        ("tokens", plan.tokens >= 1, "at least 1"),
        ("peak_lr", 0 < plan.peak_lr < 1, "above 0 and below 1, such as 3.0e-5"),
        ("new_lr_scale", plan.new_lr_scale >= 0, "0 or more, such as 10.0"),
        ("min_lr_ratio", 0 <= plan.min_lr_ratio <= 1, "from 0 to 1, such as 0.3"),
        ("warmup_steps", plan.warmup_steps >= 0, "0 or more"),
        ("teacher_weight", 0 <= plan.teacher_weight <= 1, "from 0 to 1, such as 0.5"),
        ("temperature", plan.temperature > 0, "above 0, such as 1.0"),
        ("train", (plan.loss, plan.train) != ("align", "all"), "attention or new: align reaches no more"),
    )
    for name, ok, must in checks:
        _need(ok, f"{key}.{name}", getattr(stage, name), must)
    for name in ("teacher_weight", "temperature"):
        found = getattr(stage, name)
        said = f"left out: the loss is {stage.loss}, not distil"
        _need(stage.loss == "distil" or found is None, f"{key}.{name}", found, said)
    _need(
        plan.warmup_steps < plan.steps or plan.warmup_steps == 0,
        f"{key}.warmup_steps",
        f"{plan.warmup_steps}{' (from train)' if stage.warmup_steps is None else ''}",
        f"below the stage's {plan.steps} steps (tokens {plan.tokens} / train.batch_tokens {batch_tokens}), "
        f"such as {plan.steps // 10}",
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def mixer_entry(mixer: MixerChoice) -> dict[str, Any]:
    """A mixer as one flat entry, {"name": ..., every option}: the form of a config's `layer_mixers`."""
    return {"name": mixer.name, **(_plain(mixer.options) if mixer.options is not None else {})}


def layer_mixers(recipe: Recipe, num_layers: int) -> list[dict[str, Any]]:
    """The config entry of each of `num_layers` layers: {"name": "softmax"} or the mixer with all its options.

    Raises ValueError where softmax_layers names a layer that the source does not have.
    """
    beyond = [n for n in recipe.softmax_layers if n >= num_layers]
    if beyond:
        raise ValueError(
            f"softmax_layers names layer {beyond[0]}, but the source has {num_layers} layers: "
            f"0 to {num_layers - 1}"
        )
    return [
        {"name": SOFTMAX} if n in recipe.softmax_layers else mixer_entry(recipe.mixer)
        for n in range(num_layers)
    ]


# ---- numbers that follow


def pass_tokens(recipe: Recipe, world_size: int) -> int:
    """Tokens of one forward pass over all `world_size` processes."""
    return world_size * recipe.train.micro_batch_sequences * recipe.data.context_tokens


TAUGHT = ("distil", "align")  # losses that need a teacher


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """A stage with what it takes from `train` filled in; its steps, counted from 0, are begin to end - 1.

    number counts from 1. teacher_weight and temperature mean nothing unless loss is distil.
    """

    number: int
    loss: str
    tokens: int
    begin: int
    end: int
    peak_lr: float
    new_lr_scale: float
    warmup_steps: int
    schedule: str
    min_lr_ratio: float
    train: str
    teacher_weight: float
    temperature: float

    @property
    def steps(self) -> int:
        return self.end - self.begin


def stage_plans(recipe: Recipe) -> list[StagePlan]:
    """What the run does one after another; one stage of cross-entropy where the recipe has no `stages`."""
    t = recipe.train
    found: list[StagePlan] = []
    for number, stage in enumerate(recipe.stages or (Stage("cross_entropy", t.total_tokens),), 1):
        begin = found[-1].end if found else 0
        values = dataclasses.asdict(stage)
        for name, value in values.items():
            if value is None and hasattr(t, name):
                values[name] = getattr(t, name)
        values["train"] = stage.train or ("attention" if stage.loss == "align" else "all")
        values["teacher_weight"] = 0.5 if stage.teacher_weight is None else stage.teacher_weight
        values["temperature"] = 1.0 if stage.temperature is None else stage.temperature
        end = begin + math.ceil(stage.tokens / t.batch_tokens)
        found.append(StagePlan(number=number, begin=begin, end=end, **values))
    return found


def total_steps(recipe: Recipe) -> int:
    """Optimizer steps of the whole run."""
    return stage_plans(recipe)[-1].end


def accumulation(recipe: Recipe, world_size: int) -> int:
    """Passes an optimizer step takes on `world_size` processes.

    Raises ValueError, with the arithmetic and values that work, where train.batch_tokens is not a whole
    number of passes.
    """
    batch, one_pass = recipe.train.batch_tokens, pass_tokens(recipe, world_size)
    if batch % one_pass == 0:
        return batch // one_pass
    label = f"{world_size} process{'es' if world_size > 1 else ''}"
    arithmetic = (
        f"{label} x train.micro_batch_sequences {recipe.train.micro_batch_sequences} "
        f"x data.context_tokens {recipe.data.context_tokens}"
    )
    raise ValueError(
        f"the batch does not divide over {label}.\n"
        f"  train.batch_tokens  {batch:>10}\n"
        f"  one pass            {one_pass:>10} = {arithmetic}\n"
        f"Set train.batch_tokens to {_batches_that_work(recipe, world_size)}."
    )


def _batches_that_work(recipe: Recipe, world_size: int) -> str:
    batch, one_pass = recipe.train.batch_tokens, pass_tokens(recipe, world_size)
    passes = [n for n in (batch // one_pass, batch // one_pass + 1) if n]
    values = " or ".join(f"{n * one_pass} ({n} pass{'es' if n > 1 else ''})" for n in passes)
    rows = batch // (world_size * recipe.data.context_tokens)
    if rows and batch % (world_size * recipe.data.context_tokens) == 0:
        micro = max(n for n in range(1, recipe.train.micro_batch_sequences + 1) if rows % n == 0)
        return f"{values}, or train.micro_batch_sequences to {micro} ({rows // micro} passes)"
    fewer = [n for n in range(world_size - 1, 0, -1) if batch % pass_tokens(recipe, n) == 0]
    return f"{values}, or use {fewer[0]} process{'es' if fewer[0] > 1 else ''}" if fewer else values


# ---- reading


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe: a YAML file, or the name of one that comes with the package.

    overrides: "key=value" texts, such as "train.peak_lr=1.0e-4" or "data.sources.0.text=corpus/"; values are
    read as YAML.

    Raises ValueError naming the file, the key and what to write.
    """
    path = _find(str(name_or_path))
    tree = _read_yaml(path)
    where = str(name_or_path)
    for override in overrides:
        _override(tree, override)
        where += f" with --set {override}" if where == str(name_or_path) else f" --set {override}"
    try:
        return parse_recipe(tree)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def parse_recipe(tree: Mapping[str, Any]) -> Recipe:
    """A recipe from plain YAML types, checked key by key. Raises ValueError."""
    return _build(Recipe, tree, "")


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or "/" in name:
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"recipe {name} {kind}. We ship: {', '.join(recipe_names())}")
    if name not in recipe_names():
        raise ValueError(f"recipe: {_no_such(name, recipe_names(), 'a recipe that we ship, nor a file')}")
    return FOLDER / f"{name}.yaml"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML keeps the last one silently)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                kind = "a list" if isinstance(key_node, yaml.SequenceNode) else "a list of keys"
                raise yaml.MarkedYAMLError(
                    problem=f"{kind} stands where a key must; a key is a word, such as source",
                    problem_mark=key_node.start_mark,
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        raise ValueError(f"{path}{f', line {mark.line + 1}' if mark else ''}: {problem}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}), so it is no recipe") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: a recipe is a list of `key: value` lines; this file holds {_kind(tree)}")
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"--set {override}: write KEY=VALUE, such as --set train.peak_lr=3.0e-5")
    try:
        value = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        if text.lstrip()[:1] in tuple("*&!%@`"):  # signs of YAML's own, such as the * of a pattern
            problem = (
                f"text that begins with {text.lstrip()[0]} must be in quotes, inside those of the shell: "
            )
            problem += f"""--set '{key.strip()}="{text.strip()}"'"""
        raise ValueError(f"--set {override}: {problem}") from None
    place: Any = tree
    for depth, part in enumerate(parts[:-1]):
        if isinstance(place, list):
            place = place[_index(place, part, ".".join(parts[:depth]), override)]
        else:
            place = place.setdefault(part, _default(parts[: depth + 1]))
        if not isinstance(place, dict | list):
            raise ValueError(
                f"--set {override}: {'.'.join(parts[: depth + 1])} is {_kind(place)}, without keys"
            )
    if isinstance(place, list):
        place[_index(place, parts[-1], ".".join(parts[:-1]), override)] = value
    else:
        place[parts[-1]] = value


def _default(parts: list[str]) -> Any:
    """What an absent key holds before it is overridden: data.sources has a list, the rest are mappings."""
    return _plain(Data().sources) if parts == ["data", "sources"] else {}


def _index(place: list, part: str, key: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(place):
        raise ValueError(f"--set {override}: {key} has items 0 to {len(place) - 1}, not {part}")
    return int(part)


def _build(cls: type, tree: Any, where: str) -> Any:
    """An instance of dataclass `cls` from a mapping; `where` is the key that holds it ("" at the top)."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{where} is {_kind(tree)}; it must hold keys: {', '.join(_fields(cls))}")
    prefix = f"{where}." if where else ""
    if cls is MixerChoice:
        return _build_mixer(tree, prefix)
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in _fields(cls):
            raise ValueError(_no_such(str(key), _fields(cls), "a key", prefix))
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in tree:
            raise ValueError(f"{prefix}{field.name} is missing")
    values = {key: _value(hints[key], value, f"{prefix}{key}") for key, value in tree.items()}
    if cls is Recipe and values.get("stages") and "total_tokens" not in (tree.get("train") or {}):
        total = sum(stage.tokens for stage in values["stages"])
        values["train"] = dataclasses.replace(values.get("train", Train()), total_tokens=max(1, total))
    return cls(**values)


def _build_mixer(tree: Mapping[str, Any], prefix: str) -> MixerChoice:
    # here, not at the top: the mixers need torch, and reading the schema or --help should not
    from unsoftmax.kernels.registry import MIXERS

    names = [*MIXERS, SOFTMAX]
    name = tree.get("name")
    if name is None:
        raise ValueError(f"{prefix}name is missing; it is one of: {', '.join(names)}")
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"{prefix}name: {_no_such(str(name), names, 'a mixer')}")
    rest = {key: value for key, value in tree.items() if key != "name"}
    if name == SOFTMAX:
        if rest:
            more = f"{prefix}{next(iter(rest))}"
            whole = f"{prefix[:-1]} to {{name: softmax}}" if prefix else "nothing beside the name"
            raise ValueError(f"{more}: softmax has no options; set {whole}")
        return MixerChoice(SOFTMAX)
    options = MIXERS[name].Options
    for key in rest:
        if key not in _fields(options):
            raise ValueError(_no_such(str(key), _fields(options), f"an option of {name}", prefix))
    hints = typing.get_type_hints(options)
    return MixerChoice(name, options(**{k: _value(hints[k], v, f"{prefix}{k}") for k, v in rest.items()}))


def _fields(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _value(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type that a field declares; ValueError says what to write instead."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [a for a in args if a is not type(None)]
        lists = [a for a in kinds if typing.get_origin(a) in (tuple, list)]
        return _value((lists if isinstance(value, list | tuple) and lists else kinds)[0], value, key)
    if origin is Literal:
        if value not in args or type(value) not in {type(a) for a in args}:
            raise ValueError(f"{key}: {_no_such(str(value), [str(a) for a in args], 'a choice')}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{key} is {_kind(value)}; it must be a list, such as [{_example(args[0])}]")
        return origin(_value(args[0], item, f"{key}.{n}") for n, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, key)
    return _scalar(hint, value, key)


def _scalar(hint: type, value: Any, key: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is bool and not isinstance(value, bool):
        raise ValueError(f"{key} is {_kind(value)}; it must be true or false")
    if hint is str and not isinstance(value, str):
        raise ValueError(f"{key} is {_kind(value)} to YAML; it must be text: write it in quotes")
    if hint is float and not number:
        raise ValueError(f"{key} is {_kind(value)}; it must be a number{_as_number(value, float)}")
    if hint is int and (not number or isinstance(value, float)):
        raise ValueError(f"{key} is {_kind(value)}; it must be a whole number{_as_number(value, int)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} is {value}; it must be a finite number")
    return hint(value)


def _as_number(value: Any, hint: type) -> str:
    """Advice for a number that YAML did not read as one: 3e-5 and 20e9 are text to it."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return ""
    if isinstance(value, bool) or not math.isfinite(number):
        return ""
    if hint is int:
        return f": write {int(number)}" if number == int(number) else f", such as {round(number)}"
    mantissa, e, exponent = str(value).lower().partition("e")
    return f": write {mantissa if '.' in mantissa else mantissa + '.0'}{e}{_signed(exponent)}"


def _signed(exponent: str) -> str:
    """YAML 1.1 wants a sign in the exponent: 3.0e+5, not 3.0e5."""
    return exponent if exponent[:1] in ("", "-", "+") else f"+{exponent}"


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, list | tuple):
        return "a list"
    return "a list of keys" if isinstance(value, Mapping) else f"{value}"


def _example(hint: Any) -> str:
    if hint is Stage:
        return "{loss: distil, tokens: 4096000}"
    return "0, 8" if hint is int else "..." if not dataclasses.is_dataclass(hint) else "{text: python-docs}"


def _no_such(name: str, known: Sequence[str], what: str, prefix: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {prefix}{near[0]}?" if near else ""
    return f"{prefix}{name} is not {what}.{hint} There are: {', '.join(known)}"
