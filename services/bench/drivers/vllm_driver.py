"""vLLM's offline engine, step by step, in this process. Runs in vLLM's own environment.

Prefix caching is off and nothing is detokenised; all else is as vLLM chooses on a CPU. How many
threads it takes is in its environment (`VLLM_CPU_OMP_THREADS_BIND`), which the caller sets.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm import LLM, SamplingParams


class VllmSystem:
    def __init__(self, settings: dict[str, Any]) -> None:
        llm = LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            seed=settings["seed"],
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._runs = 0
        self._ids: list[str] = []
        self._seen: dict[str, int] = {}
        self.about = {"name": "vllm", "version": vllm.__version__}

    def begin(self, prompts: list[list[int]], outputs: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=outputs, detokenize=False
        )
        self._runs += 1
        self._ids = [f"{self._runs}-{at}" for at in range(len(prompts))]
        self._seen = dict.fromkeys(self._ids, 0)
        for name, prompt in zip(self._ids, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def advance(self) -> list[int]:
        got: list[int] = []
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            at = int(output.request_id.split("-")[1])
            got += [at] * (count - self._seen[output.request_id])
            self._seen[output.request_id] = count
        return got

    def drop(self) -> None:
        self._engine.abort_request(self._ids)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def phases_s(self) -> dict[str, float]:
        return {}


def open_system(settings: dict[str, Any]) -> VllmSystem:
    return VllmSystem(settings)
