"""Text to tokens and back, and conversations to prompts. Knows no model weights and no HTTP.

``load_tokenizer`` reads the tokenizer of a GGUF file or of a Hugging Face model directory.
"""

from backends.prefill_only.text.definition import TokenizerUnsupported
from backends.prefill_only.text.model_tokenizer import load_tokenizer

__all__ = ["TokenizerUnsupported", "load_tokenizer"]
