"""EAGLE-3 heads as the speculators library writes them: the layer's fields lie in a config of their own."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.heads import eagle3
from quire.models.heads.format import HeadFormat
from quire.models.heads.spec import HeadSpec
from quire.models.spec import DecoderSpec


def read(c: ConfigReader, target: DecoderSpec) -> HeadSpec:
    c.allow("speculators_model_type", "eagle3")
    if c.get("norm_before_residual") is None:
        c.fail("norm_before_residual", "is missing")  # the library's versions have different defaults
    return eagle3.read(c.with_fields_of("transformer_layer_config"), target)


FORMAT = HeadFormat(("Eagle3Speculator", "Eagle3DraftModel"), read, eagle3.FORMAT.norms)
