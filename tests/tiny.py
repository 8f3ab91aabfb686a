"""Tiny random source checkpoints, made in code: a Llama or a Mistral of 30,000 weights, a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 264
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)}
GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough for attention to matter to the logits
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def tiny_model(family: str = "llama", *, seed: int = 0, **geometry: Any) -> Any:
    """A random float32 model of the library's own class, in eval mode; geometry: its config's fields."""
    config_class, model_class = FAMILIES[family]
    defaults = GEOMETRY | ({"sliding_window": None} if family == "mistral" else {})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**defaults | geometry))
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, then <bos> <eos> <pad>."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=128
    )


def tiny_source(
    folder: str | Path,
    family: str = "llama",
    *,
    shards: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **geometry: Any,
) -> Path:
    """Write a source checkpoint and its tokenizer as a Hugging Face folder, in one file or in shards."""
    model = tiny_model(family, seed=seed, **geometry).to(dtype)
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
