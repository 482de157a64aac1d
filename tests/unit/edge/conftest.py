"""A rig for the HTTP edge: a small tokenizer, a scripted cluster, the application, a server."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvrelay.services.router.generation import Readiness, TokenEvent
from kvrelay.services.router.http import Server
from kvrelay.services.router.openai.api import Pages, create_app
from kvrelay.services.router.openai.generate import Draws, EdgeSettings
from kvrelay.services.router.validate import ModelCard, model_card
from kvrelay.shared.checkpoint.tokenizer import TokenizerInfo, load_tokenizer
from kvrelay.shared.types import FinishReason, Logprobs, ValidRequest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_MODEL_LEN = 200

Step = TokenEvent | BaseException | asyncio.Event
Script = Callable[[ValidRequest], Sequence[Step]]


@dataclass
class ScriptedGeneration:
    """Plays steps: events are yielded, errors raised, gates waited for."""

    steps: Sequence[Step]
    cached_tokens: int = 0
    closes: int = 0
    stopped: list[int] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        for step in self.steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, BaseException):
                raise step
            else:
                await asyncio.sleep(0)  # like a real one, it comes back to the loop
                yield step

    def stop_leg(self, leg: int) -> None:
        self.stopped.append(leg)

    async def aclose(self) -> None:
        self.closes += 1
        self.closed.set()


def logprobs_of(token: int, at: int, top: int) -> Logprobs:
    """Of a token at a place: made up, but always the same. Every fifth has no chance at all."""
    likeliest = [((token + at + 7 * k) % 263, -0.25 - k) for k in range(top)]
    chosen = -math.inf if at % 5 == 4 else -0.5 - (token * 31 + at) % 64 / 8
    return Logprobs(chosen, rank=1 + (token + at) % 9, top=tuple(likeliest))


def event_of(
    request: ValidRequest, leg: int, index: int, token: int, finish: FinishReason | None = None
) -> TokenEvent:
    """With the logprobs that the request wants."""
    spec = request.legs[leg]
    asked = request.legs[leg - spec.choice].sampling
    top, prompt_top = spec.sampling.logprobs, asked.prompt_logprobs
    prompt: tuple[Logprobs, ...] = ()
    if index == 0 and prompt_top is not None:
        prompt = tuple(logprobs_of(id, i, prompt_top) for i, id in enumerate(spec.prompt) if i)
    own = None if top is None else logprobs_of(token, leg + index, top)
    return TokenEvent(leg, index, token, finish, own, prompt)


class ScriptedCluster:
    """Remembers each request it was given and the generation it answered with."""

    def __init__(self, tokenizer: TokenizerInfo) -> None:
        ids = range(tokenizer.vocab_size)
        self.byte_ids = {tokenizer.token_bytes(id): id for id in reversed(ids)}
        self.eos = tokenizer.special.eos_token_ids[-1]
        self.script: Script = self.saying("hello")
        self.requests: list[ValidRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.is_ready = Readiness(True, "")
        self.cached_tokens = 0

    def generate(self, request: ValidRequest) -> ScriptedGeneration:
        generation = ScriptedGeneration(self.script(request), self.cached_tokens)
        self.requests.append(request)
        self.generations.append(generation)
        return generation

    def readiness(self) -> Readiness:
        return self.is_ready

    def saying(self, text: str, end: FinishReason = FinishReason.STOP) -> Script:
        """Every leg says the text, a token for each byte, legs in turn; EOS follows for STOP."""
        return self.drawing([self.byte_ids[bytes([byte])] for byte in text.encode()], end)

    def drawing(self, ids: Sequence[int], end: FinishReason = FinishReason.STOP) -> Script:
        """The same with token ids; with the logprobs that a request wants."""
        return lambda request: list(self._events(request, ids, end))

    def _events(
        self, request: ValidRequest, ids: Sequence[int], end: FinishReason
    ) -> Iterator[TokenEvent]:
        tokens = [*ids, self.eos] if end is FinishReason.STOP else ids
        for index, token in enumerate(tokens):
            for leg in range(len(request.legs)):
                finish = end if index == len(tokens) - 1 else None
                yield event_of(request, leg, index, token, finish)


def write_model(folder: Path, template: str, control: Sequence[str] = ()) -> Path:
    """Every byte, a few longer tokens, three control tokens and more, a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "ll", "hell", "hello", "Ġw", "or"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r")]
    vocab = {token: id for id, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *control]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a ChatML template."""
    return write_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> TokenizerInfo:
    return load_tokenizer(model_folder)


@pytest.fixture(scope="session")
def card(tokenizer: TokenizerInfo) -> ModelCard:
    return model_card(["tiny", "org/tiny"], tokenizer, MAX_MODEL_LEN, created_s=1_700_000_000)


@pytest.fixture
def cluster(tokenizer: TokenizerInfo) -> ScriptedCluster:
    return ScriptedCluster(tokenizer)


@pytest.fixture
def app(cluster: ScriptedCluster, card: ModelCard) -> Iterator[FastAPI]:
    """Request ids are 1, 2, ...; the drawn seed is 7; it is always the same second."""
    ids = map(str, count(1))
    draws = Draws(
        request_id=lambda: next(ids),
        seed=lambda: 7,
        wall_s=lambda: 1_750_000_000,
        now_ns=lambda: 99,
    )
    settings = EdgeSettings()
    yield create_app(cluster, lambda: card, settings, pages=Pages(lambda: b"up 1\n"), draws=draws)
    settings.grammars.close()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Straight into the application, without a socket."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as http:
        yield http


@pytest.fixture
async def port(app: FastAPI) -> AsyncIterator[int]:
    """A real server on a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()[1]
        server.stop()
        await serving
