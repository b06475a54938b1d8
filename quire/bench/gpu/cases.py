"""The GPU cases a to d: models of the shapes of Qwen3, Qwen2.5 and Gemma 3 with random weights, their workloads, and
what the hardware allows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request

MAX_MODEL_LEN = 4112
READ_BANDWIDTH = 4.27e12
"""Bytes per second that an H200 reads from its memory (measured)."""
FLOPS = 768e12
"""bf16 operations per second of its matrix units (measured)."""


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
    }


MODELS = {
    "0.6b": qwen3(1024, 28, 16, 3072, True),
    "1.7b": qwen3(2048, 28, 16, 6144, True),
    "4b": qwen3(2560, 36, 32, 9728, True),
    "8b": qwen3(4096, 36, 32, 12288, False),
    "14b": qwen3(5120, 40, 40, 17408, False),
    "30b-a3b": {
        **qwen3(2048, 48, 32, 6144, False), "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "qwen2.5-0.5b": {
        **qwen3(896, 24, 14, 4864, True), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768,
    },
    "gemma3-1b": {
        **qwen3(1152, 26, 4, 6912, True), "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rope_local_base_freq": 10000.0,
        "sliding_window": 512, "sliding_window_pattern": 6,
    },
}  # fmt: skip
"""The last two have widths that are multiples of 128 and of no larger power of two, and heads of other sizes."""
USUAL = ("0.6b", "8b", "14b", "30b-a3b")
"""What is measured if no model is named."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload: its requests and which figure is read off it."""

    name: str
    figure: str
    max_num_seqs: int
    max_num_batched_tokens: int
    models: tuple[str, ...]


CASES = {
    "a": Case("a", "output tok/s", 256, 16384, tuple(MODELS)),
    "b": Case("b", "ms/token", 1, 2048, tuple(MODELS)),
    "c": Case("c", "output tok/s", 32, 16384, ("0.6b", "8b", "30b-a3b")),
    "d": Case("d", "prompt tok/s", 16, 16384, ("0.6b", "8b", "30b-a3b")),
}


RIVALS = {
    ("a", "0.6b"): 22832.0,
    ("a", "8b"): 9181.0,
    ("a", "14b"): 5965.0,
    ("b", "0.6b"): 1.70,
    ("b", "8b"): 5.20,
    ("b", "14b"): 8.60,
    ("c", "0.6b"): 9972.0,
    ("c", "8b"): 3344.0,
    ("d", "0.6b"): 351500.0,
    ("d", "8b"): 40875.0,
    ("a", "30b-a3b"): 5764.0,
    ("b", "30b-a3b"): 4.13,
    ("c", "30b-a3b"): 1771.0,
    ("d", "30b-a3b"): 62625.0,
}
"""What vLLM 0.26.0 reached on an H200 with the same cases, in the unit of the case."""
FP8_RIVALS = {("a", "8b"): 10982.0, ("b", "8b"): 3.73, ("c", "8b"): 4048.0, ("d", "8b"): 59147.0}
"""The same with `quantization="fp8"`."""


def requests_of(case: str, round_: int = 0, max_tokens: int | None = None) -> list[Request]:
    """The requests of a case; `round_` makes their names new, `max_tokens` cuts their outputs short."""
    shapes: list[tuple[list[int], int, float]] = []
    if case == "a":
        # nano-vllm's benchmark: the same calls in the same order give the same prompts.
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
        shapes = [(prompt, rng.randint(100, 1024), 0.6) for prompt in prompts]
    else:
        rng = random.Random(1)
        count, length, out = {"b": (1, 128, 512), "c": (32, 1024, 256), "d": (16, 4096, 1)}[case]
        shapes = [([rng.randint(0, 10000) for _ in range(length)], out, 0.0) for _ in range(count)]
    return [
        Request(
            f"{case}{round_}-{i}",
            prompt,
            SamplingParams(temperature=temperature, max_tokens=min(out, max_tokens or out), ignore_eos=True),
            seed=i,
            arrival_time=0.0,
        )
        for i, (prompt, out, temperature) in enumerate(shapes)
    ]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and operations of a model that every step must move and do."""

    weight_bytes: int
    """Read by every step: all matrices but the embedding table (which is the head where it is tied) and experts."""
    kv_bytes: int
    """Of one token."""
    flops: int
    """Of one token through all matrices, head excluded; in fp8 and int8 two count as one, which take as long."""
    head_flops: int
    attention_flops: int
    """Of one query over one key, all layers."""
    window: int = 0
    """Keys that layers with a sliding window read at most."""
    windowed: float = 0.0
    """Share of the layers that have one."""
    expert_bytes: int = 0
    """Of one expert in each layer."""
    experts: int = 0
    chosen: int = 0

    def keys(self, tokens: int) -> float:
        """That a query reads which so many tokens end with, on average over all layers."""
        return tokens - self.windowed * max(0, tokens - self.window)

    def scores(self, tokens: int) -> float:
        """Of a prompt: what all its queries read together, about."""
        outside = max(0, tokens - self.window)
        return (tokens * tokens - self.windowed * outside * outside) / 2

    def read_bytes(self, rows: int) -> float:
        """Of all weights that a step of so many rows reads."""
        return self.weight_bytes + self.expert_bytes * distinct_experts(self.experts, self.chosen, rows)


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """How many experts of a layer some rows choose together, where each chooses as if by lot."""
    return experts * (1 - (1 - chosen / experts) ** rows) if experts else 0.0


_LAYER_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / 128}
"""Of a weight of the layers, int4 with a scale and an offset for 128 of them; the head keeps its type."""


def limits_of(config: dict[str, Any], element: int = 2, quantization: str | None = None) -> Limits:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    q, kv = (
        config["num_attention_heads"] * config["head_dim"],
        config["num_key_value_heads"] * config["head_dim"],
    )
    experts, chosen = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)
    attention, head = hidden * (q + 2 * kv) + q * hidden, hidden * config["vocab_size"]
    one = 3 * hidden * config["moe_intermediate_size"] if experts else 0
    mlp = hidden * experts if experts else 3 * hidden * config["intermediate_size"]
    each = element if quantization is None else _LAYER_BYTES[quantization]
    return Limits(
        int(layers * (attention + mlp) * each + head * element),
        2 * layers * kv * element,
        (1 if quantization in ("fp8", "int8") else 2) * layers * (attention + mlp + chosen * one),
        2 * head,
        4 * layers * q,
        config.get("sliding_window") or 0,
        _windowed(config),
        layers * one * element,
        experts,
        chosen,
    )


def _windowed(config: dict[str, Any]) -> float:
    """Share of the layers with a sliding window: all but every sixth of Gemma 3's, from the sixth on."""
    if not config.get("sliding_window"):
        return 0.0
    layers = config["num_hidden_layers"]
    return 1 - layers // config["sliding_window_pattern"] / layers


