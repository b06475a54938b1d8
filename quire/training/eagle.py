"""Trains an EAGLE head: batches, loss over unrolled drafts, acceptance on held-out text, checkpoints to resume from."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from quire.errors import ConfigError
from quire.training.distill import distilled
from quire.training.head import HeadShape, Matrices, TrainedHead, moved_on
from quire.training.kept import reading, write_tensors
from quire.training.options import TrainingOptions
from quire.training.remembered import Remembered
from quire.training.rounded import PACKED_CONFIG, ROUNDED_CONFIG, on_grid, packed, rounded
from quire.training.start import begin_at
from quire.training.target import Seen, Target
from quire.training.texts import Texts
from quire.training.trainable import begins_at_target, check_trainable

_ROUND_LENGTH = 64
"""Rows of a batch are padded to a multiple of so many tokens."""
_FADING = 0.8
"""Weight of a drafted step against the one before it."""
_WARM_UP = 100
"""Steps over which the rate of learning rises, at most."""
_WARM_TIME = 0.03
"""Share of the time after which it has risen in any case."""
_LOOKING, _LAST_LOOK = 0.04, 0.025
"""Share of a limited time that may go into looking at held-out text, and at the end."""
_LOOKED_AT_ONCE = 4
"""Held-out texts that are looked at together where time is short."""
_SAVE_SECONDS = 30.0
"""Between two checkpoints where time is limited."""
_HELD_OUT = 0.02
"""Share of the texts that is not trained on."""
_CHECKED_TOKENS = 60_000
"""Held-out tokens that an evaluation looks at."""
_STATE = "training.safetensors"
_PROGRESS = "training.json"
_ANEW = "delete the files training* in its folder, and the same command trains from the start"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of greedy chains on held-out text: share of places whose first 1, 2, ... drafts are all right."""

    chain: tuple[float, ...]
    loss: float
    tokens_per_step: float
    """Of greedy decoding along the texts, with as many drafts as `chain` has. Steps begin where a draft was wrong more
    often than elsewhere, so that these are less than the chain of all places would give."""

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.3f}" for share in self.chain)
        return (f"{self.tokens_per_step:.3f} tokens a step with {len(self.chain)} drafts (first 1, 2, ... right at any "
                f"place: {shares})")


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts as rows, and where drafts of them are looked at."""

    texts: list[int]
    rows: Tensor
    """[B, T]: tokens; what follows a text's end nobody looks at."""
    where: Tensor
    """[B, T]: their numbers among the tokens of all texts."""
    places: tuple[Tensor, ...]
    """For each drafted step, which of the B * T tokens it guesses the next one of: all that was drafted lies in an
    answer."""
    among: tuple[Tensor, ...]
    """The same as numbers of places of the first drafted step, which has them all."""


