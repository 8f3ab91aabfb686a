"""Next-token cross-entropy whose float32 logits exist for a few tokens at a time.

The logits of a row in float32 would be the largest tensor of a step (32,768 tokens x 32,000 words: 4 GB,
and as much again for their gradient). Here the head and the loss run over chunks of tokens, each recomputed
in the backward pass. The loss is a sum over tokens, not a mean: the caller divides by the labels
of the whole global batch, so that 1 pass x 4 rows and 4 passes x 1 row are the same loss even where documents
leave few labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from unsoftmax.train.packing import IGNORE

CHUNK_BYTES = 256 << 20  # of float32 logits at a time


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

    if len(labels) <= chunk:
        return part(hidden, labels)
    sums = [
        checkpoint(part, h, y, use_reentrant=False, preserve_rng_state=False)
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True)
    ]
    return torch.stack(sums).sum()  # type: ignore[arg-type]


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
        inputs = {"input_ids": input_ids, "use_cache": False}
        if cu_seqlens is not None:
            inputs["cu_seqlens"] = cu_seqlens
        hidden = self.model.get_decoder()(**inputs)[0]
        chunk = max(1, CHUNK_BYTES // (4 * self.model.config.vocab_size))
        head: Any = self.model.get_output_embeddings()
        return summed_cross_entropy(head, hidden.flatten(0, 1), labels.flatten(), chunk)
