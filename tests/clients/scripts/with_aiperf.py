"""`aiperf`: a short profile of each route."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import FOLDER, KEY, MODEL, URL, run

REQUESTS, TOKENS = 12, 16


def profile(name: str, *more: str) -> str:
    """Runs it, and reads what it says of all its requests."""
    folder = Path(name)
    program = [str(Path(sys.executable).parent / "aiperf"), "profile", "--url", URL]
    asked = ["--model", MODEL, "--tokenizer", FOLDER, "--api-key", KEY, "--ui", "none"]
    load = ["--request-count", str(REQUESTS), "--concurrency", "3", "--random-seed", "1"]
    lengths = ["--prompt-input-tokens-mean", "64", "--prompt-output-tokens-mean", str(TOKENS)]
    exact = ["--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{TOKENS}"]
    kept = ["--output-artifact-dir", str(folder), "--no-server-metrics", "--no-gpu-telemetry"]
    env = {**os.environ, "HF_HUB_OFFLINE": ""}  # with it a folder is taken for a name on the hub
    subprocess.run([*program, *asked, *load, *lengths, *exact, *kept, *more], env=env, check=True)
    (report,) = folder.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == REQUESTS, found
    assert "error_request_count" not in found or not found["error_request_count"]["avg"]
    assert abs(found["output_sequence_length"]["avg"] - TOKENS) <= 1
    return f"{found['output_token_throughput']['avg']:.0f} tokens per second"


def chat_streams() -> str:
    return profile("chat", "--endpoint-type", "chat", "--streaming")


def chat_streams_with_usage_in_every_chunk() -> str:
    counted = ("--use-server-token-count", "--per-chunk-usage")
    return profile("usage", "--endpoint-type", "chat", "--streaming", *counted)


def completions_stream() -> str:
    return profile("completions", "--endpoint-type", "completions", "--streaming")


def chat_without_streams() -> str:
    return profile("whole", "--endpoint-type", "chat")


run(
    chat_streams,
    chat_streams_with_usage_in_every_chunk,
    completions_stream,
    chat_without_streams,
)
