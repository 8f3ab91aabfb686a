"""Generation from states of a fixed size: the prompt in pieces, then one token after another.

Every mixer's state has one size at any length, so that a step is the same work each time: on a GPU it is
captured once as a CUDA graph, sampling included, and replayed. Layers that keep softmax have caches that
grow; a model with such layers goes step by step without a graph.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from unsoftmax.convert.cache import StateCache, StateLayer, map_state
from unsoftmax.convert.load import CONVERTED_TYPES, load, named_device, named_dtype, read_config
from unsoftmax.convert.load import tokenizer as load_tokenizer
from unsoftmax.convert.model import ConvertedForCausalLM
from unsoftmax.kernels.mixer import Owned

PIECE = 8192  # tokens of a prompt at once
LOOK_EVERY = 16  # steps between two looks at whether every row has ended, where nobody reads along
FUSE_FROM = 1_000
MOVING_ROPES = ("dynamic", "longrope")  # their frequencies follow the length, which the host has to know


class Generated(NamedTuple):
    """tokens [B, n] int64, padded after a row's end; lengths [B] int64, its end included; and the cache after
    all of them, prompt included, to go on from."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    cache: StateCache


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    cache: StateCache | None = None,
    streamer: BaseStreamer | None = None,
    piece: int = PIECE,
    graph: bool | None = None,
    fuse: bool | None = None,
) -> Generated:
    """Tokens that follow a prompt, at one cost a token however long it is.

    Args:
        model: a converted model, in eval mode.
        input_ids: [B, T] int64, T at least 1. With `cache`, what follows the tokens in it.
        attention_mask: [B, T], 0 at padding, which may be anywhere; None: all tokens are real. Each row needs
            a real token.
        max_new_tokens: at least 1; rows may end before.
        temperature: 0 takes the likeliest token; else tokens are drawn, after top_k and top_p.
        seed: of the draws.
        end: tokens that end a row; None: what the model's generation_config says; (): none.
        stop: texts that end a row as soon as they stand at its end; they need `tokenizer`.
        cache: of an earlier call, B rows; None starts anew. Not changed.
        streamer: gets each step's tokens [B] as they come, not the prompt.
        piece: tokens of the prompt at once.
        graph: replay steps as a CUDA graph; None: wherever it can be done.
        fuse: compile the graph's small operations into few, which takes seconds once and then saves about a
            tenth of a small step; None: for FUSE_FROM tokens or more. Rounds differently.

    Raises:
        ValueError: values out of range, a model that is not converted, or graph=True where there can be none.
    """
    rule = _rule(temperature, top_k, top_p)
    _check_values(max_new_tokens, seed, stop, piece)
    why_no_graph = _check(model, input_ids, stop, tokenizer)
    if graph and why_no_graph:
        raise ValueError(f"graph=True: {why_no_graph}; leave graph out")
    ids, mask = _padding_first(input_ids.to(model.device), attention_mask)
    if cache is None:
        cache = StateCache(model.config)
    else:
        _fits(cache, ids)
        cache = copy.deepcopy(cache)
    generator = None
    if temperature > 0:
        generator = torch.Generator(ids.device).manual_seed(seed)
    ends = _ends(model, end).to(ids.device)
    pad = model.generation_config.pad_token_id
    pad = pad if isinstance(pad, int) else int(ends[0]) if len(ends) else 0
    stops = StopStringCriteria(tokenizer, list(stop)) if stop and tokenizer is not None else None

    logits = _read(model, ids, mask, cache, piece)
    token = _choose(logits, rule, generator)
    real = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    graphs = graph is not False and not why_no_graph
    fuses = max_new_tokens >= FUSE_FROM if fuse is None else fuse
    steps = _Steps(model, cache, token, real, rule, generator, ends, pad)
    steps.allow(graphs, fuses, some_end_early=len(ids) > 1 and (len(ends) > 0 or stops is not None))
    tokens, kept = [], []
    looks = streamer is not None or stops is not None or (len(ids) == 1 and len(ends) > 0)
    for n in range(max_new_tokens):
        tokens.append(steps.token.clone())
        kept.append(steps.real.clone())
        if streamer is not None:
            streamer.put(tokens[-1].cpu())
        if stops is not None:
            stopped = stops(torch.stack(tokens, 1), None)  # type: ignore[arg-type]
            steps.ended |= stopped.to(ids.device)
        steps.advance()
        if (looks or n % LOOK_EVERY == LOOK_EVERY - 1) and not steps.real.any():
            break
    if streamer is not None:
        streamer.end()
    lengths = torch.stack(kept, 1).sum(1)
    return Generated(torch.stack(tokens, 1)[:, : int(lengths.max())], lengths, steps.cache)


