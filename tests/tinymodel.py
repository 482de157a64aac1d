"""The random model of `kvrelay chaos`, which tests share."""

from kvrelay.services.chaos.tinymodel import CHAT_TEMPLATE, SPECIAL, VOCAB, write_tiny_model

__all__ = ["CHAT_TEMPLATE", "SPECIAL", "VOCAB", "write_tiny_model"]
