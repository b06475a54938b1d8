"""A process from its start to its first token: what `quire bench cpu` and `quire bench gpu` time as the start. The
engine comes up as for a command."""

from __future__ import annotations

import json
import os
import sys

from quire.cli.engine import open_llm

AT_ONCE = "at once"


def main(model: str, options: str, prompt: str, leave: str) -> None:
    """`options` of the engine and the prompt are JSON. `leave`: "at once", or when all is let go of."""
    llm = open_llm({"model": model, **json.loads(options)}, quiet=True)
    from quire.sampling.params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=llm.tokenizer is not None)
    llm.generate([json.loads(prompt)], params, use_tqdm=False)
    print("first token", flush=True)
    if leave == AT_ONCE:
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
