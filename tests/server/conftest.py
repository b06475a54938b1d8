"""A byte tokenizer with a chat template, a scripted engine behind a real port, and a tiny model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.server.app import App
from quire.tokenizer.tokenizer import Tokenizer
from tests.server.scripted import ScriptedEngine, running

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}


def byte_backend() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def make_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer(byte_backend(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=template)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a byte tokenizer and a chat template; load it with load_format dummy."""
    folder = tmp_path_factory.mktemp("tiny")
    backend = byte_backend()
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    size = backend.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": size, "eos_token_id": size - 1}))
    return folder


class Served:
    """A scripted engine behind a port, and clients of it."""

    def __init__(self, engine: ScriptedEngine, address: str, app: App, key: str = "none") -> None:
        self.engine, self.address, self.app = engine, address, app
        self.http = httpx.Client(base_url=address, timeout=30.0)
        self.openai = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=30.0)

    def chat(self, content: str = "Hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    def params(self) -> Any:
        """What the engine was asked last."""
        return self.engine.asked[-1][1]


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Starts servers that live as long as the module's tests: `serve("text to answer", template=…, max_n=…)`."""
    with ExitStack() as stack:

        def start(text: str = "Hello, world!", *, template: str = TEMPLATE, key: str = "none", tokens_at_once: int = 1,
                  **options: Any) -> Served:
            engine = ScriptedEngine(make_tokenizer(template), text, tokens_at_once=tokens_at_once)
            address, app = stack.enter_context(running(engine, **options))
            return Served(engine, address, app, key)

        yield start


@pytest.fixture(scope="module")
def server(serve: Serve) -> Served:
    """One that the tests of a module share."""
    return serve()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream; the last event must be [DONE]."""
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
