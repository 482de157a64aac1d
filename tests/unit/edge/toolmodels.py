"""Chat templates that know tools, one for each form of calls, and what models of it write."""

from __future__ import annotations

from dataclasses import dataclass

_TURN = "<|im_start|>{{ m.role }}\n"
_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_LIST = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)

HERMES = (
    _LIST + "{% for m in messages %}" + _TURN + "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + _BEGIN
)
THINKING = HERMES.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
    "{{ m.content }}",
)
THINKING_OPEN = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
LLAMA = (
    _LIST + "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", '
    '"parameters": {{ f.arguments | tojson }}}'
    "{% else %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}" + _BEGIN
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ ', ' if not loop.first }}{{ c.function | tojson }}{% endfor %}]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}: {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TEXT_ARGUMENTS = (
    _LIST + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ 'Call ' + c.function.name + ' with ' + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _BEGIN
)
"""Wants arguments as texts, and no content beside calls."""


@dataclass(frozen=True, slots=True)
class ToolModel:
    template: str
    control: tuple[str, ...]
    """Control tokens beside ChatML's."""
    says: str
    """Two calls: get_weather of Oslo, and now."""
    name: str


_W, _N = '{"city": "Oslo 🙂"}', "{}"
_CALL = '{"name": "%s", "%s": %s}'
W_ARGUMENTS, N_ARGUMENTS = _W, _N

MODELS = {
    model.name: model
    for model in (
        ToolModel(
            HERMES,
            (),
            f"<tool_call>\n{_CALL % ('get_weather', 'arguments', _W)}\n</tool_call>\n"
            f"<tool_call>\n{_CALL % ('now', 'arguments', _N)}\n</tool_call>",
            "hermes",
        ),
        ToolModel(
            LLAMA,
            ("<|python_tag|>",),
            f"<|python_tag|>{_CALL % ('get_weather', 'parameters', _W)}; "
            f"{_CALL % ('now', 'parameters', _N)}",
            "llama",
        ),
        ToolModel(
            MISTRAL,
            ("[TOOL_CALLS]", "[INST]", "[/INST]"),
            f"[TOOL_CALLS][{_CALL % ('get_weather', 'arguments', _W)}, "
            f"{_CALL % ('now', 'arguments', _N)}]",
            "mistral",
        ),
        ToolModel(
            TEXT_ARGUMENTS,
            (),
            f"[{_CALL % ('get_weather', 'arguments', _W)}, {_CALL % ('now', 'arguments', _N)}]",
            "json",
        ),
    )
}