class _Steps:
    """The loop's state: `token` [B] that comes next and whether it is `real`; both change in place.

    A step mixes `token` into the cache of the rows where it is real, chooses the next one, and ends rows
    whose token was an end, or that the caller marked as `ended`.
    """

    def __init__(self, model, cache, token, real, rule, generator, ends, pad) -> None:
        self.model, self.cache, self.rule, self.generator = model, cache, rule, generator
        self.ends, self.pad, self.token, self.real = ends, pad, token, real
        self.ended = torch.zeros_like(real)
        self.may_graph, self.fuses, self.some_end_early, self.graph = False, False, True, None
        self.owns: list[bool] = []  # layers whose state a graph changes in place

    def allow(self, graph: bool, fuse: bool, some_end_early: bool) -> None:
        """Whether steps may be a graph, fused, and whether rows may end before the loop does."""
        self.may_graph, self.fuses, self.some_end_early = graph, fuse, some_end_early

    def advance(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            for layer in self.cache.layers:
                layer.tokens += 1
            return
        before = self._shapes()
        self._step()
        if self.may_graph and self._shapes() == before:
            self._capture()

    def _step(self) -> None:
        """One step as it is written, for any cache."""
        out = self.model(self.token[:, None], self.real[:, None], cache=self.cache, use_cache=True)
        self._next(out.logits[:, -1])

    def _next(self, logits: torch.Tensor) -> None:
        over = self.ended | torch.isin(self.token, self.ends)
        self.real.logical_and_(~over)
        self.token.copy_(torch.where(self.real, _choose(logits, self.rule, self.generator), self.pad))

    def _capture(self) -> None:
        """The same step on tensors that stay where they are."""
        cache, real = self.cache, self.real
        if cache.seen is None:  # positions have to be counted on the device
            cache.seen = torch.full((len(real),), cache.get_seq_length(), device=real.device)
        self.owns = []
        for layer, block in zip(cache.layers, self.model.model.layers):
            owned = block.self_attn.own(layer.state)
            self.owns.append(owned is not None)
            layer.state = map_state(layer.state, torch.clone) if owned is None else owned
        cache.seen = cache.seen.clone()
        before = [(layer.state, layer.tokens) for layer in cache.layers], cache.seen
        held = [*tensors_of(cache), cache.seen]
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        with _fused(self.model) if self.fuses else contextlib.nullcontext():
            if self.fuses or any(self.owns):  # what is compiled runs once outside of the graph
                self._mix(torch.zeros_like(real))
                _put_back(cache, *before)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                logits = self._mix(real)
                new = [*tensors_of(cache), cache.seen]
                copied = [(old, x) for old, x in zip(held, new) if old is not x]
                if self.some_end_early:
                    for old, x in copied:
                        torch.where(real.view(-1, *(1 for _ in x.shape[1:])), x, old, out=old)
                else:
                    torch._foreach_copy_([old for old, _ in copied], [x for _, x in copied])
                self._next(logits)
        _put_back(cache, *before)
        self.graph = graph

    def _mix(self, real: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after the token, every row's taken as real but where a state is changed in place."""
        for layer, owned in zip(self.cache.layers, self.owns):
            if owned:
                layer.state = Owned(layer.state, real)
        out = self.model(self.token[:, None], cache=self.cache, use_cache=True)
        return out.logits[:, -1]

    def _shapes(self) -> list:
        return [(x.shape, x.dtype) for x in tensors_of(self.cache)]


def _put_back(cache: StateCache, layers: list, seen: torch.Tensor) -> None:
    for layer, (state, tokens) in zip(cache.layers, layers):
        layer.state, layer.tokens = state, tokens
    cache.seen = seen


@contextlib.contextmanager
def _fused(model) -> Iterator[None]:
    """Inside, norms, projections with their rotation and MLPs are compiled; then the model is as it was."""
    layers = model.model.layers
    plain = [model.model.norm]
    for layer in layers:
        plain += [layer.input_layernorm, layer.post_attention_layernorm, layer.mlp]
    plain = [part for part in plain if part._compiled_call_impl is None]  # else its owner has compiled it
    for part in plain:
        part.compile(dynamic=False)
    for layer in layers:
        layer.self_attn.project = torch.compile(layer.self_attn.project, dynamic=False)
    try:
        yield
    finally:
        for part in plain:
            part._compiled_call_impl = None
        for layer in layers:
            del layer.self_attn.project


def tensors_of(cache: StateCache) -> list[torch.Tensor]:
    """Every tensor in the cache's layers: what the tokens so far take of memory."""
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            map_state(layer.state, lambda x, found=found: found.append(x) or x)
        elif layer.keys is not None:
            found += [layer.keys, layer.values]
    return found


def _read(model, ids, mask, cache: StateCache, piece: int) -> torch.Tensor:
    """Logits [B, V] after the prompt, which goes into the cache."""
    for part in range(0, ids.shape[1], piece):
        here = slice(part, part + piece)
        seen = None if mask is None else mask[:, here]
        out = model(ids[:, here], seen, cache=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1]


def _choose(logits: torch.Tensor, rule: LogitsProcessorList | None, generator) -> torch.Tensor:
    """A token a row [B] int64, of logits [B, V]."""
    logits = logits.float()
    if rule is None:
        return logits.argmax(-1)
    return torch.multinomial(rule(None, logits).softmax(-1), 1, generator=generator).squeeze(1)  # type: ignore[arg-type]


def _rule(temperature: float, top_k: int | None, top_p: float | None) -> LogitsProcessorList | None:
    """What is done to logits before a token is drawn; None takes the likeliest."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be 0 or more, such as 0.7")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, such as 50")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1, such as 0.95")
    if temperature == 0:
        if top_k is not None or top_p is not None:
            raise ValueError("top_k and top_p choose among drawn tokens; give a temperature too, such as 0.7")
        return None
    rule = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k is not None:
        rule.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        rule.append(TopPLogitsWarper(top_p))
    return rule


def _check_values(max_new_tokens: int, seed: int, stop: Sequence[str], piece: int = PIECE) -> None:
    for name, value in (("max_new_tokens", max_new_tokens), ("piece", piece)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1, such as 128")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be from 0 to 2^63 - 1, such as 0")
    if isinstance(stop, str) or not all(stop):
        raise ValueError(f"stop is {stop!r}; it must be texts of at least one character, such as ['END']")


def _check(model, input_ids, stop, tokenizer) -> str:
    """Raise what the caller has to mend; returns why there can be no graph, or nothing."""
    if not isinstance(model, ConvertedForCausalLM):
        raise ValueError(f"{type(model).__name__} is not a converted model; its own generate() works")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(
            f"input_ids is {list(input_ids.shape)}; it must be [rows, tokens], of at least one each"
        )
    if stop and tokenizer is None:
        raise ValueError("stop is a list of texts; give the tokenizer too")
    if model.device.type != "cuda":
        return f"the model is on {model.device}, not on a GPU"
    if model.config.softmax_layers:
        return f"layers {model.config.softmax_layers} keep softmax, whose cache grows"
    rope = model.model.rotary_emb.rope_type
    return f"rope type {rope!r} changes with the length" if rope in MOVING_ROPES else ""


def _padding_first(ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows with their padding moved to the left, where it leaves each last token last."""
    if mask is None:
        return ids, None
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask is {list(mask.shape)}; it must be {list(ids.shape)}, as input_ids")
    mask = mask.to(ids.device, torch.bool)
    empty = (~mask.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"row {empty[0]} of attention_mask is all padding; give each row a real token")
    order = mask.byte().argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


def _ends(model, end: Sequence[int] | None) -> torch.Tensor:
    if end is None:
        known = model.generation_config.eos_token_id
        end = [] if known is None else [known] if isinstance(known, int) else known
    return torch.tensor(list(end), dtype=torch.int64)


def _fits(cache: StateCache, ids: torch.Tensor) -> None:
    """Whether a given cache has as many rows."""
    if not isinstance(cache, StateCache):
        raise ValueError(f"the cache is a {type(cache).__name__}; it must be a StateCache")
    held = tensors_of(cache)
    if held and len(held[0]) != len(ids):
        raise ValueError(f"the cache has {len(held[0])} rows and input_ids {len(ids)}; they must be the same")


def generate_text(
    checkpoint: str | os.PathLike,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    say: Callable[[str], None] = print,
) -> str:
    """Load a converted checkpoint, print what follows a prompt as it comes, and return it.

    chat: put the prompt into the tokenizer's chat template, as the user's turn. say: gets one line of figures
    at the end. The rest: see generate, and convert.load.load.
    """
    device = named_device(device)
    _check_flags(temperature, top_k, top_p, max_new_tokens, seed, stop)
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ValueError("--prompt is not text in UTF-8; write it in UTF-8")
    if not os.path.isdir(checkpoint):
        say(f"{checkpoint}: no folder of that name; asking the hub")
    if read_config(checkpoint).model_type not in CONVERTED_TYPES:
        raise ValueError(
            f"{checkpoint} is not converted; to do so: convert-checkpoint {checkpoint} OUT --recipe RECIPE"
        )
    words = load_tokenizer(checkpoint)
    if chat and words.chat_template is None:
        raise ValueError(f"--chat: the tokenizer of {checkpoint} has no chat template; leave --chat out")
    text = prompt
    if chat:
        turn = [{"role": "user", "content": prompt}]
        text = str(words.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    ids = words(text, return_tensors="pt", add_special_tokens=not chat).input_ids
    if not ids.numel():
        raise ValueError(f"--prompt {prompt!r} has no tokens; give a text")
    model = load(checkpoint, dtype=named_dtype(dtype, device), device=device)
    stamps: list[float] = []
    started = time.monotonic()
    found = generate(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        tokenizer=words,
        streamer=_Timed(words, stamps),
    )
    n, held = len(stamps), sum(x.numel() * x.element_size() for x in tensors_of(found.cache))
    each = (stamps[-1] - stamps[0]) / max(1, n - 1)
    say(
        f"{ids.shape[1]} tokens read, the first new one after {stamps[0] - started:.2f} s; {n} written, "
        f"{1e3 * each:.1f} ms each; memory of all of them: {held / 2**20:.1f} MiB"
    )
    return str(words.decode(found.tokens[0], skip_special_tokens=True))


def _check_flags(temperature, top_k, top_p, max_new_tokens: int, seed: int, stop: Sequence[str]) -> None:
    """Before anything is loaded; options by the names that are typed."""
    try:
        _rule(temperature, top_k, top_p)
        _check_values(max_new_tokens, seed, stop)
    except ValueError as error:
        names = r"\b(temperature|top_k|top_p|max_new_tokens|seed|stop)\b"
        said = re.sub(names, lambda m: "--" + m[0].replace("_", "-"), str(error))
        raise ValueError(said) from None


class _Timed(TextStreamer):
    """Prints text, and notes when each token came."""

    def __init__(self, words: PreTrainedTokenizerBase, stamps: list[float]) -> None:
        super().__init__(words, skip_special_tokens=True)  # type: ignore[arg-type]
        self.stamps = stamps

    def put(self, value: torch.Tensor) -> None:
        self.stamps.append(time.monotonic())
        super().put(value)
