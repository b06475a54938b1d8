"""Output that must have a shape: JSON of a schema, a regular expression, one of some texts, a grammar."""
