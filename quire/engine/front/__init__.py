"""The caller's side of an engine in another process: starts it, watches it, queues requests, deals out outputs."""
