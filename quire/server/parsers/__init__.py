"""From what a model writes to thoughts, content and tool calls: one short file for each format."""
