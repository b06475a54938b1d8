"""Engines with a disk beneath them: the same tokens and log-probabilities, whatever happened to the files."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kvpool import disk

PROMPT = random.Random(3).choices(range(3, 97), k=700)
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, logprobs=2)




def open_engine(model: Path, folder: Path | None, block_size: int = 16, **options: Any) -> LLM:
    if folder is not None:
        options = {"kv_disk": f"{folder}:200MB", "kv_pool_policy": "all"} | options
    return LLM(str(model), skip_tokenizer_init=True, block_size=block_size, num_kv_blocks=4096 // block_size, **options)


def ask(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = PARAMS) -> Any:
    answer = llm.generate([prompt], params, use_tqdm=False)[0]
    assert answer.error is None
    llm.check()
    return answer


def said(answer: Any) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in answer.outputs]


def units(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "units").rglob("*") if path.is_file())


@pytest.fixture
def reference(models: Any) -> Iterator[Any]:
    with open_engine(models("llama"), None) as llm:
        yield ask(llm)


@pytest.mark.parametrize("family", ["llama", "gemma3", "starcoder2", "gpt2"])
def test_a_restarted_engine_takes_the_prefix_from_disk_with_every_bit(family: str, models: Any, tmp_path: Path) -> None:
    """Also one with blocks of another size, and where the device has a part of a unit already."""
    model = models(family)
    with open_engine(model, None) as llm:
        plain = ask(llm)
    with open_engine(model, tmp_path) as llm:
        assert said(ask(llm)) == said(plain)
    for block_size in (4, 128):
        with open_engine(model, tmp_path, block_size) as llm:
            again = ask(llm)
            assert said(again) == said(plain)
            assert again.num_cached_tokens == 512 and llm.metrics()["tier_hit_tokens"] == 512
    with open_engine(model, tmp_path, max_num_batched_tokens=100) as llm:
        part = ask(llm, PROMPT[:300])
        assert part.num_cached_tokens == 256
        both = ask(llm)
        assert said(both) == said(plain) and both.num_cached_tokens == 512


def test_samples_and_outputs_share_what_comes_from_disk(models: Any, tmp_path: Path) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=11, max_tokens=300, ignore_eos=True)
    with open_engine(models("gemma3"), None) as llm:
        plain = said(ask(llm, PROMPT[:400], params))
    for _ in range(2):
        with open_engine(models("gemma3"), tmp_path) as llm:
            assert said(ask(llm, PROMPT[:400], params)) == plain
    # Answers are prefixes of the next turn: the first one's 300 tokens are kept like the prompt's 400.
    with open_engine(models("gemma3"), tmp_path) as llm:
        assert ask(llm, [*PROMPT[:400], *plain[0][0], 5]).num_cached_tokens == 512


def test_what_the_last_step_has_computed_is_kept_too(models: Any, tmp_path: Path) -> None:
    """A request of one step left nothing: no other step came that could have started the copy."""
    one = SamplingParams(temperature=0.0, max_tokens=1)
    with open_engine(models("llama"), tmp_path) as llm:
        ask(llm, PROMPT[:512], one)
    assert len(units(tmp_path)) == 2
    with open_engine(models("llama"), tmp_path) as llm:
        assert ask(llm, PROMPT[:512], one).num_cached_tokens == 496  # the last token is always computed, with its block


@pytest.mark.parametrize("how", ["flip", "cut", "swap", "gone", "empty", "foreign"])
def test_damaged_units_cost_the_hit_and_nothing_else(how: str, reference: Any, models: Any, tmp_path: Path) -> None:
    with open_engine(models("llama"), tmp_path) as llm:
        ask(llm)
    first, second = units(tmp_path)
    contents = first.read_bytes(), second.read_bytes()
    for path, other in ((first, contents[1]), (second, contents[0])):
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 4
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes({"flip": damaged, "cut": damaged[:-1], "swap": other, "empty": b"",
                              "foreign": os.urandom(len(damaged))}[how])
    with open_engine(models("llama"), tmp_path) as llm:
        answer = ask(llm)
        assert said(answer) == said(reference) and answer.num_cached_tokens == 0
        assert llm.metrics()["kv_disk_units_bad"] == (how != "gone")
    # What was bad was replaced by what was computed instead.
    with open_engine(models("llama"), tmp_path) as llm:
        again = ask(llm)
        assert said(again) == said(reference) and again.num_cached_tokens >= 256


def test_a_bad_unit_in_the_middle_leaves_what_came_before(reference: Any, models: Any, tmp_path: Path) -> None:
    with open_engine(models("llama"), tmp_path) as llm:
        ask(llm, PROMPT[:300])
    (first,) = units(tmp_path)
    with open_engine(models("llama"), tmp_path) as llm:
        ask(llm)
    (second,) = set(units(tmp_path)) - {first}
    second.write_bytes(bytes(second.stat().st_size))
    with open_engine(models("llama"), tmp_path) as llm:
        answer = ask(llm)
        assert said(answer) == said(reference) and answer.num_cached_tokens == 256
        assert llm.metrics()["fetches_failed"] == 1


def test_other_weights_another_salt_and_another_secret_find_nothing(models: Any, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(models("llama"), tmp_path) as llm:
        ask(llm)
    with open_engine(models("llama", seed=1), tmp_path) as llm:
        assert ask(llm).num_cached_tokens == 0
    with open_engine(models("llama"), tmp_path, quantization="int8") as llm:
        assert ask(llm).num_cached_tokens == 0, "KV of weights that were rounded is other KV"
    with open_engine(models("llama"), tmp_path) as llm:
        salted = llm.generate([{"prompt_token_ids": PROMPT, "cache_salt": "mine"}], PARAMS, use_tqdm=False)[0]
        assert salted.num_cached_tokens == 0 and ask(llm).num_cached_tokens == 512
    monkeypatch.setenv("QUIRE_KV_SECRET", "a secret of other replicas")
    with open_engine(models("llama"), tmp_path) as llm:
        assert ask(llm).num_cached_tokens == 0


def test_a_disk_that_is_full_or_gone_costs_no_request(reference: Any, models: Any, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: memoryview) -> int:
        raise OSError(28, "no space left on device")

    with open_engine(models("llama"), tmp_path) as llm:
        monkeypatch.setattr(disk.os, "write", full)
        assert said(ask(llm)) == said(reference)
    monkeypatch.undo()
    assert units(tmp_path) == []


def test_a_second_engine_is_refused_the_directory(models: Any, tmp_path: Path) -> None:
    with open_engine(models("llama"), tmp_path), pytest.raises(ConfigError, match="in use"):
        open_engine(models("llama"), tmp_path)
    for wrong, field in (({"kv_disk": "nowhere"}, "kv_disk"), ({"kv_disk": f"{tmp_path}:much"}, "kv_disk"),
                         ({"block_size": 24}, "block_size"), ({"enable_prefix_caching": False}, "kv_disk"),
                         ({"distributed_executor_backend": "ray"}, "kv_disk")):
        with pytest.raises(ConfigError) as caught:
            open_engine(models("llama"), tmp_path, **wrong)
        assert caught.value.field == field
    open_engine(models("llama"), tmp_path).close()


KILLED = """
import os, sys
from pathlib import Path
from tests.kvpool.test_disk_engine import PROMPT, ask, open_engine, units
llm = open_engine(Path(sys.argv[1]), Path(sys.argv[2]))
ask(llm)
while len(units(Path(sys.argv[2]))) < 2:
    pass