class Trainer:
    """One head for one target. Batches depend on seed and step alone, so that a run can be resumed anywhere."""

    def __init__(self, target: Target, texts: Texts, options: TrainingOptions) -> None:
        check_trainable(target.decoder.spec, options)
        self.target = target
        self.options = options
        self._device = target.device
        self._dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        lengths = texts.lengths()
        self._held, self._trained = _parted(texts, options.depth)
        self._texts, self._lengths = texts, [min(length, options.max_length) for length in lengths]
        self._tokens = F.pad(texts.tokens, (0, 1))  # and one for padding
        self._remembered = Remembered(target, texts.begins[1:].tolist())
        vocab = target.decoder.spec.vocab_size
        self.guessed = texts.commonest(min(options.draft_vocab, vocab), vocab)
        rows = target.head_rows(self.guessed).float()
        self._rows = rows.to(self._dtype)
        self._guessing_rows = on_grid(rows).to(self._dtype) if self._rounds else self._rows
        self._place = torch.full((vocab,), -1, dtype=torch.int64)
        self._place[self.guessed] = torch.arange(len(self.guessed))
        self._place = self._place.to(self._device)
        self.head = self._new_head().to(self._device)
        fused = self._device.type == "cuda"
        matrices, vectors = ([part for part in self.head.parameters() if (part.dim() > 1) == wide]
                             for wide in (True, False))
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            options.learning_rate, (0.9, 0.95), fused=fused)
        self.step = 0
        self.seconds_before = 0.0
        """Of training, by runs before this one."""
        self.stopping = False
        """Somebody wants it to end after the step under way."""

    def _new_head(self) -> TrainedHead:
        spec = self.target.decoder.spec
        attention = spec.layers[0].attention
        seen = self._see(self._batch(self._trained[:2]))
        states = seen.states.float().unflatten(-1, (-1, spec.hidden_size))
        rms = states[:, 1:].square().mean((0, 1, 3)).sqrt().cpu()  # the first token's are often far out of scale
        scale = 1.0 / float(self._rows.float().norm(dim=1).mean().clamp(min=1e-6))
        shape = HeadShape(spec.hidden_size, len(self.target.states), attention.num_heads, attention.num_kv_heads,
                          attention.head_dim, self.options.intermediate, spec.layers[0].norm.eps, spec.ropes[0].theta)
        head = TrainedHead(shape, rms, scale, self.options.seed, self._rounds)
        if self.begins_at_target:
            begin_at(head, self.target, rms, scale)
        return head

    @property
    def _rounds(self) -> bool:
        """A head that is stored in 4 bits computes with them in training too."""
        return self.options.weights == "int4"

    @property
    def begins_at_target(self) -> bool:
        return begins_at_target(self.target.decoder.spec, self.options)

    # ---- batches

    def _batch(self, indices: list[int]) -> Batch:
        """Made on the host and sent without waiting for the device, which is busy with the batch before."""
        ends = torch.tensor([self._lengths[i] for i in indices])[:, None]
        at = torch.arange(-(-int(ends.max()) // _ROUND_LENGTH) * _ROUND_LENGTH)[None]
        where = torch.where(at < ends, self._texts.begins[indices][:, None] + at, len(self._tokens) - 1)
        first = self._texts.answers[indices][:, None]
        counted = [((at + 1 >= first + j) & (at + 1 < ends)).flatten() for j in range(self.options.depth)]
        number = counted[0].cumsum(0) - 1
        places = [mask.nonzero().squeeze(1) for mask in counted]
        return Batch(indices, self._sent(self._tokens[where].long()), self._sent(where),
                     tuple(map(self._sent, places)), tuple(self._sent(number[each]) for each in places))

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Batches of texts of nearly one length, in an order of this epoch's own. Texts that the target has to read
        again are not beside those that it need not."""
        shuffled = random.Random(f"{self.options.seed}-{epoch}")
        order = list(self._trained)
        shuffled.shuffle(order)
        sizes = [(self._remembered.keeps(i), -(-length // _ROUND_LENGTH)) for i, length in enumerate(self._lengths)]
        order.sort(key=sizes.__getitem__)
        batches: list[list[int]] = []
        kept = None
        for index in order:
            keeps, longest = sizes[index]  # none before it is longer
            room = self.options.batch_tokens // (longest * _ROUND_LENGTH)
            if keeps != kept or len(batches[-1]) >= room:
                batches.append([])
            kept = keeps
            batches[-1].append(index)
        shuffled.shuffle(batches)
        return batches

    def _batches(self) -> Iterator[list[int]]:
        """From the step that was reached on."""
        epoch, left = 0, self.step
        while True:
            batches = self._epoch(epoch)
            yield from batches[left:]
            left = max(0, left - len(batches))
            epoch += 1

    # ---- loss

    def _see(self, batch: Batch) -> Seen:
        return self._remembered.see(batch.texts, batch.rows, batch.where)

    def _unrolled(self, batch: Batch, fused: Tensor, by: Matrices) -> Iterator[tuple[Tensor, Tensor]]:
        """For each drafted step: guessed features [n, hidden] and the places they are of."""
        embedded = self.target.embeddings(batch.rows).to(self._dtype)
        features = moved_on(fused)
        steps: list[tuple[Tensor, Tensor]] = []
        for places in batch.places:
            x, steps = self.head.step(embedded, features, steps, by)
            yield x.flatten(0, 1).index_select(0, places), places
            features = moved_on(x)

    def _loss(self, batch: Batch, seen: Seen) -> Tensor:
        final = seen.final.to(self._dtype).flatten(0, 1)
        taught = F.linear(final[batch.places[0]], self._rows)
        by = self.head.matrices(self._dtype)
        fused = self.head.fused(seen.states.to(self._dtype), by)
        true = fused.detach().flatten(0, 1)
        known = (self._place[seen.best] >= 0).flatten()
        total = torch.zeros((), device=self._device)
        for j, (kept, places) in enumerate(self._unrolled(batch, fused, by)):
            weight = known[places].float()
            weight = weight * (_FADING**j / weight.sum().clamp(min=1.0))
            total = total + distilled(self.head.normed(kept), self._guessing_rows, taught, batch.among[j], weight,
                                      self.options.teacher_temperature)
            apart = F.smooth_l1_loss(kept.float(), true[places].float()) if len(places) else 0.0
            total = total + _FADING**j * self.options.feature_weight * apart
        return total

    def _rate(self, seconds: float) -> float:
        """Of learning: rises over the first steps, or the first moments of a short time, then falls along a cosine of
        the steps, or of the time where that will be up first. A run that goes on has the time of both."""
        warm, steps = min(_WARM_UP, max(1, self.options.steps // 20)), self.options.steps
        in_time = (self.seconds_before + seconds) / (self.seconds_before + self.options.max_seconds)
        risen = max((self.step + 1) / warm, in_time / _WARM_TIME)
        if risen < 1.0:
            return self.options.learning_rate * risen
        share = min(1.0, max((self.step - warm) / max(1, steps - warm), in_time))
        return self.options.learning_rate * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))

    # ---- the loop

    def train(self, folder: Path, say: Callable[[str], None], stepped: Callable[[int, float], None] | None = None
              ) -> Acceptance:
        """Until all steps are done or the time is up; progress is kept in `folder` as it goes. `stepped` is told after
        every step how many there were, and the seconds of this call. Ends with KeyboardInterrupt where it was to stop,
        after a checkpoint."""
        options, began = self.options, time.monotonic()
        limited = options.max_seconds < float("inf")
        batches, longest, looked, saved, spent = self._batches(), 0.0, 0.0, 0.0, 0.0
        said, training = self.step, 0.0
        while self.step < options.steps and spent + longest < options.max_seconds and not self.stopping:
            loss = self._learn(next(batches), spent)
            before, spent = spent, time.monotonic() - began
            training += spent - before
            longest = 0.0 if self.step == 1 else max(0.9 * longest, spent - before)  # the first one also starts things
            looks = self.step % options.eval_every == 0 and (not limited or looked <= _LOOKING * spent)
            if looks or self.step == options.steps:
                found = self.evaluate()
                say(f"step {self.step}, {spent:.0f} s, {(self.step - said) / training:.2f} steps/s: loss "
                    f"{float(loss):.3f}, held out {found.loss:.3f}, {found}")
                said, training = self.step, 0.0
                looked += time.monotonic() - began - spent
            if self.step % options.save_every == 0 or (limited and spent - saved > _SAVE_SECONDS):
                self.save(folder, self.seconds_before + spent)
                self.export(folder)
                saved = spent
            spent = time.monotonic() - began
            if stepped is not None:
                stepped(self.step, spent)
        self.save(folder, self.seconds_before + spent)
        self.export(folder)
        if self.stopping:
            raise KeyboardInterrupt
        return self.evaluate(time.monotonic() + _LAST_LOOK * options.max_seconds)

    def _learn(self, indices: list[int], seconds: float) -> Tensor:
        """One step; its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(seconds)
        batch = self._batch(indices)
        loss = self._loss(batch, self._see(batch))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, until: float = float("inf")) -> Acceptance:
        """Of as many held-out texts as there is time for, by `time.monotonic`."""
        depth, size = self.options.depth, max(1, self.options.batch_tokens // self.options.max_length)
        size = size if until == float("inf") else min(size, _LOOKED_AT_ONCE)
        right, places_seen, loss, looked_at, walked = [0] * depth, 0, 0.0, 0, [0, 0]
        by = self.head.matrices(self._dtype)
        for at in range(0, len(self._held), size):
            indices = self._held[at : at + size]
            batch = self._batch(indices)
            seen = self._see(batch)
            best = self._place[seen.best].flatten()
            loss += float(self._loss(batch, seen)) * len(indices)
            looked_at += len(indices)
            chain = torch.ones(batch.rows.numel(), dtype=torch.bool, device=self._device)
            accepted = torch.zeros_like(chain, dtype=torch.int32)
            fused = self.head.fused(seen.states.to(self._dtype), by)
            for j, (kept, places) in enumerate(self._unrolled(batch, fused, by)):
                hit = torch.zeros_like(chain)
                hit[places] = self.head.read_out(kept, self._guessing_rows).argmax(-1) == best[places]
                # A chain that begins j places before this one goes on here.
                chain = hit if j == 0 else hit & torch.cat((chain.new_zeros(1), chain[:-1]))
                accepted[: len(chain) - j] += chain[j:]
                right[j] += int(chain.sum())
                places_seen += len(places) if j == 0 else 0
            for index, row in zip(indices, accepted.view(batch.rows.shape).tolist(), strict=True):
                walked = [sum(pair) for pair in zip(walked, self._walk(index, row), strict=True)]
            if places_seen > _CHECKED_TOKENS or time.monotonic() > until:
                break
        return Acceptance(tuple(hits / max(1, places_seen) for hits in right), loss / max(1, looked_at),
                          walked[0] / max(1, walked[1]))

    def _walk(self, index: int, accepted: list[int]) -> tuple[int, int]:
        """Tokens and steps of decoding a text whose chain from each place has so many right drafts. The first token of
        an answer comes with its prompt."""
        place, end, steps = int(self._texts.answers[index]), self._lengths[index] - 1, 0
        tokens = end - place
        while place < end:
            place += accepted[place] + 1
            steps += 1
        return max(0, tokens), steps

    # ---- what is kept

    def save(self, folder: Path, seconds: float = 0.0) -> None:
        """All that a resumed run needs; a kill while it is written leaves the one before. `seconds`: of training."""
        tensors = {f"head.{name}": part.detach().cpu() for name, part in self.head.named_parameters()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(part).cpu() for name, part in state.items()}
        tensors["step"] = torch.tensor(self.step)
        told = folder / f"{_PROGRESS}.part"
        told.write_text(json.dumps({"step": self.step, "seconds": seconds, "texts": self._texts.number(),
                                    "options": _plain(self.options)}))
        told.replace(folder / _PROGRESS)  # before the state: where that is, a run goes on, and reads this
        write_tensors(tensors, folder / _STATE)

    def resume(self, folder: Path) -> bool:
        """Go on from what `folder` holds, if it holds anything."""
        if not (folder / _STATE).is_file():
            return False
        with reading(folder / _PROGRESS, _ANEW):
            progress = json.loads((folder / _PROGRESS).read_text())
            kept, self.seconds_before = {"start": "random"} | progress["options"], float(progress.get("seconds", 0.0))
        differing = [name for name, value in _plain(self.options).items()
                     if kept.get(name) != value and name not in ("max_seconds", "eval_every", "save_every")]
        if differing:
            raise ConfigError(f"{folder} holds a run with another {differing[0]}: {kept.get(differing[0])}; give "
                              "the same, or another --out", field=differing[0])
        if progress.get("texts") != self._texts.number():
            raise ConfigError(f"{folder} holds a run on other texts: give another --out, or delete the files training* "
                              "in it to begin again", field="out")
        with reading(folder / _STATE, _ANEW):
            self._take(load_file(folder / _STATE))
        return True

    @torch.no_grad()
    def _take(self, tensors: dict[str, Tensor]) -> None:
        own = dict(self.head.named_parameters())
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "head":
                own[rest].copy_(tensor)
            elif kind == "optimizer":
                index, _, part = rest.partition(".")
                state.setdefault(int(index), {})[part] = tensor
        whole = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**whole, "state": state})
        self.step = int(tensors["step"])

    def export(self, folder: Path) -> None:
        """The head as a public checkpoint of EAGLE-3; its projection to the vocabulary is the target's."""
        shape = self.head.shape
        tensors = self.head.exported(self.options.teacher_temperature)
        tensors["d2t"] = (self.guessed - torch.arange(len(self.guessed))).to(torch.int32)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "hidden_act": "silu",
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
            "rms_norm_eps": shape.eps, "rope_theta": shape.theta, "norm_before_residual": True,
            "max_position_embeddings": self.target.decoder.spec.max_positions,
            "vocab_size": self.target.decoder.spec.vocab_size, "draft_vocab_size": len(self.guessed),
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.target.states)},
        }
        if self.options.weights == "int4":
            tensors = packed(tensors)
            config["quantization_config"] = PACKED_CONFIG
        else:
            tensors = {name: part.to(torch.bfloat16) if part.is_floating_point() else part
                       for name, part in tensors.items()}
        if self.options.weights == "int8":
            tensors = rounded(tensors)
            config["quantization_config"] = ROUNDED_CONFIG
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_tensors(tensors, folder / "model.safetensors", {"format": "pt"})


def _parted(texts: Texts, depth: int) -> tuple[list[int], list[int]]:
    """Texts that are long enough: those that are held out, and those to train on. At least one of each."""
    usable = texts.usable(depth)
    apart = texts.held_out(_HELD_OUT)
    held, trained = [i for i in usable if apart[i]], [i for i in usable if not apart[i]]
    if not held or not trained:
        return usable[:1], usable[1:]
    random.Random(0).shuffle(held)  # short answers are the first to be done, and the first are looked at most
    return held, trained


def _plain(options: TrainingOptions) -> dict[str, Any]:
    return {name: None if value == float("inf") else value for name, value in asdict(options).items()}
