"""The start of new parameters: the teacher runs over calibration text, one layer at a time.

Held at any time: one layer's weights in float32, and the hidden states of the calibration rows. So a
checkpoint of any size can be calibrated where one of its layers fits.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaModel, MistralModel, PreTrainedModel

from unsoftmax.convert.source import Source
from unsoftmax.convert.weights import EMBEDDING, New
from unsoftmax.kernels.mixer import SOURCE_PROJECTIONS, Mixer, Rotary

ROW_TOKENS = 2048  # long enough to see how attention falls with distance
PASS_TOKENS = 4096  # tokens of one pass through a layer

INNER_MODELS = {"llama": LlamaModel, "mistral": MistralModel}


class TeacherLayers:
    """The teacher's layers one after another over fixed rows of tokens.

    rows: called once, when the first layer is wanted; returns [R, T] int64.
    """

    def __init__(self, source: Source, rows: Callable[[], torch.Tensor], device: torch.device) -> None:
        self.source, self.device = source, device
        self._rows = rows
        self._hidden: list[torch.Tensor] | None = None
        self._next = 0  # the layer whose input self._hidden is
        self._inputs: list[tuple[torch.Tensor, Rotary]] = []

    def inputs(self, layer: int) -> list[tuple[torch.Tensor, Rotary]]:
        """Normed attention inputs (x [B, T, hidden] float32, rotary) of `layer`, batch by batch.

        Layers are asked for in rising order; asking for the same one again is free.
        """
        assert layer >= self._next - 1, f"layer {layer} has passed; the teacher is at {self._next}"
        if self._hidden is None:
            self._hidden = self._embed()
        while self._next <= layer:
            self._run_next()
        return self._inputs

    def hidden(self, layer: int) -> torch.Tensor:
        """The residual stream that enters `layer`, first batch, [B, T, hidden] float32."""
        if layer:
            self.inputs(layer - 1)
        elif self._hidden is None:
            self._hidden = self._embed()
        assert self._hidden is not None and self._next == layer
        return self._hidden[0]

    @torch.no_grad()
    def _embed(self) -> list[torch.Tensor]:
        rows = self._rows()
        table = self.source.read(EMBEDDING)  # mapped from disk: only the rows in use are read
        hidden = F.embedding(rows, table).float()
        return [h.to(self.device) for h in hidden.split(max(1, PASS_TOKENS // rows.shape[1]))]

    @torch.no_grad()
    def _run_next(self) -> None:
        model = one_layer(self.source, self._next).to(self.device)
        seen: dict[str, Any] = {}
        norm, rotary = (model.get_submodule(name) for name in ("layers.0.input_layernorm", "rotary_emb"))
        hooks = [
            norm.register_forward_hook(lambda m, a, out: seen.update(x=out)),
            rotary.register_forward_hook(lambda m, a, out: seen.update(rotary=out)),
        ]
        assert self._hidden is not None
        self._inputs, after = [], []
        for h in self._hidden:
            after.append(model(inputs_embeds=h, use_cache=False)[0])
            self._inputs.append((seen["x"], Rotary(*seen["rotary"])))
        for hook in hooks:
            hook.remove()
        self._hidden, self._next = after, self._next + 1


def one_layer(source: Source, layer: int) -> nn.Module:
    """The teacher cut down to one layer, float32: embeddings in, residual stream out (no final norm)."""
    config = copy.deepcopy(source.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer]]
    with torch.device("meta"):
        model = INNER_MODELS[source.family](config)
    model.embed_tokens, model.norm = nn.Identity(), nn.Identity()
    # Rotary frequencies are no weights, so no shard gives them: they are made anew, off the meta device.
    model.rotary_emb = type(model.rotary_emb)(config=config)
    prefix = f"model.layers.{layer}."
    weights = {n: source.read(prefix + n).float() for n in model.layers[0].state_dict()}
    model.layers[0].load_state_dict(weights, assign=True)
    return model.eval()


def start_layers(
    source: Source,
    model: PreTrainedModel,
    new: Mapping[str, New],
    rows: Callable[[], torch.Tensor],
    *,
    seed: int,
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, float]]]:
    """Give every new tensor its start: closed form where the mixer has one, else its documented start.

    Args:
        model: the converted model; only its mixers' shapes and options are read, so it may be on meta.
        new: what the mixers add, from the plan.
        rows: gives the calibration rows [R, T]; called only if a mixer wants them.

    Returns:
        target key to tensor, on the CPU, for every key of `new`; and layer to the numbers of its fit.
    """
    teacher = TeacherLayers(source, rows, device)
    tensors: dict[str, torch.Tensor] = {}
    report: dict[int, dict[str, float]] = {}
    begun = said = time.monotonic()
    wanted = sorted({item.layer for item in new.values()})
    for done, layer in enumerate(wanted):
        path, mixer = _mixer_of(model, layer)
        keys = {key: item for key, item in new.items() if item.layer == layer}
        fresh = _filled(source, path, mixer).to(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + layer)  # a layer's start does not depend on which others are converted
            fresh.reset_new_parameters()
            try:
                numbers = fresh.fit(_Lazy(teacher, layer))
            except torch.linalg.LinAlgError:
                _refuse_broken_weights(source, layer)
                raise
        if numbers:
            report[layer] = numbers
        state = fresh.state_dict()
        tensors |= {
            key: state[item.name].detach().to("cpu", item.dtype).clone() for key, item in keys.items()
        }
        _check(source, layer, {key: tensors[key] for key in keys})
        now = time.monotonic()
        if now - said > 5 or done + 1 == len(wanted):
            left = (now - begun) / (done + 1) * (len(wanted) - done - 1)
            say(f"  start    layer {layer:3d}   {done + 1}/{len(wanted)}   {left:4.0f} s left")
            said = now
    return tensors, report


class _Lazy:
    """A layer's calibration batches; the teacher only runs if they are asked for."""

    def __init__(self, teacher: TeacherLayers, layer: int) -> None:
        self.teacher, self.layer = teacher, layer

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Rotary]]:
        return iter(self.teacher.inputs(self.layer))


def _mixer_of(model: PreTrainedModel, layer: int) -> tuple[str, Mixer]:
    path = f"model.layers.{layer}.self_attn"
    mixer = model.get_submodule(path)
    assert isinstance(mixer, Mixer), path
    return path, mixer


def _filled(source: Source, path: str, mixer: Mixer) -> Mixer:
    """A copy of the mixer in memory, float32, that holds the source's projections."""
    fresh = type(mixer)(mixer.shape, mixer.options).float()
    names = [n for n in fresh.state_dict() if n.split(".")[0] in SOURCE_PROJECTIONS]
    weights = {n: source.read(f"{path}.{n}").float() for n in names}
    fresh.load_state_dict(weights, strict=False)
    return fresh


def _check(source: Source, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            _refuse_broken_weights(source, layer)
            raise ValueError(
                f"{key}: its start came out as NaN or inf; give other or more text, "
                "as --set calibration.text=... or --set calibration.tokens=30720"
            )


def _refuse_broken_weights(source: Source, layer: int) -> None:
    """Whatever the calibration text ran through up to `layer` may be what is not finite."""
    through = (EMBEDDING, *(f"model.layers.{i}." for i in range(layer + 1)))
    for key, entry in source.entries.items():
        if not key.startswith(through) or not entry.dtype.is_floating_point:
            continue
        if not all(piece.isfinite().all() for piece in source.pieces(key)):
            raise ValueError(
                f"{source.folder / entry.file}: {key} holds NaN or inf; "
                "a checkpoint must be finite to be converted"
            )