os.kill(os.getpid(), 9)
"""


def test_an_engine_killed_with_9_leaves_its_prefixes_to_the_next(reference: Any, models: Any, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(models("llama")), str(tmp_path)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    with open_engine(models("llama"), tmp_path) as llm:
        again = ask(llm)
        assert said(again) == said(reference) and again.num_cached_tokens == 512


def test_smollm2_answers_from_disk_what_it_would_have_computed(smollm2: str, tmp_path: Path) -> None:
    prompt = random.Random(8).choices(range(1000, 40000), k=300)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    answers = []
    for folder in (None, tmp_path, tmp_path):
        options = {} if folder is None else {"kv_disk": f"{folder}:200MB", "kv_pool_policy": "all"}
        with LLM(smollm2, num_kv_blocks=64, **options) as llm:
            answers.append(llm.generate([prompt], params, use_tqdm=False)[0])
    assert said(answers[0]) == said(answers[1]) == said(answers[2]) and answers[2].num_cached_tokens == 256


def test_an_engine_that_cannot_start_lets_go_of_its_disk(models: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 32)
    with pytest.raises(ConfigError, match="kv_pool: cannot listen"):
        open_engine(models("llama"), tmp_path / "kv", kv_pool="redis://127.0.0.1:1/0?listen=203.0.113.1:1",
                    kv_secret_file=str(tmp_path / "secret"))
    with open_engine(models("llama"), tmp_path / "kv") as llm:
        ask(llm)


def test_a_disk_too_small_for_one_unit_is_refused_with_the_size_of_one(models: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"10,000 bytes.*256 tokens take [\d,]+") as caught:
        open_engine(models("llama"), tmp_path, kv_disk=f"{tmp_path}:10000")
    assert caught.value.field == "kv_disk"
    open_engine(models("llama"), tmp_path).close()  # the failed start let go of the directory