def least_seconds(
    case: str, config: dict[str, Any], requests: list[Request], element: int = 2, quantization: str | None = None
) -> float:
    """Each step's larger of bytes over bandwidth and operations over rate, if all requests start together."""
    limits = limits_of(config, element, quantization)
    prompts = [len(r.prompt_token_ids) for r in requests]
    outs = [r.params.max_tokens or 1 for r in requests]
    work = sum(n * limits.flops + limits.head_flops + limits.attention_flops * limits.scores(n) for n in prompts)
    total = work / FLOPS
    for step in range(1, max(outs)):
        alive = [n + step for n, out in zip(prompts, outs, strict=True) if out > step]
        keys = sum(map(limits.keys, alive))
        moved = limits.read_bytes(len(alive)) + limits.kv_bytes * keys
        done = len(alive) * (limits.flops + limits.head_flops) + limits.attention_flops * keys
        total += max(moved / READ_BANDWIDTH, done / FLOPS)
    return total


GEMM, DECODE, PREFILL, OTHER = "GEMM", "decode attention", "prefill attention", "other"
"""Kinds of work that a kernel of a step belongs to."""


def kind_of(kernel: str) -> str:
    """Which of them a kernel belongs to, by its name in a profile."""
    name = kernel.lower()
    if "_decode_kernel" in name or "cluster_decode" in name:
        return DECODE
    if "_mixed_kernel" in name or "prefill_kernel" in name or "sdpa" in name or "flash" in name:
        return PREFILL
    gemms = ("gemm", "nvjet", "_expert_kernel", "_few_up_kernel", "_few_down_kernel", "_row_kernel",
             "_vector_kernel", "prefetch_kernel", "codes_kernel", "_bytes_kernel", "_planes_kernel",
             "_fixed_kernel", "fixed_tiles_kernel", "_tree_kernel", "splitk")
    return GEMM if any(part in name for part in gemms) else OTHER


def shares(spans: list[tuple[str, float, float]]) -> dict[str, tuple[float, int]]:
    """By name, how long kernels ran and how often, of (name, begin, end): time in which an earlier one still ran is
    that one's, since a kernel that is launched early only waits in it."""
    found: dict[str, tuple[float, int]] = {}
    done = float("-inf")
    for name, begin, end in sorted(spans, key=lambda span: span[1:]):
        seconds, count = found.get(name, (0.0, 0))
        found[name] = (seconds + max(0.0, end - max(begin, done)), count + 1)
        done = max(done, end)
    return found


def least_by_kind(
    config: dict[str, Any], requests: list[Request], element: int = 2, quantization: str | None = None
) -> dict[str, tuple[float, str]]:
    """Of each kind, the seconds that the hardware needs at least, and what of it: FLOPs or bandwidth."""
    limits = limits_of(config, element, quantization)
    prompts = [len(r.prompt_token_ids) for r in requests]
    outs = [r.params.max_tokens or 1 for r in requests]
    gemms = sum(n * limits.flops + limits.head_flops for n in prompts) / FLOPS
    keys, bound = 0.0, 0.0
    for step in range(1, max(outs)):
        alive = [n + step for n, out in zip(prompts, outs, strict=True) if out > step]
        read = limits.read_bytes(len(alive)) / READ_BANDWIDTH
        done = len(alive) * (limits.flops + limits.head_flops) / FLOPS
        bound += read if read > done else 0.0
        gemms += max(read, done)
        keys += sum(map(limits.keys, alive))
    inside = sum(limits.attention_flops * limits.scores(n) for n in prompts)
    return {
        GEMM: (gemms, "bandwidth" if bound > gemms / 2 else "FLOPs"),
        DECODE: (keys * limits.kv_bytes / READ_BANDWIDTH, "bandwidth"),
        PREFILL: (inside / FLOPS, "FLOPs"),
    }
