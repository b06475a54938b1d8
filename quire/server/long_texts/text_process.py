"""Tokenizes long texts in processes of their own: `python -m quire.server.long_texts.text_process FD SETTINGS`.

The tokenizer is read once; each job is done by a fork, which can be ended at any moment. A job comes on a socket of its
own, as msgpack, and its result goes back on that.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import msgspec

from quire.child import child_environment, module_command
from quire.errors import QuireError
from quire.tokenizer.tokenizer import Tokenizer

DONE: Final = b"+"
FAILED: Final = b"-"
_CPU_SECONDS = 60


def start_text_process(options: Mapping[str, Any], theirs: socket.socket) -> None:
    """One that reads the tokenizer of an engine with these options."""
    subprocess.Popen(
        module_command("quire.server.long_texts.text_process", str(theirs.fileno()), json.dumps(dict(options))),
        stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
        env=child_environment(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1"))


def main(argv: list[str]) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)  # it ends with the server, whose socket it holds
    control = socket.socket(fileno=int(argv[0]))
    tokenizer = _read_tokenizer(json.loads(argv[1]))
    gc.collect()
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 16, 1)
        if not data:
            os._exit(0)
        with socket.socket(fileno=fds[0]) as link:
            if os.fork() == 0:
                control.close()
                code = 1
                try:
                    _serve(link, tokenizer)
                    code = 0
                except (BrokenPipeError, ConnectionResetError):
                    code = 0  # the caller has gone
                finally:
                    os._exit(code)


def _read_tokenizer(options: dict[str, Any]) -> Tokenizer:
    from quire.config import EngineConfig
    from quire.models.loader.source import resolve_model

    model = EngineConfig.create(**options).model
    return resolve_model(model.model, tokenizer=model.tokenizer, load_format=model.load_format,
                         cache_dir=model.cache_dir, progress=False).tokenizer()


def _serve(link: socket.socket, tokenizer: Tokenizer) -> None:
    link.sendall(os.getpid().to_bytes(4, "little"))
    os.nice(5)  # the engine's steps go first
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    pieces = []
    while piece := link.recv(1 << 20):
        pieces.append(piece)
    if not pieces:
        return
    try:
        answer = DONE + do_text_job(tokenizer, msgspec.msgpack.decode(b"".join(pieces)))
    except QuireError as error:
        answer = FAILED + json.dumps([str(error), getattr(error, "field", None)]).encode()
    link.sendall(answer)


def do_text_job(tokenizer: Tokenizer, job: dict[str, Any]) -> bytes:
    """The result of one of three kinds of job, as bytes."""
    if job["do"] == "encode":
        return msgspec.msgpack.encode([array("I", tokenizer.encode(text, job["special"])).tobytes()
                                       for text in job["texts"]])
    if job["do"] == "tokenize":
        tokens = tokenizer.encode(job["text"], job["special"])
        body: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": job["max_model_len"]}
        if job["strings"]:
            body["token_strs"] = [tokenizer.token_text(token) for token in tokens]
        return msgspec.json.encode(body)
    return tokenizer.decode(array("I", job["tokens"]).tolist(), job["skip_special"]).encode()


if __name__ == "__main__":
    main(sys.argv[1:])
