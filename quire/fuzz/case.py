"""One fuzz case as plain data: a tiny model, engine options, and requests that come and go at given steps."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidRequestError

VOCABULARY = 61
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789{}[]\":,.-+*/()<>=! \n"
"""What tokens 1 and up stand for where outputs have a shape; 0 ends a text, and the last few mean nothing."""
LONGEST_DOCUMENT = 140
"""With the rest of a prompt and its output it fits the positions of the model."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{2,9}( [0-9]{1,3}){0,4}"},
    {"choice": ["yes", "no", "yesterday"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
                                               "b": {"type": "array", "items": {"enum": ["x", "yz", None]},
                                                     "maxItems": 3}}, "required": ["a"]}},
    {"json_object": True},
    {"grammar": 'root ::= item{1,12}\nitem ::= "ab" | "c" [0-9] | "(" item ")"'},
)
DRAFT = "draft"
"""Stands for the draft model: the case's model with one layer."""
HEADS = ("eagle", "eagle3")
"""Stand for random heads of these kinds."""


@dataclass(slots=True)
class FuzzRequest:
    """A prompt that arrives before engine step `at_step` and, perhaps, is aborted before step `abort_at`."""

    name: str
    at_step: int
    prompt: list[int]
    params: dict[str, Any]
    priority: int = 0
    cache_salt: str | None = None
    abort_at: int | None = None
    tenant: str | None = None
    beam: dict[str, Any] | None = None
    """Parameters of beam search; `params` then count for nothing."""

    @property
    def num_sequences(self) -> int:
        if self.beam is not None:
            return int(self.beam["beam_width"])
        return int(self.params.get("best_of") or self.params.get("n", 1))

    @property
    def max_tokens(self) -> int:
        return int((self.beam or self.params)["max_tokens"])


@dataclass(slots=True)
class FuzzCase:
    model: dict[str, Any]
    options: dict[str, Any]
    requests: list[FuzzRequest] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FuzzCase:
        try:
            data = json.loads(text)
            return cls(data["model"], data["options"], [FuzzRequest(**request) for request in data["requests"]])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"this is not a fuzz case as `quire fuzz` prints them: {error}") from None


def random_case(seed: int) -> FuzzCase:
    """The case of a seed: the same on every machine."""
    rng = random.Random(seed)
    case = FuzzCase(_model(rng), {})
    prefixes = [_tokens(rng, rng.randint(1, 40)) for _ in range(3)]
    for index in range(rng.randint(1, 12)):
        beginning = rng.choice(prefixes)[: rng.randint(0, 40)] if rng.random() < 0.7 else []
        prompt = beginning + _tokens(rng, rng.randint(1, 30))
        at_step = rng.randint(0, 12)
        case.requests.append(FuzzRequest(
            name=f"r{index}",
            at_step=at_step,
            prompt=prompt,
            params=_params(rng),
            priority=rng.randint(-1, 1),
            cache_salt=rng.choice([None, None, None, "a"]),
            abort_at=at_step + rng.randint(0, 20) if rng.random() < 0.15 else None,
            tenant=rng.choice([None, "x", "y"]),
        ))
        _make_group(rng, case.requests[-1])
    _lengthen(random.Random(f"{seed} document"), case.requests)
    case.options = _options(rng, case.requests)
    _give_shapes(random.Random(f"{seed} shapes"), case.requests)
    _give_stops(random.Random(f"{seed} stops"), case.requests)
    _judge_by_rejection(random.Random(f"{seed} rejection"), case)
    _give_latents(random.Random(f"{seed} latents"), case.model)
    _give_integers(random.Random(f"{seed} integers"), case)
    _give_int8_kv(random.Random(f"{seed} int8 kv"), case)
    _draft_by_a_head(random.Random(f"{seed} head"), case)
    return case


def model_on_ranks(case: FuzzCase, tensor_size: int, num_stages: int) -> FuzzCase:
    """The same case on several ranks, with heads, slices of the MLP and layers enough for them."""
    heads = case.model["num_attention_heads"]
    model = dict(case.model)
    if heads < tensor_size:
        model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    model["intermediate_size"] = max(32 * tensor_size + 8, model["intermediate_size"])
    if "moe_intermediate_size" in model:
        model["moe_intermediate_size"] = 16 * tensor_size + 8  # and twice that beside the experts
    model["num_hidden_layers"] = max(num_stages, model["num_hidden_layers"])
    options = case.options | {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": num_stages,
                              "distributed_executor_backend": "threads", "num_threads": 1}
    return FuzzCase(model, options, case.requests)


