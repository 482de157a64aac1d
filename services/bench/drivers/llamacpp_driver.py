"""llama.cpp through its C interface (llama-cpp-python): one `llama_decode` per step.

A prompt is read alone, in one batch as long as itself or `N_BATCH`; then every sequence gets a
token in each step. Greedy tokens are picked by numpy, faster than by llama.cpp's own sampler.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np

N_BATCH = 2048


class LlamaSystem:
    def __init__(self, settings: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings["tokens"]
        params.n_batch = N_BATCH
        params.n_seq_max = settings["max_num_seqs"]
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.kv_unified = True  # one pool for all sequences, as the other systems have it
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        self._unread: list[list[int]] = []
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self.about = {"name": "llama.cpp", "version": llama_cpp.__version__}

    def begin(self, prompts: list[list[int]], outputs: int) -> None:
        self._unread = list(prompts)

    def advance(self) -> list[int]:
        if self._unread:
            return [self._read(self._unread.pop(0))]
        for at, (token, position) in enumerate(zip(self._tokens, self._positions, strict=True)):
            self._put(at, token, position, at, wanted=True)
        self._decode(len(self._tokens))
        self._tokens = [self._greedy(at) for at in range(len(self._tokens))]
        self._positions = [position + 1 for position in self._positions]
        return list(range(len(self._tokens)))

    def _read(self, prompt: list[int]) -> int:
        """Compute a prompt and its first token; gives its sequence."""
        sequence = len(self._tokens)
        for first in range(0, len(prompt), N_BATCH):
            chunk = prompt[first : first + N_BATCH]
            for at, token in enumerate(chunk):
                position = first + at
                self._put(at, token, position, sequence, wanted=position == len(prompt) - 1)
            self._decode(len(chunk))
        self._tokens.append(self._greedy(len(chunk) - 1))
        self._positions.append(len(prompt))
        return sequence

    def _put(self, at: int, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        self._batch.token[at] = token
        self._batch.pos[at] = position
        self._batch.n_seq_id[at] = 1
        self._batch.seq_id[at][0] = sequence
        self._batch.logits[at] = wanted

    def _decode(self, tokens: int) -> None:
        self._batch.n_tokens = tokens
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode gave {status}")

    def _greedy(self, at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, at)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab))
        return int(np.frombuffer(address.contents, np.float32).argmax())

    def drop(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        self._tokens, self._positions = [], []

    def phases_s(self) -> dict[str, float]:
        return {}


def open_system(settings: dict[str, Any]) -> LlamaSystem:
    return LlamaSystem(settings)
