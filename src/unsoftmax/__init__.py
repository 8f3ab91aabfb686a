"""Turn a pretrained Llama or Mistral checkpoint into one whose attention is linear in time, constant in memory."""

__version__ = "0.1.0"
