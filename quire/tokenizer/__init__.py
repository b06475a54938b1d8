"""Text to token ids and back, and messages to a prompt: tokenizers from any model file, chat templates."""

from quire.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
