"""`quire bench speculative`: one stream with drafts against the same stream without, on texts of several kinds.

Both engines live in one process and take turns on every prompt (on a CPU with every step), so that a busy machine is
busy for both. The tokens are compared: a figure counts only if they are the same."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.gpu.cases import MODELS, qwen3
from quire.bench.speculation.texts import DRAWN, TEXTS
from quire.cli.commands import UsageError
from quire.cli.options import json_object
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.engine.outputs.output import RequestOutput
    from quire.llm import LLM
    from quire.sampling.params import SamplingParams

EXAMPLES = (
    "examples:\n"
    "  quire bench speculative\n"
    "  quire bench speculative --methods ngram skip_layers --repeat 5 --num-threads 2\n"
    "  quire bench speculative --device cuda --shapes 8b --methods ngram --batch 1 8 64\n"
    '  quire bench speculative --config \'{"method": "draft_model", "model": "draft-folder"}\''
)
_TINY = qwen3(64, 2, 2, 128, True) | {"vocab_size": 1024, "num_key_value_heads": 1, "head_dim": 32}
_METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "skip_layers": {"method": "skip_layers", "num_speculative_tokens": 3},
    "skip_layers_always": {"method": "skip_layers", "num_speculative_tokens": 3, "adaptive": False},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "draft_model_always": {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False},
    "eagle": {"method": "eagle"},
    "eagle_always": {"method": "eagle", "adaptive": False},
    "eagle_tree": {"method": "eagle", "tree": {"width": 4, "nodes": 12}},
    "tree": {"method": "ngram", "tree": {"width": 4, "nodes": 12}},
    "tree_always": {"method": "ngram", "tree": {"width": 4, "nodes": 12}, "adaptive": False},
    "suffix_tree": {"method": "suffix", "tree": {"width": 4, "nodes": 12}},
    "known": {},
}
_LENGTH = 2048
"""Of a prompt and its answer, where the model has as many positions."""
_MOST_STREAMS = 1024
_OPTIONS_ON_GPU = {"kv_cache_memory": "4GiB"}
"""Two engines share it: a share of its memory for each would leave the second nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="the target (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=sorted(_METHODS), default=["ngram", "suffix", "skip_layers"],
                        metavar="NAME", help=f"some of {', '.join(sorted(_METHODS))} (default: ngram suffix "
                        "skip_layers); known: drafts that are right as often as --acceptance says, with --shapes on "
                        "cuda")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=["repeating", "free"], metavar="KIND",
                        help=f"some of {', '.join(TEXTS)} (default: repeating free)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T",
                        help="of all answers but those to free texts, which are drawn at 0.9 (default: 0)")
    parser.add_argument("--config", type=json_object, metavar="JSON", help="one speculative_config instead")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N", help="of each answer (default: 160)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N",
                        help="turns on each prompt, of which the median counts (default: 3)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], metavar="N", help="streams at once (default: 1)")
    parser.add_argument("--shapes", choices=["tiny", *MODELS], metavar="NAME",
                        help=f"random weights of Qwen3 shapes instead of a model: tiny, {', '.join(MODELS)}")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0], metavar="SHARE",
                        help="of drafts of --methods known (default: 0 0.5 0.8 1)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4], metavar="N",
                        help="of --methods known (default: 4)")
    parser.add_argument("--num-threads", type=int, metavar="N", help="threads of the CPU kernels (default: the cores)")
    parser.add_argument("--quantization", metavar="NAME", help="of both engines, as of LLM: file, int8, int4")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where it runs (default: cpu)")


def run(args: argparse.Namespace) -> int:
    from quire.llm import LLM
    from quire.machine import describe_machine

    _check(args)
    length = _LENGTH if args.shapes else _length(args.model)
    machine = describe_machine()
    configs = {"given": args.config} if args.config is not None else {name: _METHODS[name] for name in args.methods}
    if args.shapes and args.device == "cuda":
        from quire.bench.speculation.shapes import run_shapes

        return run_shapes(MODELS.get(args.shapes, _TINY), args, configs, machine)
    if "known" in configs:
        raise ConfigError("method 'known' needs --shapes and --device cuda: nobody knows what a model says",
                          field="methods")
    options: dict[str, Any] = {"num_threads": args.num_threads, "device": args.device, "max_model_len": length,
                               "quantization": args.quantization}
    if args.quantization is None:  # floats, whatever the file stores
        options["dtype"] = "float32" if args.device == "cpu" else "bfloat16"
    if args.device == "cuda":
        options |= {**_OPTIONS_ON_GPU, "max_num_seqs": max(64, *args.batch)}
    same, failed = True, False
    with tempfile.TemporaryDirectory(prefix="quire-shapes-") as folder:
        model = args.model
        if args.shapes:
            model = folder
            (Path(folder) / "config.json").write_text(json.dumps(MODELS.get(args.shapes, _TINY)))
            options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        configs = {name: _with_model(config, model, Path(folder), args) for name, config in configs.items()}
        with LLM(model, **options) as plain:
            for name, config in configs.items():
                shown = {key: value for key, value in config.items() if key != "model" or args.config is not None}
                head = {"bench": "speculative", "method": name, "config": shown, "model": args.shapes or model,
                        "device": args.device, "quantization": args.quantization}
                try:
                    with LLM(model, speculative_config=config, **options) as drafting:
                        for kind, batch in itertools.product(args.texts, args.batch):
                            found = compare(plain, drafting, kind, batch, args)
                            same = same and found["same_tokens"]
                            print(json.dumps({**head, **found, **machine}), flush=True)
                except QuireError as error:
                    failed = True
                    print(json.dumps({**head, "error": str(error)}), flush=True)
    if failed:
        return 1
    # A GPU's sums depend on the batch, unless it is told otherwise: there a difference is not an error.
    return 0 if same or args.device == "cuda" else 1


