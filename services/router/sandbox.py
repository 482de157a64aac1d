"""Where chat templates run: no way to Python's internals, and a meter for what they use up.

jinja2's immutable sandbox keeps a template from reaching and changing things. It does not keep it
from running for hours or filling the memory: loops in loops, macros that call each other, texts
that double. So each turn of a loop and each call of a macro is counted and looks at the clock, and
what operators make is measured before it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, Final

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvrelay.shared.errors import KvrelayError

MAX_ITEMS: Final = 16 << 20
"""Characters of a text, or members of a list."""
MAX_BITS: Final = 4096
_METER, _TURN, _JOINED = " meter", " turn", " joined"
"""A variable and two filters, under names that no template can write."""
_WIDE = re.compile(r"\*|\d{5}")


class TakesLong(KvrelayError):
    """A template has used up what it was given."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one rendering may use up."""

    turns: int
    """Of loops, together with calls of macros."""
    seconds: float


class Meter:
    """Counts one rendering."""

    def __init__(self, allowed: Allowance) -> None:
        self._left = allowed.turns
        self._allowed = allowed
        self._end_ns = monotonic_ns() + int(allowed.seconds * 1e9)

    def turn(self) -> None:
        """Raises `TakesLong`."""
        self._left -= 1
        if self._left < 0:
            raise TakesLong(f"it takes more than {self._allowed.turns} turns of its loops")
        if monotonic_ns() > self._end_ns:
            raise TakesLong(f"it takes longer than {self._allowed.seconds:g} s")


def metered(variables: dict[str, Any], meter: Meter) -> dict[str, Any]:
    """The variables of one rendering."""
    return {**variables, _METER: meter}


class Sandbox(ImmutableSandboxedEnvironment):
    """Every template that it compiles needs a meter among its variables."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[_TURN] = _turn
        self.filters[_JOINED] = _joined

    def _generate(self, source: nodes.Template, *args: Any, **named: Any) -> str:
        _Metering().visit(source)
        code: str = super()._generate(source, *args, **named)
        return code

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)


def _turn(context: Context) -> None:
    context[_METER].turn()


def _joined(*parts: object) -> str:
    """The operator `~`."""
    texts = [*map(str, parts)]
    _check_items(sum(map(len, texts)))
    return "".join(texts)


class _Metering(NodeTransformer):
    """Puts the meter into loops and macros, and `joined` in the place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_turn(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_turn(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_turn(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_JOINED, node.nodes, node.lineno)

    def _with_turn(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        turn = _filter(_TURN, [nodes.ContextReference()], node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node


def _filter(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Filter:
    """A filter is called without the sandbox's own checks, which would cost more than a turn."""
    first, *others = arguments
    return nodes.Filter(first, name, others, [], None, None, lineno=line)


def _check_items(number: int) -> None:
    if number > MAX_ITEMS:
        raise TakesLong(f"it makes a text or a list of more than {MAX_ITEMS} parts")


def _check_bits(number: int) -> None:
    if number > MAX_BITS:
        raise TakesLong(f"it makes a number of more than {MAX_BITS} bits")


def _check_times(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | bytes | list | tuple) and isinstance(times, int):
            _check_items(len(many) * max(0, times))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_plus(left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_items(len(left) + len(right))


def _check_format(left: Any, right: Any) -> None:
    if isinstance(left, str) and _WIDE.search(left):
        raise TakesLong("it writes something wider than 9999 characters")


_CHECKS: Final[dict[str, Callable[[Any, Any], None]]] = {
    "*": _check_times,
    "**": _check_power,
    "+": _check_plus,
    "%": _check_format,
}