def _draft_by_a_head(rng: random.Random, case: FuzzCase) -> None:
    """Some drafts are those of a head that reads the model's hidden states, judged as the others would have been."""
    given = case.options.get("speculative_config")
    if given is None or rng.random() >= 0.3 or "kv_cache_dtype" in case.options:
        return
    case.options["speculative_config"] = {
        "method": "eagle", "model": rng.choice(HEADS), "num_speculative_tokens": rng.choice([1, 2, 4, 7]),
        "adaptive": given["adaptive"], "verifier": given.get("verifier", "coupled"),
    }
    if "tree" in given:
        case.options["speculative_config"]["tree"] = given["tree"]
        del case.options["speculative_config"]["num_speculative_tokens"]


def _judge_by_rejection(rng: random.Random, case: FuzzCase) -> None:
    """In some cases with drafts, which then draw nothing at random: only so are tokens those of the plain path."""
    if "speculative_config" in case.options and rng.random() < 0.25:
        case.options["speculative_config"]["verifier"] = "rejection"
        for request in case.requests:
            request.params["temperature"] = 0.0


def _give_stops(rng: random.Random, requests: list[FuzzRequest]) -> None:
    """Some texts end at one of three short strings."""
    for request in requests:
        if rng.random() < 0.25:
            request.params["stop"] = ["".join(rng.choices(CHARACTERS, k=rng.randint(1, 2))) for _ in range(3)]


def _lengthen(rng: random.Random, requests: list[FuzzRequest]) -> None:
    """In some cases most prompts begin with one long text: whole tiles of keys that decoding sequences share."""
    if rng.random() >= 0.25:
        return
    document = _tokens(rng, rng.randint(60, LONGEST_DOCUMENT))
    for request in requests:
        if rng.random() < 0.8:
            request.prompt[:0] = document


def _give_shapes(rng: random.Random, requests: list[FuzzRequest]) -> None:
    """In every second case some outputs must have a shape."""
    if rng.random() < 0.5:
        return
    for request in requests:
        if request.beam is None and rng.random() < 0.4:
            request.params["structured_outputs"] = rng.choice(SHAPES)


def _make_group(rng: random.Random, request: FuzzRequest) -> None:
    """Now and then several sequences, or beams, instead of one."""
    kind = rng.choice(["one", "one", "one", "many", "best", "beams"])
    if kind == "many":
        request.params["n"] = rng.randint(2, 4)
    elif kind == "best":
        request.params |= {"n": rng.randint(1, 2), "best_of": rng.randint(3, 4)}
    elif kind == "beams":
        request.beam = {"beam_width": rng.randint(1, 5), "max_tokens": rng.randint(1, 16),
                        "length_penalty": rng.choice([1.0, 0.0, 2.0, -0.5]),
                        "early_stopping": rng.choice([True, False, "never"]), "ignore_eos": rng.random() < 0.3}


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _model(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([(4, 2), (3, 1), (2, 2)])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": heads[0] * 8,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": rng.random() < 0.5,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }
    if rng.random() < 0.3:
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": rng.choice([5, 16, 33])}
    return config


def _give_integers(rng: random.Random, case: FuzzCase) -> None:
    """Some models multiply integers: their heads and widths are then multiples of 32, so that every layer does."""
    if rng.random() >= 0.2 or "kv_lora_rank" in case.model:
        return
    heads = case.model["num_attention_heads"]
    case.model |= {"hidden_size": heads * 32, "intermediate_size": rng.choice([96, 288])}
    case.options["quantization"] = rng.choice(["int8", "int4"])
    case.options["quantization_group_size"] = rng.choice([32, 32, 64, 0])
    case.options["quantization_zero_points"] = rng.choice([True, False])


def _give_int8_kv(rng: random.Random, case: FuzzCase) -> None:
    """Some models keep keys and values as int8 codes; latents cannot be kept so."""
    if rng.random() < 0.25 and "kv_lora_rank" not in case.model:
        case.options["kv_cache_dtype"] = "int8"


