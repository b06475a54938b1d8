"""From sampled tokens to what callers see: text, stop strings, log-probabilities, request outputs."""
