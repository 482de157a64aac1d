"""Clients that ask the same questions over and over while something happens to the cluster."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
from tests.stack import until

PROMPTS = (
    "What is the capital of France?",
    "def relay(blocks): return",
    "The quick brown fox jumps over the lazy dog. " * 8,
)


@dataclass
class Answer:
    """One stream as a client saw it."""

    text: str = ""
    error: str = ""
    """Anything but an orderly end; empty otherwise."""
    longest_gap_s: float = 0.0
    """Between two pieces of the answer, or its request and the first piece."""


def ask(url: str, model: str, prompt: str, tokens: int) -> Answer:
    """Stream one completion to its end."""
    answer, ended = Answer(), False
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "seed": 7, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0.9}
    last_s = time.monotonic()
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            if response.status_code != 200:
                return Answer(error=f"{response.status_code} {response.read()!r}")
            for line in response.iter_lines():
                if not line:
                    continue
                now_s = time.monotonic()
                answer.longest_gap_s = max(answer.longest_gap_s, now_s - last_s)
                last_s, data = now_s, line.removeprefix("data: ")
                if data == "[DONE]":
                    ended = True
                elif "error" in (event := json.loads(data)):
                    return Answer(answer.text, data)
                else:
                    answer.text += event["choices"][0]["text"]
    except httpx.HTTPError as error:
        return Answer(answer.text, repr(error))
    return answer if ended else Answer(answer.text, "the stream ended without [DONE]")


@dataclass
class Load:
    """One client per prompt, from `with` to its end; an answer under way is waited for."""

    url: str
    model: str
    tokens: int = 100
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {p: [] for p in PROMPTS})

    def __enter__(self) -> Load:
        self.expected = {p: ask(self.url, self.model, p, self.tokens).text for p in PROMPTS}
        self._over = threading.Event()
        self._clients = [threading.Thread(target=self._client, args=(p,)) for p in PROMPTS]
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join()

    def _client(self, prompt: str) -> None:
        while not self._over.is_set():
            answer = ask(self.url, self.model, prompt, self.tokens)
            self.answers[prompt].append(answer)
            if answer.error:
                return

    def wait_answers(self, more: int) -> None:
        """Until so many more answers are complete, or one went wrong."""
        target = self.done + more
        until(lambda: self.done >= target or bool(self.wrong()), 60, f"{more} more answers")

    @property
    def done(self) -> int:
        return sum(len(answers) for answers in self.answers.values())

    @property
    def longest_gap_s(self) -> float:
        return max(a.longest_gap_s for answers in self.answers.values() for a in answers)

    def wrong(self) -> Counter[str]:
        """Answers that are not whole and equal to the one given before anything happened."""
        found: Counter[str] = Counter()
        for prompt, answers in self.answers.items():
            for answer in answers:
                if answer.error:
                    found[answer.error] += 1
                elif answer.text != self.expected[prompt]:
                    found[f"another answer to {prompt!r}"] += 1
        return found
