"""What the scripts share. They run in a client's own venv, which has nothing of kvrelay."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

URL = os.environ["KVRELAY_URL"]
BASE = f"{URL}/v1"
MODEL = os.environ["KVRELAY_MODEL"]
FOLDER = os.environ["KVRELAY_MODEL_FOLDER"]
KEY = os.environ["KVRELAY_KEY"]

CAPITAL = "What is the capital of France?"
SAYS = os.environ["KVRELAY_SAYS"]
"""What the greedy answer to that has in it: empty for a model that knows nothing."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def run(*checks: Callable[[], object]) -> NoReturn:
    """One line for each check, by its function's name, with what it gives; ends the process."""
    failed = 0
    for check in checks:
        begun = time.monotonic()
        try:
            detail = check()
        except Exception:  # noqa: BLE001 - whatever it is, the other checks are worth knowing
            traceback.print_exc()
            outcome, detail = "FAIL", ""
            failed += 1
        else:
            outcome = "ok"
        took = time.monotonic() - begun
        name = check.__name__.replace("_", " ")
        print(f"{outcome:4}  {name}  ({took:.1f} s)  {detail or ''}".rstrip(), flush=True)
    sys.exit(1 if failed else 0)