def _give_latents(rng: random.Random, model: dict[str, Any]) -> None:
    """Some models keep latents instead of keys and values, and have experts."""
    if rng.random() >= 0.15:
        return
    model.pop("sliding_window", None)
    model |= {
        "architectures": ["DeepseekV2ForCausalLM"],
        "kv_lora_rank": rng.choice([8, 20]),
        "q_lora_rank": rng.choice([None, 12]),
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    }


def blocks_needed(request: FuzzRequest, block_size: int) -> int:
    """Of all its sequences at their longest: what the engine demands of a pool before it takes the request."""
    shared = len(request.prompt) // block_size
    longest = -(-(len(request.prompt) + request.max_tokens) // block_size)
    return shared + request.num_sequences * (longest - shared)


def _options(rng: random.Random, requests: list[FuzzRequest]) -> dict[str, Any]:
    """An engine with room for the largest request and little more."""
    block_size = rng.choice([1, 2, 3, 4, 8, 16, 32])
    options = {
        "block_size": block_size,
        "num_kv_blocks": max(blocks_needed(r, block_size) for r in requests) + rng.choice([0, 1, 3, 12]),
        "max_num_seqs": max(rng.randint(1, 8), max(r.num_sequences for r in requests)),
        "max_num_batched_tokens": rng.choice([1, 7, 32, 64, 256]),
        "enable_prefix_caching": rng.random() < 0.8,
        "max_num_partial_prefills": rng.randint(1, 3),
        "long_prefill_token_threshold": rng.choice([0, 0, 5, 17]),
        "scheduling_policy": rng.choice(["fcfs", "priority", "fair"]),
        "batching_policy": rng.choice(["decode-first", "decode-first", "prefill-first"]),
        "max_steps_in_flight": rng.choice([1, 1, 2, 3]),
        "num_threads": rng.choice([1, 2]),
        "preemption_mode": "recompute",
    }
    if rng.random() < 0.6:
        # From hardly a block to more than everything needs.
        options |= {"swap_space": rng.choice([1e-4, 1e-3, 1e-2]),
                    "offload": options["enable_prefix_caching"] and rng.random() < 0.6,
                    "preemption_mode": rng.choice(["auto", "swap", "swap", "recompute"])}
    if rng.random() < 0.6:
        options["speculative_config"] = _speculation(rng)
    return options


def _speculation(rng: random.Random) -> dict[str, Any]:
    """Drafts of every kind whose tokens are those of the plain path, mostly as many as there are."""
    config: dict[str, Any] = {"method": rng.choice(["ngram", "suffix", "draft_model", "skip_layers"]),
                              "num_speculative_tokens": rng.choice([1, 2, 3, 5, 8]), "adaptive": rng.random() < 0.2}
    if config["method"] == "draft_model":
        config |= {"model": DRAFT, "load_format": "dummy"}
    elif config["method"] == "skip_layers":
        config["skipped_layers"] = [rng.randrange(2)]
    if rng.random() < 0.4:
        depth = rng.choice([1, 2, 4, 7])
        config["tree"] = {"width": rng.choice([2, 3, 8]), "depth": depth, "nodes": depth + rng.choice([1, 3, 9])}
        del config["num_speculative_tokens"]  # the tree's depth
    return config


def _params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "temperature": 0.0, "seed": rng.getrandbits(32)}
    if rng.random() < 0.6:
        params |= {"temperature": rng.choice([0.3, 1.0, 1.7]), "top_k": rng.choice([0, 0, 3, 20]),
                   "top_p": rng.choice([1.0, 1.0, 0.5, 0.9]), "min_p": rng.choice([0.0, 0.0, 0.1])}
    if rng.random() < 0.3:
        params |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        params |= {"logit_bias": {str(rng.randrange(VOCABULARY)): 4.0}}
    if rng.random() < 0.2:
        params |= {"min_tokens": rng.randint(0, params["max_tokens"])}
    params["logprobs"] = 3
    if rng.random() < 0.15:
        params["prompt_logprobs"] = 2
    params["ignore_eos"] = rng.random() < 0.5
    return params
