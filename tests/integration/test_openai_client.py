"""OpenAI's own client, in a process of its own, against a split cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.stack import Stack

SCRIPT = Path(__file__).parent.parent / "clients/scripts/with_openai.py"


def test_what_its_documentation_shows_works(split: Stack, tiny_model: Path) -> None:
    env = {
        **os.environ,
        "KVRELAY_URL": split.url,
        "KVRELAY_MODEL": split.model,
        "KVRELAY_MODEL_FOLDER": str(tiny_model),
        "KVRELAY_KEY": "unused",
        "KVRELAY_SAYS": "",
    }
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") == 14, done.stdout
