"""A process from its start to its first token: what `quire bench cpu` and `quire bench gpu` time as the start."""

from __future__ import annotations

import json
import os
import sys

from quire.llm import LLM
from quire.sampling.params import SamplingParams

AT_ONCE = "at once"


def main(model: str, options: str, prompt: str, leave: str) -> None:
    """`options` of the engine and the prompt are JSON. `leave`: "at once", or when all is let go of."""
    llm = LLM(model, **json.loads(options))
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=llm.tokenizer is not None)
    llm.generate([json.loads(prompt)], params, use_tqdm=False)
    print("first token", flush=True)
    if leave == AT_ONCE:
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
