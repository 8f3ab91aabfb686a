"""What a stage minimises; float32 logits exist for a few tokens at a time.

    cross_entropy   CE = - sum_t log p(label_t)
    distil          (1 - w) CE + w tau^2 sum_t KL(q_t || p_t) over the labelled positions, p and q the softmax
                    of the student's and the teacher's logits / tau (Hinton et al. 2015, arXiv:1503.02531)
    align           sum over converted layers of |y - t|^2 / |t|^2, y and t what the attention of student and
                    teacher makes of the teacher's input to that layer

The logits of a row in float32 would be the largest tensor of a step (32,768 tokens x 32,000 words: 4 GB,
and as much again for their gradient). Here the head and the loss run over chunks of tokens, each recomputed
in the backward pass. The loss is a sum over tokens, not a mean: the caller divides by the labels
of the whole global batch, so that 1 pass x 4 rows and 4 passes x 1 row are the same loss even where documents
leave few labels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from unsoftmax.kernels.mixer import Mixer
from unsoftmax.recipes.schema import StagePlan
from unsoftmax.train.packing import IGNORE

CHUNK_BYTES = 256 << 20  # of float32 logits at a time, of both models together


def _in_chunks(part: Callable[..., torch.Tensor], chunk: int, *tensors: torch.Tensor) -> torch.Tensor:
    """Sum of part(...) over chunks of dimension 0, each recomputed in the backward pass."""
    if len(tensors[0]) <= chunk:
        return part(*tensors)
    sums = [
        checkpoint(part, *pieces, use_reentrant=False, preserve_rng_state=False)
        for pieces in zip(*(t.split(chunk) for t in tensors), strict=True)
    ]
    return torch.stack(sums).sum()  # type: ignore[arg-type]


def summed_cross_entropy(
    head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Sum of the cross-entropies of `labels` under head(hidden), float32 scalar.

    Args:
        head: hidden [n, width] -> logits [n, vocabulary].
        hidden: [N, width]. labels: [N] int64; -100 counts nothing.
        chunk: tokens at a time.
    """

    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(h).float(), y, ignore_index=IGNORE, reduction="sum")

    return _in_chunks(part, chunk, hidden, labels)


def summed_distillation(
    head: nn.Module,
    hidden: torch.Tensor,
    teacher_head: nn.Module,
    teacher_hidden: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
    *,
    weight: float,
    temperature: float,
) -> torch.Tensor:
    """(1 - weight) CE + weight temperature^2 KL(teacher || student), summed over labels, float32 scalar.

    Args:
        head, teacher_head: [n, that model's width] -> logits [n, vocabulary]; no gradient for the teacher's.
        hidden, teacher_hidden: [N, width of each]. labels: [N] int64; where -100, neither part counts.
        chunk: tokens at a time.
        weight: 1 is the KL alone. temperature: divides the logits in the KL.
    """

    def part(h: torch.Tensor, taught: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = _log_softmax(teacher_head(taught).float(), temperature)
        logits = head(h).float()
        log_p = F.log_softmax(logits, dim=-1)
        tempered = log_p if temperature == 1 else _log_softmax(logits, temperature)
        kl = F.kl_div(tempered, target, reduction="none", log_target=True).sum(-1)
        kl = kl.masked_fill(y == IGNORE, 0.0).sum()
        ce = F.nll_loss(log_p, y, ignore_index=IGNORE, reduction="sum")
        return (1 - weight) * ce + weight * temperature**2 * kl

    return _in_chunks(part, chunk, hidden, teacher_hidden, labels)


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return F.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)


def _hidden(model: PreTrainedModel, input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Last hidden states, [B T, width]."""
    inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = cu_seqlens
    return model.get_decoder()(**inputs)[0].flatten(0, 1)


def _head(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()


class NextToken(nn.Module):
    """A causal language model together with its loss, as one module that an engine can wrap.

    model: a transformers causal LM; with documents apart, one whose inner model takes `cu_seqlens`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Summed cross-entropy of labels [B, T] (already shifted: labels[t] follows input_ids[t])."""
        hidden = _hidden(self.model, input_ids, cu_seqlens)
        chunk = max(1, CHUNK_BYTES // (4 * self.model.config.vocab_size))
        return summed_cross_entropy(_head(self.model), hidden, labels.flatten(), chunk)


class Distil(NextToken):
    """As NextToken, with part of the loss from a teacher that reads the same tokens, without gradient.

    The teacher is no submodule: no engine shards, trains or saves it.
    """

    def __init__(
        self, model: PreTrainedModel, teacher: PreTrainedModel, *, weight: float, temperature: float
    ) -> None:
        super().__init__(model)
        self._teacher = (teacher,)  # a tuple, which nn.Module does not look into
        self.weight, self.temperature = weight, temperature

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Summed loss of labels [B, T], as NextToken's."""
        [teacher] = self._teacher
        with torch.no_grad():
            taught = _hidden(teacher, input_ids, cu_seqlens)
        hidden = _hidden(self.model, input_ids, cu_seqlens)
        return summed_distillation(
            _head(self.model),
            hidden,
            _head(teacher),
            taught,
            labels.flatten(),
            max(1, CHUNK_BYTES // (8 * self.model.config.vocab_size)),
            weight=self.weight,
            temperature=self.temperature,
        )


class Align(NextToken):
    """Each converted layer alone: the teacher's input to that layer's attention in, the teacher's output out.

    teacher: a model of convert/model.py; no submodule, as in Distil. recompute: each layer's activations are
    made again in the backward pass.
    """

    def __init__(self, model: PreTrainedModel, teacher: PreTrainedModel, *, recompute: bool) -> None:
        super().__init__(model)
        self._teacher, self.recompute = (teacher,), recompute

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum over layers of |y - t|^2 / |t|^2 over the pass's tokens, times its labels [B, T].

        So the engine, which divides by the labels of the batch, has the mean over its passes.
        """
        [teacher] = self._teacher
        layers: Any = self.model.get_decoder().layers
        errors = []
        calls = teacher.get_decoder().attention_calls(input_ids, cu_seqlens)  # type: ignore[operator]
        for layer in layers:
            with torch.no_grad():
                x, target, given = next(calls)
            if isinstance(layer.self_attn, Mixer):
                error = partial(_attention_error, layer, given)
                run = partial(checkpoint, error, use_reentrant=False) if self.recompute else error
                errors.append(run(x, target))
        total: torch.Tensor = torch.stack(errors).sum()
        return total * (labels != IGNORE).sum()


def _attention_error(
    layer: Any, given: dict[str, Any], x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Relative mean squared error of a layer's attention on x against target, float32 scalar."""
    wanted = target.float()
    difference = layer.mix(x, **given).float() - wanted
    return difference.square().sum() / wanted.square().sum().clamp_min(torch.finfo(torch.float32).tiny)


def objective(
    model: PreTrainedModel, stage: StagePlan, teacher: PreTrainedModel | None, *, recompute: bool
) -> NextToken:
    """The module that a stage's engine wraps; recompute: activations, in a loss that runs layers itself."""
    if stage.loss == "cross_entropy":
        return NextToken(model)
    assert teacher is not None, stage.loss
    if stage.loss == "align":
        return Align(model, teacher, recompute=recompute)
    return Distil(model, teacher, weight=stage.teacher_weight, temperature=stage.temperature)
