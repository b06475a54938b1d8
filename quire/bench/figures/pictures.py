"""Pictures of the docs about groups and tiers, from real runs: `python -m quire.bench.figures.pictures docs/images`.

A tiny model with random weights is enough: what is shown is who holds which block, and that is the engine's own
bookkeeping.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.bench.figures.drawing import Drawing
from quire.llm import LLM
from quire.sampling.params import BeamSearchParams, SamplingParams

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
    "eos_token_id": 0,
}
_SHARED, _OWN, _GREY = "#4f81bd", "#e0923d", "#888888"
_STATES = {"used": "#4f81bd", "cached": "#a9c5e8", "free": "#eeeeee"}


def main(arguments: list[str]) -> int:
    target = Path(arguments[0] if arguments else "docs/images")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        for name, picture in {"group-blocks.svg": group_blocks(folder), "beam-blocks.svg": beam_blocks(folder),
                              "swap-blocks.svg": swap_blocks(folder)}.items():
            print(picture.save(target / name))
    return 0


def _open(folder: str, **options: Any) -> LLM:
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, block_size=4, **options)


# ---- four samples of one prompt: whose block is whose


def group_blocks(folder: str) -> Drawing:
    """Block tables of a group at three moments: after the prompt, after the first own token, some steps later."""
    moments = {1: "step 1: the prompt, computed once", 2: "step 2: each writes its first own token",
               6: "step 6"}
    picture = Drawing(760, 400)
    picture.text(20, 26, "n=4 over a prompt of 14 tokens, blocks of 4", 15, bold=True)
    with _open(folder, num_kv_blocks=32) as llm:
        llm.add_request("group", list(range(1, 15)), SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True))
        top = 60.0
        for step in range(1, 7):
            llm.step()
            if step in moments:
                copies = llm.metrics()["copies_on_write"]
                picture.text(20, top, f"{moments[step]} ({copies} copies on write so far)", 12, bold=True)
                _draw_tables(picture, llm, top + 10)
                top += 112
    picture.rect(560, 16, 12, 12, _SHARED)
    picture.text(577, 26, "held by several", 11)
    picture.rect(686, 16, 12, 12, _OWN)
    picture.text(703, 26, "its own", 11)
    return picture


def _draw_tables(picture: Drawing, llm: LLM, top: float) -> None:
    scheduler = llm._core.scheduler
    pool = scheduler.cache.pools[0]
    for request in scheduler.running.values():
        for seq in request.sequences:
            y = top + 22 * seq.index
            picture.text(20, y + 14, f"sequence {seq.index}", 11)
            for place, block in enumerate(seq.kv.tables[0].blocks):
                color = _SHARED if pool.references(block) > 1 else _OWN
                picture.rect(100 + 62 * place, y, 58, 18, color)
                picture.text(129 + 62 * place, y + 13, str(block), 10, "#ffffff", anchor="middle")


# ---- eight beams over a long prompt


def beam_blocks(folder: str) -> Drawing:
    """Blocks in use, step by step, against what eight separate sequences would hold."""
    prompt, width, length = 512, 8, 48
    used: list[int] = []
    with _open(folder, num_kv_blocks=2000, enable_prefix_caching=False) as llm:
        llm.add_request("beams", [1 + i % 60 for i in range(prompt)],
                        BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True))
        while llm.has_unfinished_requests():
            llm.step()
            used.append(int(llm.metrics()["kv_blocks_used"]))
    used = used[:-1]
    apart = [width * -(-(prompt + i) // 4) for i in range(len(used))]
    one = [-(-(prompt + i) // 4) for i in range(len(used))]
    picture = Drawing(820, 330)
    picture.text(20, 26, "8 beams over a prompt of 512 tokens: KV blocks (of 4 tokens) in use", 15, bold=True)
    lines = (("eight sequences apart", apart, "#c0504d"), ("the beams, measured", used, _SHARED),
             ("one sequence", one, _GREY))
    highest = max(apart)
    for name, counts, color in lines:
        points = [(60 + 560 * i / (len(counts) - 1), 290 - 230 * count / highest) for i, count in enumerate(counts)]
        for (x1, y1), (x2, y2) in pairwise(points):
            picture.line(x1, y1, x2, y2, color, 2)
        lift = 12 if name == "one sequence" else -4
        picture.text(628, points[-1][1] + lift, f"{name}: {counts[-1]}", 10, color)
    picture.line(60, 290, 620, 290, _GREY)
    picture.text(340, 312, f"{len(used)} steps", 11, anchor="middle")
    return picture


# ---- a pool too small, with a host tier


def swap_blocks(folder: str) -> Drawing:
    """Blocks by state on the device and on the host while requests are moved out and back."""
    states: list[dict[str, float]] = []
    marks: list[tuple[int, str]] = []
    with _open(folder, num_kv_blocks=48, swap_space=0.01, preemption_mode="swap",
               enable_prefix_caching=False) as llm:
        llm._core.scheduler.on_preempt = lambda request, reason: marks.append((len(states), request.request_id))
        for i in range(10):
            params = SamplingParams(n=1 + i % 2, seed=i, max_tokens=30, ignore_eos=True)
            llm.add_request(f"r{i}", [1 + (7 * i + j) % 60 for j in range(20 + i)], params)
        while llm.has_unfinished_requests():
            llm.step()
            states.append(llm.metrics())
    picture = Drawing(760, 400)
    picture.text(20, 26, "10 requests in a pool of 48 blocks, preempted by swap", 15, bold=True)
    wide = 640 / len(states)
    highest = max(48.0, max(state["host_blocks_used"] for state in states))
    for i, state in enumerate(states):
        base = 220.0
        for name, color in _STATES.items():
            height = 160 * state[f"kv_blocks_{name}"] / 48
            base -= height
            picture.rect(60 + i * wide, base, wide, height, color)
        height = 110 * state["host_blocks_used"] / highest
        picture.rect(60 + i * wide, 370 - height, wide, height, "#7f5fa9")
    for step, name in marks:
        picture.line(60 + step * wide, 58, 60 + step * wide, 370, "#c0504d", 1)
        picture.text(62 + step * wide, 56, name, 9, "#c0504d")
    picture.text(20, 44, "device: used (blue) and free (grey); red: a request is preempted", 11)
    picture.text(20, 246, "host tier: blocks of swapped requests", 11)
    picture.line(60, 370, 700, 370, _GREY)
    picture.text(380, 390, f"{len(states)} steps", 11, anchor="middle")
    return picture


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
