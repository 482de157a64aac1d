"""The model that clients talk to: the default one, with a chat template that knows tools.

Its own template knows none, and it was not trained to call any: it does so where it has to.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvrelay.services.bench.peer_models import write_folder
from kvrelay.shared.checkpoint.fetch import cache_dir, fetch_default_model

NAME = "SmolLM2-with-tools"
TEMPLATE = """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{%- if loop.last and message.role == 'user' and tools %}
{{- '\\nCall what you need of these:\\n<tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' }}
{{- tools | tojson }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def model_folder() -> Path:
    """Written once; the weights are those of the default model in bfloat16."""
    folder = cache_dir() / "clients" / NAME
    if not (folder / "config.json").exists():
        write_folder(fetch_default_model(_quiet), _made(folder))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def _made(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def _quiet(what: str, done: int, whole: int) -> None:
    """93 MB, once."""