def _length(model: str) -> int:
    from quire.models.loader.source import resolve_model
    from quire.models.registry import read_spec

    return min(_LENGTH, read_spec(resolve_model(model).config).max_positions)


def _check(args: argparse.Namespace) -> None:
    for name in ("max_tokens", "repeat", "batch", "drafts"):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if max(args.batch) > _MOST_STREAMS:
        raise UsageError(f"--batch must be at most {_MOST_STREAMS}")
    if not all(0.0 <= share <= 1.0 for share in args.acceptance):
        raise UsageError("--acceptance must be between 0 and 1")
    if not 0.0 <= args.temperature < math.inf:
        raise UsageError("--temperature must be at least 0")
    if args.config is not None:
        _check_config(args.config)


def _check_config(config: dict[str, Any]) -> None:
    """Before an engine is made for each method."""
    from quire.speculation.options import SpeculationOptions

    named = {"model": "made later"} if config.get("method") == "draft_model" else {}  # see `_with_model`
    try:
        SpeculationOptions.parse({**named, **config})
    except ConfigError as error:
        raise UsageError(f"--config: {error}") from None


def _with_model(config: dict[str, Any], model: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A draft model that was not named is the target with half of its layers dropped."""
    if config.get("method") != "draft_model" or "model" in config:
        return config
    if args.shapes:
        half = folder / "half"
        half.mkdir(exist_ok=True)
        shapes = json.loads((folder / "config.json").read_text())
        (half / "config.json").write_text(json.dumps({**shapes, "num_hidden_layers": shapes["num_hidden_layers"] // 2}))
        return {**config, "model": str(half), "load_format": "dummy"}
    from quire.bench.speculation.dropped_layers import write_dropped
    from quire.models.loader.source import resolve_model

    half = folder / "dropped"
    if not half.exists():
        write_dropped(resolve_model(model), half)
    return {**config, "model": str(half)}


@dataclass(slots=True)
class _Turns:
    """Seconds of every prompt's turns, by engine."""

    plain: list[float] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    plain_cpu: list[float] = field(default_factory=list)
    drafting_cpu: list[float] = field(default_factory=list)
    """Seconds of processor time, which other work on the machine disturbs less."""
    control: list[float] = field(default_factory=list)
    """The first engine's seconds over the second's while that has its drafts switched off: where an engine's weights
    happen to lie makes several percent, and must not be taken for speculation's."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.plain) / statistics.median(self.drafting)


def compare(plain: LLM, drafting: LLM, kind: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """All prompts of one kind through both, turn by turn; the first turn of each warms up and is not counted."""
    texts: Mapping[str, str | list[int]] = _ids(kind) if args.shapes else TEXTS[kind]
    turns = {name: _Turns() for name in texts}
    tokens, plain_tokens, equal, same = 0, 0, 0, True
    before = drafting.metrics()
    for turn in range(args.repeat + 1):
        for number, (name, text) in enumerate(texts.items()):
            params = _params(kind, args, number)
            theirs, mine = _answers((plain, drafting), text, params, batch, by_step=args.device == "cpu")
            wanted, found = theirs.tokens, mine.tokens
            same = same and wanted == found
            if turn:
                turns[name].plain.append(theirs.seconds)
                turns[name].drafting.append(mine.seconds)
                turns[name].plain_cpu.append(theirs.cpu)
                turns[name].drafting_cpu.append(mine.cpu)
                if args.device == "cpu":
                    turns[name].control.append(_control(plain, drafting, text, params, batch))
                tokens += sum(map(len, found))
                plain_tokens += sum(map(len, wanted))
                equal += sum(a == b for one, other in zip(wanted, found, strict=True)
                             for a, b in zip(one, other, strict=False))
    plain_seconds, seconds = sum(sum(t.plain) for t in turns.values()), sum(sum(t.drafting) for t in turns.values())
    controls = [each for t in turns.values() for each in t.control]
    placement = statistics.median(controls) if controls else 1.0  # of the engines, whatever the text
    return {
        "text": kind,
        "temperature": args.temperature if kind not in DRAWN else 0.9,
        "batch": batch,
        "same_tokens": same,
        "equal_tokens": round(equal / max(1, plain_tokens), 4),
        "plain_tokens_per_s": round(plain_tokens / plain_seconds, 2),
        "tokens_per_s": round(tokens / seconds, 2),
        "plain_ms_per_token": round(1e3 * batch * plain_seconds / max(1, plain_tokens), 3),
        "ms_per_token": round(1e3 * batch * seconds / max(1, tokens), 3),
        "speedup": round(_total(turns, "plain") / _total(turns, "drafting") / placement, 3),
        "speedup_cpu_time": round(_total(turns, "plain_cpu") / _total(turns, "drafting_cpu") / placement, 3),
        "speedup_without_drafts": round(placement, 3),
        "speedup_by_text": {name: round(t.ratio / placement, 3) for name, t in turns.items()},
        **_acceptance(before, drafting.metrics()),
    }


def _total(turns: Mapping[str, _Turns], part: str) -> float:
    return sum(statistics.median(getattr(turn, part)) for turn in turns.values())


def _control(plain: LLM, drafting: LLM, text: str | list[int], params: SamplingParams, batch: int) -> float:
    """How the two engines compare when neither has drafts."""
    scheduler = drafting._core.scheduler
    speculator, scheduler.speculator = scheduler.speculator, None
    try:
        theirs, mine = _answers((plain, drafting), text, params, batch, by_step=True)
    finally:
        scheduler.speculator = speculator
    return theirs.seconds / mine.seconds


def _params(kind: str, args: argparse.Namespace, number: int) -> SamplingParams:
    from quire.sampling.params import SamplingParams

    if kind in DRAWN:
        return SamplingParams(temperature=0.9, top_p=0.95, seed=number, max_tokens=args.max_tokens)
    return SamplingParams(temperature=args.temperature, seed=number, max_tokens=args.max_tokens)


def _ids(kind: str) -> dict[str, list[int]]:
    """Prompts for a model without a tokenizer: one that repeats itself, or one that does not."""
    rng = random.Random(0)
    if kind == "repeating":
        return {"pattern": [rng.randrange(100) for _ in range(24)] * 8}
    return {"noise": [rng.randrange(100) for _ in range(192)]}


@dataclass(slots=True)
class _Answer:
    """Seconds and processor seconds that an engine took, and its tokens by request."""

    seconds: float = 0.0
    cpu: float = 0.0
    outputs: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tokens(self) -> list[list[int]]:
        return list(self.outputs.values())

    def go_on(self, stream: Iterator[RequestOutput]) -> bool:
        """Until an output grows; false at the end."""
        began, busy = time.perf_counter(), time.process_time()
        output = next(stream, None)
        self.seconds += time.perf_counter() - began
        self.cpu += time.process_time() - busy
        if output is not None:
            self.outputs[output.request_id] = list(output.outputs[0].token_ids)
        return output is not None


def _answers(engines: Sequence[LLM], text: str | list[int], params: SamplingParams, batch: int, by_step: bool
             ) -> list[_Answer]:
    """What each engine makes of a prompt. `by_step`: one step of each in turn, so that whatever else the machine does
    hits all of them alike; else whole answers, since what a GPU does meanwhile would not be counted."""
    streams = [_stream(llm, text, params, batch) for llm in engines]
    answers = [_Answer() for _ in engines]
    going = list(range(len(engines)))
    while going:
        if by_step:
            going = [i for i in going if answers[i].go_on(streams[i])]
        elif not answers[going[0]].go_on(streams[going[0]]):
            going.pop(0)
    return answers


def _stream(llm: LLM, text: str | list[int], params: SamplingParams, batch: int) -> Iterator[RequestOutput]:
    if isinstance(text, str):
        return llm.stream([llm.chat_prompt([{"role": "user", "content": text}])] * batch, params)
    return llm.stream([text] * batch, replace(params, ignore_eos=True))


def _acceptance(before: dict[str, int | float], after: dict[str, int | float]) -> dict[str, Any]:
    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    places = itertools.takewhile(lambda place: f"spec_draft_tokens_at_{place}" in after, itertools.count(1))
    by_place = [(grown(f"spec_accepted_tokens_at_{place}"), grown(f"spec_draft_tokens_at_{place}")) for place in places]
    steps, offered, accepted = (grown(f"spec_{name}") for name in ("decode_steps", "draft_tokens", "accepted_tokens"))
    return {
        "acceptance_rate": round(accepted / offered, 3) if offered else None,
        "acceptance_by_position": [round(kept / tried, 3) for kept, tried in by_place if tried],
        "drafts_per_step": round(offered / steps, 3) if steps else 0.0,
        "tokens_per_step": round((steps + accepted) / steps, 3) if steps else 0.0,
    }
