"""One short file per model family: read the config, fill the spec, spell the weight names."""
