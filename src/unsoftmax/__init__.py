"""Turn a pretrained Llama or Mistral checkpoint into one whose attention costs linear time and constant memory."""

__version__ = "0.1.0"
