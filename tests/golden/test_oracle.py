"""L2: greedy tokens equal those of `transformers` in float32 on the same dequantised weights.

They are compared up to the first step whose two largest logits are closer than `TOLERANCE`: from
there on a sum in another order may rightly pick the other token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path

import gguf
import pytest
import torch
import transformers  # loads its parts when they are named
from tests.golden.prompts import Prompt, prompts

from kvrelay.shared.checkpoint.config import read_config
from kvrelay.shared.checkpoint.fetch import default_model_path, is_fetched
from kvrelay.shared.checkpoint.source import resolve_model
from kvrelay.shared.engine.plan import Plan, PlannedRow, Runner
from kvrelay.shared.kv.layout import KVLayout
from kvrelay.shared.types import SamplingParams
from kvrelay.shared.worker.capacity import Capacity
from kvrelay.shared.worker.compute import ComputeSettings, load_compute

TOLERANCE = 1e-3
STEPS = 64
TOGETHER = 10
"""Prompts that we compute in one batch."""
BLOCK_SIZE = 16
BLOCKS = TOGETHER * 1600 // BLOCK_SIZE
GREEDY = SamplingParams(temperature=0.0)

pytestmark = pytest.mark.skipif(
    not is_fetched(default_model_path()), reason="the default model is not fetched (make up)"
)


@dataclass(frozen=True)
class Oracle:
    """Both implementations of one model, and its tokenizer."""

    theirs: transformers.PreTrainedModel
    ours: Runner
    tokenizer: transformers.AutoTokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        if not prompt.chat:
            return self.tokenizer(prompt.text)["input_ids"][: prompt.tokens]
        turn = [{"role": "user", "content": prompt.text}]
        return self.tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, return_dict=False
        )

    def got(self, prompts_ids: list[list[int]]) -> list[list[int]]:
        """Our next tokens (past EOS too), all prompts together, in chunks of up to 128."""
        known, start = [list(ids) for ids in prompts_ids], [0] * len(prompts_ids)
        tables = _tables([len(ids) + STEPS for ids in prompts_ids])
        while any(
            self._missing(ids, prompt) for ids, prompt in zip(known, prompts_ids, strict=True)
        ):
            rows = []
            for at, ids in enumerate(known):
                if chunk := ids[start[at] : start[at] + 128]:
                    last = start[at] + len(chunk) == len(ids)
                    rows.append(PlannedRow(str(at), chunk, start[at], tables[at], last, GREEDY))
                    start[at] += len(chunk)
            for key, token in self.ours.run(Plan(0, tuple(rows))).sampled.items():
                if self._missing(known[int(key)], prompts_ids[int(key)]):
                    known[int(key)].append(token)
        return [ids[len(prompt) :] for ids, prompt in zip(known, prompts_ids, strict=True)]

    @staticmethod
    def _missing(known: list[int], prompt: list[int]) -> bool:
        return len(known) < len(prompt) + STEPS

    def sure_steps(self, prompt: list[int], tokens: list[int]) -> int:
        """Check `tokens` against their argmax at each step, up to the first step in doubt.

        One pass over prompt and tokens gives the logits of each step of their own greedy decoding,
        as long as the tokens before it are theirs, which the steps before have shown.
        """
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            logits = self.theirs(ids, use_cache=False, logits_to_keep=STEPS).logits[0]
        best = logits.topk(2)
        for step, token in enumerate(tokens):
            if best.values[step, 0] - best.values[step, 1] < TOLERANCE:
                return step
            assert token == int(best.indices[step, 0]), f"step {step} after {prompt[-20:]}"
        return STEPS


def _tables(lengths: list[int]) -> list[range]:
    ends = list(accumulate(-(-length // BLOCK_SIZE) for length in lengths))
    return [range(end - -(-n // BLOCK_SIZE), end) for end, n in zip(ends, lengths, strict=True)]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    path = default_model_path()
    source = resolve_model(str(path))
    config = read_config(source)
    layout = KVLayout(config.layers, config.kv_heads, config.head_dim, BLOCK_SIZE, "float32")
    capacity = Capacity(layout, BLOCKS, 1600)
    read = functools.cache(gguf.GGUFReader)
    with pytest.MonkeyPatch.context() as patch:
        # Config, weights and tokenizer each parse the file again, for seconds, and the names of
        # all tensors are made anew for each module of the model.
        patch.setattr(gguf, "GGUFReader", lambda path: read(str(path)))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        theirs = their_model(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    threads = torch.get_num_threads()
    settings = ComputeSettings("auto", threads, config.vocab)
    ours = load_compute(source, config, capacity, settings).runner
    torch.set_num_threads(threads)
    return Oracle(theirs, ours, tokenizer)


def their_model(path: Path) -> transformers.PreTrainedModel:
    """`from_pretrained(gguf_file=...)` in its own pieces: the whole of it needs `accelerate`."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loader = import_module("transformers.modeling_gguf_pytorch_utils")
    tensors = loader.load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    return model


def compare(oracle: Oracle, chosen: list[Prompt]) -> int:
    """How many prompts were beyond doubt to their last token; all must agree as far as they are."""
    to_the_end = 0
    for group in (chosen[at : at + TOGETHER] for at in range(0, len(chosen), TOGETHER)):
        prompts_ids = [oracle.encode(prompt) for prompt in group]
        for ids, tokens in zip(prompts_ids, oracle.got(prompts_ids), strict=True):
            to_the_end += oracle.sure_steps(ids, tokens) == STEPS
    return to_the_end


@pytest.mark.timeout(400)  # a quarter minute alone, minutes on a machine with more to do
def test_ten_prompts_give_the_greedy_tokens_of_transformers(oracle: Oracle) -> None:
    short = [prompt for prompt in prompts() if prompt.tokens is None or prompt.tokens < 130]
    assert compare(oracle, short[::7][:10]) >= 5


@pytest.mark.oracle
@pytest.mark.timeout(3600)
def test_a_hundred_prompts_give_the_greedy_tokens_of_transformers(
    oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = prompts()
    assert len(chosen) == 100
    to_the_end = compare(oracle, chosen)
    with capsys.disabled():
        print(f"\n{to_the_end} of {len(chosen)} prompts were beyond doubt for all {STEPS} tokens")
