"""What `quire bench` says when no benchmark is named; each benchmark is a module of its own."""

from __future__ import annotations

INTRO = (
    "Measures speed on this machine and prints one JSON line per case: the machine, the commit, the\n"
    "workload, the figures and, where there is one, the share of the physical limit."
)
EXAMPLES = (
    "examples:\n"
    "  quire bench cpu --cases A --no-rival     one stream of SmolLM2 on this CPU\n"
    "  quire bench scheduler                    how long the bookkeeping of a step takes\n"
    "  quire bench prefix-cache --trace FILE --capacity 2000 5000"
)
