"""`lm-eval`: likelihoods and generation on local data, by token ids and by texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lm_eval
from checks import BASE, FOLDER, KEY, MODEL, run
from lm_eval.tasks import TaskManager

DATA = Path(__file__).parent.parent / "data/lm_eval"
os.chdir(DATA)  # the tasks name their data beside them


def evaluated(tasks: list[str], kind: str = "local-completions", **how: Any) -> dict[str, Any]:
    path = "chat/completions" if "chat" in kind else "completions"
    return lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": MODEL,
            "base_url": f"{BASE}/{path}",
            "num_concurrent": 4,
            "max_retries": 1,
            "max_length": 2048,
            **how.pop("model_args", {}),
        },
        tasks=tasks,
        task_manager=TaskManager(include_path=str(DATA), include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
        **how,
    )


def likelihoods(**model_args: Any) -> list[float]:
    """Of each choice of each question, and of each text as a whole."""
    result = evaluated(["capitals", "sayings"], model_args=model_args)
    assert result["results"]["capitals"]["acc,none"] >= 0.5  # a guess is right once in four
    assert result["results"]["sayings"]["bits_per_byte,none"] < 2.5
    samples = result["samples"]["capitals"] + result["samples"]["sayings"]
    return [
        response[0] if isinstance(response, tuple | list) else response
        for sample in samples
        for response in sample["filtered_resps"]
    ]


def likelihoods_are_the_same_by_token_ids_and_by_texts_in_batches_and_alone() -> str:
    local = {"tokenizer_backend": "huggingface", "tokenizer": FOLDER}
    by_ids = likelihoods(**local, tokenized_requests=True)
    by_text = likelihoods(**local, tokenized_requests=False)
    batched = likelihoods(**local, tokenized_requests=True, batch_size=8)
    for other in (by_text, batched):
        assert max(abs(a - b) for a, b in zip(by_ids, other, strict=True)) < 1e-3
    return f"{len(by_ids)} likelihoods"


def the_servers_tokenizer_gives_the_same() -> None:
    local = likelihoods(tokenizer_backend="huggingface", tokenizer=FOLDER)
    remote = likelihoods(tokenizer_backend="remote", auth_token=KEY)
    assert max(abs(a - b) for a, b in zip(local, remote, strict=True)) < 1e-3


def named(result: dict[str, Any], least: int) -> str:
    """In how many of the answers the right city is."""
    samples = result["samples"]["answers"]
    right = sum(sample["target"] in sample["resps"][0][0] for sample in samples)
    assert right >= least, [sample["resps"] for sample in samples]
    return f"{right} of {len(samples)} right"


def answers_are_generated() -> str:
    local = {"tokenizer_backend": "huggingface", "tokenizer": FOLDER}
    return named(evaluated(["answers"], model_args=local), 5)


def chat_answers_are_generated() -> str:
    result = evaluated(["answers"], "local-chat-completions", apply_chat_template=True)
    return named(result, 1)  # many answers are in the language of the country


run(
    likelihoods_are_the_same_by_token_ids_and_by_texts_in_batches_and_alone,
    the_servers_tokenizer_gives_the_same,
    answers_are_generated,
    chat_answers_are_generated,
)
