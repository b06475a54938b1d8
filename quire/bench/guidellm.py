"""`quire bench serve` checked against guidellm: both load one server in turn, and their figures are set side by side.

    python -m quire.bench.guidellm --guidellm PATH --tokenizer FOLDER --url http://127.0.0.1:8000

guidellm wants an environment of its own, and a folder with the model's tokenizer.json. A server with `--executor dummy
--dummy-step-ms 20` keeps time alike for both; a real model's speed varies more from run to run than the tools differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PAIRS = {
    "request_throughput": ("requests_per_second", "mean", 1.0),
    "output_throughput": ("output_tokens_per_second", "mean", 1.0),
    "mean_ttft_ms": ("time_to_first_token_ms", "mean", 1.0),
    "median_ttft_ms": ("time_to_first_token_ms", "median", 1.0),
    "mean_tpot_ms": ("inter_token_latency_ms", "mean", 1.0),
    "mean_e2el_ms": ("request_latency", "mean", 1000.0),
}
"""Our figure: guidellm's, which of its statistics, and what one of its units is in ours."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", default="guidellm", metavar="PATH", help="its command")
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER", help="for guidellm's synthetic prompts")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    args = parser.parse_args(words)
    theirs, ours = _guidellm(args), _quire(args)
    for name, (metric, statistic, unit) in PAIRS.items():
        their = theirs[metric]["successful"][statistic] * unit
        print(json.dumps({"bench": "guidellm", "figure": name, "quire": round(ours[name], 3),
                          "guidellm": round(their, 3), "ratio": round(ours[name] / their, 3)}))
    return 0


def _quire(args: argparse.Namespace) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "bench", "serve", "--url", args.url, "--backend", "openai-chat",
         "--num-prompts", str(args.requests), "--max-concurrency", str(args.streams), "--json",
         "--random-input-len", str(args.prompt_tokens), "--random-output-len", str(args.output_tokens)],
        capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _guidellm(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        subprocess.run(
            [args.guidellm, "run", "--backend", f"kind=openai_http,target={args.url}",
             "--profile", f"kind=concurrent,streams={args.streams}",
             "--constraint", f"kind=max_requests,count={args.requests}",
             "--tokenizer", f"kind=hf_auto,model={args.tokenizer}",
             "--data", f"kind=synthetic_text,prompt_tokens={args.prompt_tokens},output_tokens={args.output_tokens}",
             "--output", f"kind=json,path={path}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, cwd=folder)
        found: dict[str, Any] = json.loads(path.read_text())["benchmarks"][0]["metrics"]
        return found


if __name__ == "__main__":
    sys.exit(main())
