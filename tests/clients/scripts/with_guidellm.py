"""`guidellm`: a short benchmark of each route."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import FOLDER, KEY, MODEL, URL, run

REQUESTS, PROMPT, ANSWER = 12, 64, 16


def benchmark(route: str, stream: bool) -> str:
    """Runs it, and reads what it says of all its requests."""
    report = Path(f"{route.replace('/', '-')}-{stream}.json")
    backend = {"kind": "openai_http", "target": URL, "model": MODEL, "api_key": KEY}
    lengths = {"prompt_tokens": PROMPT, "output_tokens": ANSWER}
    options = {
        "--backend": {**backend, "request_format": route, "stream": stream},
        "--profile": {"kind": "concurrent", "streams": 3},
        "--constraint": {"kind": "max_requests", "count": REQUESTS},
        "--tokenizer": {"kind": "huggingface_auto", "model": FOLDER},
        "--data": {"kind": "synthetic_text", **lengths},
        "--output": {"kind": "json", "path": str(report)},
    }
    program = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-progress"]
    said = [part for name, value in options.items() for part in (name, json.dumps(value))]
    subprocess.run([*program, *said], env={**os.environ, "COLUMNS": "120"}, check=True)
    (found,) = json.loads(report.read_text())["benchmarks"]
    requests = found["metrics"]["request_totals"]
    assert requests["successful"] == REQUESTS and requests["errored"] == 0, requests
    tokens = found["metrics"]["output_token_count"]["successful"]["mean"]
    assert tokens == ANSWER, tokens
    speed = found["metrics"]["output_tokens_per_second"]["successful"]["mean"]
    return f"{speed:.0f} tokens per second"


def chat_streams() -> str:
    return benchmark("/v1/chat/completions", True)


def chat_without_streams() -> str:
    return benchmark("/v1/chat/completions", False)


def completions_stream() -> str:
    return benchmark("/v1/completions", True)


run(chat_streams, chat_without_streams, completions_stream)
