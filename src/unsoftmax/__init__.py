"""Turn a pretrained Llama or Mistral checkpoint into one whose attention is linear in time."""

__version__ = "0.1.0"
