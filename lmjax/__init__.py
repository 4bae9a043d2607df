"""lmjax: train language models in JAX, from raw text to an evaluated model."""

__version__ = "0.1.0"
