"""The nursery of grammar processes, started by an engine:
`python -m quire.engine.assembly.grammar_process FD SETTINGS`.

It is told which model's vocabulary to read; every packet is a grammar to compile.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from quire.child import child_environment, module_command
from quire.structured.cell import nursery
from quire.structured.packets import CellLimits
from quire.structured.vocabulary import Vocabulary, import_xgrammar, read_vocabulary


def start_nursery(settings: Mapping[str, Any], theirs: socket.socket, hurry: bool = True) -> None:
    """In a process of its own, with the other end of the engine's link. Unless it is to hurry, it gets ready after all
    other work."""
    subprocess.Popen(
        module_command("quire.engine.assembly.grammar_process", str(theirs.fileno()),
                       json.dumps({**settings, "hurry": hurry})),
        stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
        # One thread: a process with several cannot be forked safely.
        env=child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1"))


def main(argv: list[str]) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # it ends with the engine, whose socket it holds
    with contextlib.suppress(OSError):  # short of memory, rather a grammar than the engine
        Path("/proc/self/oom_score_adj").write_text("600")
    settings = json.loads(argv[1])

    def read() -> Vocabulary:
        from quire.config import EngineConfig
        from quire.engine.assembly.source import open_source

        import_xgrammar()
        source = open_source(EngineConfig.create(**settings["options"]), progress=False)
        return read_vocabulary(source.tokenizer(), settings["vocab_size"], settings["eos_token_ids"])

    nursery(socket.socket(fileno=int(argv[0])), read, CellLimits(**settings["limits"]),
            settings["hurry"])


if __name__ == "__main__":
    main(sys.argv[1:])
