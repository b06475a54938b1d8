"""Pictures for the docs, drawn without a plotting library."""
