"""Ministral: Mistral whose layers alternate between a window and all keys."""

from __future__ import annotations

from quire.models.families import mistral
from quire.models.family import Family

FAMILY = Family("MinistralForCausalLM", mistral.read, mistral.NAMES)
