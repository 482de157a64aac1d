"""Clients as people install them, against a split cluster: `python -m tests.clients.run [NAME]...`.

Without names all but those that take gigabytes; `--all` is everything. Exit status 1: a check
failed, or a client could not be installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.clients.homes import CannotInstall, Home
from tests.clients.model import model_folder
from tests.stack import Stack, running, until

OURS = "ours"
"""The environment that runs this: `openai` is a dependency of the other tests."""
KEY = "a-key-of-a-client"
SCRIPT_S = 600.0


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    home: str
    script: str
    quick: bool = True


CLIENTS = (
    Client("openai", OURS, "with_openai.py"),
    Client("langchain-openai", "langchain", "with_langchain.py"),
    Client("litellm", "litellm", "with_litellm.py"),
    Client("instructor", "instructor", "with_instructor.py"),
    Client("llama-index", "llama_index", "with_llama_index.py"),
    Client("openai-node", "node", "with_openai.mjs"),
    Client("ai-sdk", "node", "with_ai_sdk.mjs"),
    Client("lm-eval", "lm_eval", "with_lm_eval.py"),
    Client("guidellm", "guidellm", "with_guidellm.py", quick=False),
    Client("aiperf", "aiperf", "with_aiperf.py", quick=False),
)


def command(client: Client) -> list[str]:
    if client.home == OURS:
        return [sys.executable, str(Path(__file__).parent / "scripts" / client.script)]
    return Home(client.home).command(client.script)


def passes(client: Client, env: Mapping[str, str], scratch: Path) -> bool:
    """Its script's lines are the report; what it left running would be left in the cluster."""
    begun = time.monotonic()
    print(f"== {client.name}", flush=True)
    try:
        program = command(client)
    except CannotInstall as reason:
        print(f"FAIL  install: {reason}")
        return False
    installed_s = time.monotonic() - begun
    scratch.mkdir()
    try:
        done = subprocess.run(program, env=env, cwd=scratch, timeout=SCRIPT_S)
    except subprocess.TimeoutExpired:
        print(f"FAIL  {client.script} did not end within {SCRIPT_S:g} s")
        return False
    took = time.monotonic() - begun - installed_s
    print(f"== {client.name}: {'failed' if done.returncode else 'passed'} in {took:.0f} s")
    return done.returncode == 0


def environment(stack: Stack, folder: Path, home: Path) -> dict[str, str]:
    """Nothing reaches out, and nothing of this user's settings is read."""
    return {
        **os.environ,
        "HOME": str(home),
        "KVRELAY_URL": stack.url,
        "KVRELAY_MODEL": stack.model,
        "KVRELAY_MODEL_FOLDER": str(folder),
        "KVRELAY_SAYS": "Paris",
        "KVRELAY_KEY": KEY,
        "OPENAI_API_KEY": KEY,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--all", action="store_true", help="those that take gigabytes too")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    asked = args.names or [c.name for c in CLIENTS if c.quick or args.all]
    chosen = [client for client in CLIENTS if client.name in asked]
    model = model_folder()
    with tempfile.TemporaryDirectory(prefix="kvrelay-clients-") as name:
        scratch = Path(name)
        guarded = {"api_key": (KEY,), "admin_port": 0}
        with running(scratch / "stack", model, dtype="float32", **guarded) as stack:
            env = environment(stack, model, scratch)
            results = {c.name: passes(c, env, scratch / c.name) for c in chosen}
            until(stack.baseline, 10.0, "nothing is held when all clients are gone")
    failed = [name for name, passed in results.items() if not passed]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
