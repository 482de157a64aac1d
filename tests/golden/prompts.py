"""A hundred prompts of the oracle: chat and plain, 1 to 1,500 tokens, in several scripts."""

from __future__ import annotations

from dataclasses import dataclass

_OPENINGS = (
    "What is the capital of France?",
    "Write a Python function that reverses a linked list.\n```python\ndef reverse(head):",
    "请用三句话介绍一下北京的历史。",
    "🎉🎂 Write a birthday wish with many emoji 🥳 for my friend 🐶!",
    "Explain why the sky is blue to a child of six.",
    "SELECT name, count(*) FROM users JOIN orders ON",
    "Es war einmal ein Müller, der hatte eine schöne Tochter,",
    "List five prime numbers and their squares:\n1.",
    "昨日は雨が降っていましたが、今日は",
    "#include <stdio.h>\nint main(void) {\n    for (int i = 0; i < 10; ++i) {",
)
_FILLERS = (
    "The relay passes blocks of memory from one worker to the next, and every reader of this "
    "sentence may count its words. ",
    "for key, value in sorted(table.items()):\n    print(f'{key}: {value:>8.3f}')\n",
    "长江是亚洲第一长河。它全长六千三百多公里。它流经十一个省级行政区。",
    "🚀 launch 🌍 orbit 🌕 land 👩‍🚀 walk, and back again! ",
)
_LENGTHS = (1, 2, 3, 5, 9, 15, 16, 17, 31, 40, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300)
_LONG = (400, 511, 512, 640, 700, 800, 1000, 1100, 1279, 1500)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text; chat prompts get the template, plain ones are cut to `tokens`."""

    text: str
    chat: bool
    tokens: int | None


def prompts() -> list[Prompt]:
    """Forty chat turns, forty plain texts of every short length, twenty long ones; mixed."""
    chats = [
        Prompt(f"{opening}{_FILLERS[variant % 4] * variant}", True, None)
        for variant in range(4)
        for opening in _OPENINGS
    ]
    plain = [_plain(at, length) for at, length in enumerate(_LENGTHS * 2 + _LONG * 2)]
    mixed = [prompt for pair in zip(chats, plain, strict=False) for prompt in pair]
    return mixed + plain[len(chats) :]


def _plain(number: int, length: int) -> Prompt:
    """Every character is at least a third of a token, so ten characters a token are plenty."""
    filler = _FILLERS[number % 4]
    text = _OPENINGS[number % 10] + filler * (10 * length // len(filler) + 1)
    return Prompt(text, False, length)
