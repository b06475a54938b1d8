"""Finds which servers hold how much of a request's prompt: its tokens, their names, and the index of who holds them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from quire.errors import QuireError
from quire.kvcache.prefix import HashChain
from quire.kvcache.secret import derived_secret, secret_name
from quire.router.asked import Asked
from quire.router.fleet import Fleet
from quire.router.follower import Follower
from quire.router.index import KVIndex
from quire.router.prompts import PromptReader, PromptTokens, load_tokenizer, on_this_machine
from quire.router.replica import Replica
from quire.server.telemetry.log import event

_PAUSE_SECONDS = 1.0


class Holders:
    """For the servers that share the router's secret; of the others nothing is known, and they are chosen by load."""

    def __init__(self, fleet: Fleet, secret: bytes, tokenizer: str | None, max_blocks: int) -> None:
        self.index = KVIndex(max_blocks)
        self._fleet = fleet
        self._key = derived_secret(secret, "prefix")
        self._name = secret_name(secret)
        self._chains: dict[int, HashChain] = {}
        self._reader: PromptReader | None = None
        self._wanted = tokenizer
        """Whose tokenizer; None: that of the servers' model, when one has said which that is."""
        self._loading: asyncio.Task[None] | None = None
        fleet.follow = self._follow
        fleet.on_gone = lambda replica: self.index.cleared(replica.number)

    def _follow(self, replica: Replica) -> asyncio.Task[None]:
        follower = Follower(replica, self.index, self._name, self._fleet.own_headers)
        return asyncio.create_task(follower.run(), name=f"follow {replica.url}")

    async def start(self) -> None:
        """Load the tokenizer that was asked for; one that has to be guessed is looked for beside the requests."""
        if self._wanted is not None:
            self._reader = PromptReader(*await asyncio.to_thread(load_tokenizer, self._wanted))
        else:
            self._reader = PromptReader(None)
            self._loading = asyncio.create_task(self._guess(), name="tokenizer")

    async def _guess(self) -> None:
        while True:
            model = next((each.model for each in self._fleet if each.model is not None), None)
            if model is not None:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        advice = "prompts that are texts are routed by load: say whose tokenizer with --tokenizer"
        try:
            if await asyncio.to_thread(on_this_machine, model):
                self._reader = PromptReader(*await asyncio.to_thread(load_tokenizer, model))
                event(logging.INFO, "tokenizer", model=model)
            else:
                event(logging.WARNING, "no_tokenizer", model=model, advice=advice)
        except (QuireError, OSError, ValueError) as error:
            event(logging.WARNING, "no_tokenizer", model=model, why=str(error), advice=advice)

    async def look(self, path: str, body: bytes, tenant: str | None, asked: Asked) -> None:
        """Fill in what is known of a request's prompt."""
        assert self._reader is not None
        lengths = [each.card.get("max_model_len") for each in self._fleet]
        known = [length for length in lengths if isinstance(length, int)]
        prompt = None if asked.after is not None else await self._reader.read(path, body, tenant,
                                                                              max(known, default=None))
        if prompt is not None:
            asked.num_tokens = max(1, len(prompt.tokens) + prompt.others)
            asked.held = self.find(prompt)

    def find(self, prompt: PromptTokens) -> dict[int, int]:
        """By number of a server: tokens of the prompt that it holds. Never all: an engine computes the last one."""
        sizes = {each.block_size for each in self._fleet if each.block_size}
        found: dict[int, int] = {}
        for size in sizes:
            able = [each.number for each in self._fleet if each.block_size == size]
            blocks = self.index.leading(self._names(size, prompt), able)
            found.update({number: count * size for number, count in blocks.items()})
        return found

    def _names(self, size: int, prompt: PromptTokens) -> Iterator[bytes]:
        if size not in self._chains:
            self._chains[size] = HashChain(size, self._key)
        return self._chains[size].names(prompt.root, prompt.tokens[:-1])

    def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        if self._reader is not None:
            self._reader.close()


async def start_holders(fleet: Fleet) -> Holders | None:
    """To be called before the fleet is started; None where the policy does not go by what servers hold."""
    config = fleet.config
    if config.policy != "cache-aware":
        return None
    secret = config.kv_secret
    if secret is None:
        event(logging.WARNING, "no_kv_secret", advice="requests are routed by load: set QUIRE_KV_SECRET here and for "
                                                      "the servers, so that the router knows who holds which prefix")
        return None
    holders = Holders(fleet, secret, config.tokenizer, config.max_index_blocks)
    await holders.start()
    return holders
