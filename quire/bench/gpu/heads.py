"""`quire bench gpu --heads`: a head of EAGLE-3's size that drafts on a GPU, right as often as it is told to be.

The target has random weights of a Qwen3 shape and says a text that is known beforehand (`known_text`). The head has
random weights too, and makes every pass that a real one makes; then its drafts are replaced by tokens of that text,
each right with the chance that its place has, given that those before it were: of ten drafts at a place exactly that
share is right, in an order at random, so that no run is luckier than another. `always`: four drafts in every step;
`as it pays`: the engine decides. The drafter's share is of the GPU's time, between events around its launches.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.bench.speculation.known_text import KnownText
from quire.bench.speculation.shapes import Bench, Method

if TYPE_CHECKING:
    import torch

    from quire.models.decoder import Decoder
    from quire.models.heads.head import DraftHead
    from quire.ops.interface import Ops
    from quire.scheduler.plan import PlanEntry, StepPlan
    from quire.speculation.speculator import Speculator
    from quire.worker.gpu.drafted import Drafted, DraftSource
    from quire.worker.gpu.speculation import Speculation
    from quire.worker.gpu.table import DeviceTable
    from quire.worker.gpu.worker import GpuWorker

CHANCES = (0.8, 0.7, 0.6, 0.5)
BATCHES = (1, 8, 64)
_DRAFT_VOCABULARY = 32_000
_FEW = 4
"""Chains whose drafts are replaced one by one."""
_TEXT = "free"


def random_head(target: Decoder, device: torch.device, max_model_len: int) -> DraftHead:
    """Of EAGLE-3's size: a layer like the target's that reads two streams, and a vocabulary of its own."""
    import torch

    from quire.models.heads.build import read_head
    from quire.models.heads.head import DraftHead

    spec, layer = target.spec, target.spec.layers[0]
    guessed = min(_DRAFT_VOCABULARY, spec.vocab_size)
    shape = layer.attention
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size,
        "intermediate_size": layer.mlp.intermediate, "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim, "max_position_embeddings": spec.max_positions, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "draft_vocab_size": guessed,
        "eagle_aux_hidden_state_layer_ids": [1, spec.num_layers // 2, spec.num_layers],
    }  # fmt: skip
    head_spec = read_head(config, spec)
    head = DraftHead(head_spec, target, max_model_len, ["head.weight"])
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, size in {**head_spec.parameters(), "head.weight": (guessed, spec.hidden_size)}.items():
        if len(size) == 1:
            weights[name] = torch.ones(size, device=device)
        else:
            bound = size[-1] ** -0.5
            weights[name] = torch.empty(size, dtype=target.ops.dtype, device=device).uniform_(
                -bound, bound, generator=generator)
    head.load(weights, torch.arange(guessed, device=device))
    return head


class Deals:
    """Whether a draft is right, for each place of a chain by itself: dealt from ten, shuffled."""

    def __init__(self, chances: Sequence[float]) -> None:
        self._chances = chances
        self._rng = random.Random(0)
        self._left: dict[int, list[bool]] = {}

    def hit(self, place: int) -> bool:
        left = self._left.setdefault(place, [])
        if not left:
            right = round(10 * self._chances[min(place, len(self._chances) - 1)])
            left += [True] * right + [False] * (10 - right)
            self._rng.shuffle(left)
        return left.pop()


class Replaced:
    """A drafter whose every draft is replaced by one that is right with the chance of its place."""

    def __init__(self, inner: DraftSource, text: KnownText, chances: Sequence[float]) -> None:
        self.inner = inner
        self._text = text
        self._deals = Deals(chances)
        self._ends: dict[int, tuple[int, int]] = {}
        """By row: the last position of its prompt, and its token."""
        self._rights: dict[int, list[int]] = {}
        """By row: what is right at every position behind the prompt."""
        self._sent: dict[int, torch.Tensor] = {}
        """The same on the device, and beside it what is wrong everywhere."""
        self._asked: list[_Span] = []
        self._ahead: list[_Span] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def follow(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._ends[start.row] = len(start.token_ids) - 1, start.token_ids[-1]
            self._rights.pop(start.row, None)
            self._sent.pop(start.row, None)
        self.inner.follow(plan)

    def propose(self, entries: Sequence[PlanEntry], table: DeviceTable) -> tuple[list[PlanEntry], Drafted]:
        with _Span(self._asked, table.arena.is_cuda):
            filled, drafted = self.inner.propose(entries, table)
        self._replace(entries, drafted, table)
        return filled, drafted

    def draft_on(self, drafted: Drafted) -> bool:
        with _Span(self._ahead, drafted.tokens.is_cuda):
            return self.inner.draft_on(drafted)

    def _replace(self, entries: Sequence[PlanEntry], drafted: Drafted, table: DeviceTable) -> None:
        """A real head's drafts lie there already, so this must cost next to nothing: of few chains nothing is sent."""
        import torch

        from quire.sampling.sending import send

        chains = [(entry.row, entry.start + 1, count, self._hits(count))
                  for entry, count in zip(entries, drafted.counts, strict=True) if count]  # fmt: skip
        if 0 < len(chains) <= _FEW:
            pieces = [self._on_device(row, table)[miss, begin:end] for row, first, count, hits in chains
                      for miss, begin, end in ((0, first, first + hits), (1, first + hits, first + count))]  # fmt: skip
            drafted.tokens, done = torch.cat(pieces), 0
            for row, first, count, _ in chains:
                table.tokens[row, first : first + count] = drafted.tokens[done : done + count]
                done += count
        elif chains:
            values = [self._token(row, first + j, j < hits, table) for row, first, count, hits in chains
                      for j in range(count)]  # fmt: skip
            drafted.tokens = send(values, torch.int32, table.arena.device)
            places = [row * table.max_model_len + first + j for row, first, count, _ in chains for j in range(count)]
            table.arena[send(places, torch.int64, table.arena.device)] = drafted.tokens

    def _hits(self, count: int) -> int:
        """How many drafts are right before one is not."""
        return next((place for place in range(count) if not self._deals.hit(place)), count)

    def _token(self, row: int, position: int, right: bool, table: DeviceTable) -> int:
        known = self._rights.get(row)
        at, last = self._ends[row]
        if known is None:
            known = self._rights[row] = self._text.following(last, table.max_model_len - 1 - at)
        token, size = known[position - at - 1], self._text.vocab_size
        return token if right else (token + size // 3) % size

    def _on_device(self, row: int, table: DeviceTable) -> torch.Tensor:
        """int32 [2, positions]: right and wrong tokens."""
        import torch

        from quire.sampling.sending import send

        if row not in self._sent:
            before = [0] * (self._ends[row][0] + 1)
            tokens = [[*before, *(self._token(row, position, right, table)
                                  for position in range(len(before), table.max_model_len))] for right in (True, False)]
            self._sent[row] = send(tokens, torch.int32, table.arena.device)
        return self._sent[row]

    def seconds(self) -> tuple[float, float]:
        """Of the GPU in all proposals since the last call, which have to be over: in steps, and behind them."""
        found = tuple(sum(span.begin.elapsed_time(span.end) for span in spans) / 1e3
                      for spans in (self._asked, self._ahead))
        self._asked, self._ahead = [], []
        return found[0], found[1]


class _Span:
    """Events of a GPU at both ends of a block, among those of others; nothing elsewhere."""

    def __init__(self, among: list[_Span], on_gpu: bool) -> None:
        import torch

        self.begin: Any = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self.end: Any = torch.cuda.Event(enable_timing=True) if on_gpu else None
        if on_gpu:
            among.append(self)

    def __enter__(self) -> _Span:
        if self.begin is not None:
            self.begin.record()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.end is not None:
            self.end.record()


@dataclass(frozen=True, slots=True)
class HeadMethod(Method):
    chances: tuple[float, ...] = field(default=CHANCES)

    def speculation(self, config: dict[str, Any]) -> Speculation:
        from quire.speculation.options import SpeculationOptions
        from quire.worker.gpu.speculation import Speculation

        # Whether drafts have to pay is not the worker's business: both methods share one.
        options = SpeculationOptions.parse({**self.config, "model": "random", "adaptive": False})
        return Speculation(options, head=random_head)

    def speculator(self, text: KnownText, worker: GpuWorker, seqs: int) -> Speculator:
        drafter: Any = worker._runner.drafter
        if not isinstance(drafter, Replaced):
            worker._runner.drafter = Replaced(drafter, text, self.chances)
        return Method(self.name, {**self.config, "model": "random"}).speculator(text, worker, seqs)


class HeadBench(Bench):
    """Counts, beside all else, what part of the GPU's time the head takes."""

    def close(self) -> None:
        if self.drafting is not None and isinstance(self.drafting._runner.drafter, Replaced):
            self.drafting._runner.drafter = self.drafting._runner.drafter.inner
        super().close()

    def measured(self, method: HeadMethod, batch: int) -> dict[str, Any]:
        from quire.bench.gpu.engine import GpuClock

        line = self.case(method, _TEXT, batch)
        worker = self.drafting_worker(method)
        drafter: Any = worker._runner.drafter
        line["head_replays"] = drafter.runner.replays
        if self.args.device != "cuda":
            return line
        drafter.seconds()
        with GpuClock(worker) as clock:
            self.run(worker, method.speculator(self.text, worker, self.seqs), _TEXT, batch)
            whole = clock.seconds()
        asked, ahead = drafter.seconds()
        whole += ahead  # behind the steps, whose own launches the clock sees
        return {**line, "gpu_seconds": round(whole, 4), "drafter_share": round((asked + ahead) / whole, 3),
                "ahead_share": round(ahead / max(asked + ahead, 1e-9), 3)}


def measure(config: dict[str, Any], name: str, args: argparse.Namespace, ops: Ops | None = None
            ) -> Iterator[dict[str, Any]]:
    """A line for each batch size, with drafts always and with drafts as they pay."""
    given = argparse.Namespace(batch=list(args.batch or BATCHES), repeat=args.repeat, max_tokens=args.max_tokens,
                               device=getattr(args, "device", "cuda"), few_rows=getattr(args, "few_rows", True))
    bench = HeadBench(config, given, ops)
    try:
        for adaptive in (False, True):
            method = HeadMethod("head, as it pays" if adaptive else "head, always",
                                {"method": "eagle", "num_speculative_tokens": len(CHANCES), "adaptive": adaptive})
            for batch in given.batch:
                yield {"bench": "gpu", "case": "heads", "model": name, "method": method.name,
                       **bench.measured(method, batch)}
    finally:
        bench.close()


def text(line: dict[str, Any]) -> str:
    share = f", head {line['drafter_share']:.0%} of the GPU's time" if "drafter_share" in line else ""
    return (f"{line['model']} {line['method']}, {line['batch']} streams: {line['ratio']:.2f} x, "
            f"{line['plain_ms_per_token']:.2f} ms a token without, {line['ms_per_token']:.2f} with, "
            f"{line['tokens_per_step']:.2f} tokens a step{share}")
