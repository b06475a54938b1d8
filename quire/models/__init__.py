"""Model families as data: one decoder, a spec that describes it, and short files that fill the spec."""
