"""schemathesis over the OpenAPI document of a real cluster: `python tests/fuzz_api.py`.

Whatever a request is, the answer is one that the document tells: no 500, no undocumented status or
content type, no body of another shape, and none that takes long.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.stack import Stack
from tests.tinymodel import write_tiny_model

CHECKS = (
    *("not_a_server_error", "status_code_conformance"),
    *("content_type_conformance", "response_schema_conformance"),
)
TOKENS, ANSWER_S = 512, 20


def schemathesis(url: str, seconds: int, seed: int, folder: Path) -> int:
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--max-time", str(seconds), "--seed", str(seed)),
        *("--max-response-time", str(ANSWER_S), "--request-timeout", str(ANSWER_S)),
        *("--phases", "examples,coverage,fuzzing", "--no-shrink", "--continue-on-failure"),
        *("--workers", "2", "--generation-database", "none", "--warnings", "off"),
    ]
    return subprocess.run(command, cwd=folder, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvrelay-fuzz-") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", head_dim=64, max_position_embeddings=TOKENS)
        stack = Stack(folder / "stack", model, kv_cache_memory_bytes=64 << 20, threads=1)
        try:
            stack.start()
            failed = schemathesis(stack.url, options.seconds, options.seed, folder)
            healthy = stack.ready() and all(worker.popen.poll() is None for worker in stack.workers)
        finally:
            stack.stop()
    if not healthy:
        print("the cluster did not live through it")
    return failed or int(not healthy)


if __name__ == "__main__":
    sys.exit(main())
