"""Chat templates: Hugging Face's conventions, inside a sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest

from kvrelay.services.router import sandbox
from kvrelay.services.router.sandbox import TakesLong
from kvrelay.services.router.template import MAX_RENDERED_CHARACTERS, ChatTemplate, Message
from kvrelay.shared.errors import ModelError, RequestError

HI: list[Message] = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[Message] = HI) -> str:
    return ChatTemplate(source, "<s>", "</s>", lambda: datetime(2026, 7, 26)).render(messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ messages[0].role | upper }}", "USER"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2026"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "TrueTrueFalse"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
    ],
)
def test_what_templates_may_use(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recurses too deep"),
    ],
)
def test_a_template_that_fails_is_a_400_with_its_words(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        render(source)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_cannot_write_without_end() -> None:
    block = "x" * 10_000
    source = "{% for i in range(99999) %}" + block + "{{ i }}{% endfor %}"
    with pytest.raises(RequestError, match=f"over {MAX_RENDERED_CHARACTERS} characters"):
        render(source)


LOOPS = "{% for i in range(1000) %}{% for j in range(1000) %}{% for k in range(1000) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
TREE = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}"
DOUBLING = "{% set ns = namespace(x='xy') %}{% for i in range(60) %}{% set ns.x = ns.x OP ns.x %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOPS + ENDS, "more than 250000 turns"),
        (LOOPS + "{{ i + j * k }}" + ENDS, "more than 250000 turns"),
        (TREE, "more than 250000 turns"),
        (DOUBLING.replace("OP", "+") + "{% endfor %}", "a text or a list of more than"),
        (DOUBLING.replace("OP", "~") + "{% endfor %}", "a text or a list of more than"),
        ("{{ 'x' * 10 ** 9 }}", "a text or a list of more than"),
        ("{{ 10 ** 9 * [messages] }}", "a text or a list of more than"),
        ("{{ 9 ** 99999 }}", "a number of more than 4096 bits"),
        ("{{ '%0999999999d' % 1 }}", "wider than 9999"),
        ("{% for m in messages %}{{ pause() }}{% endfor %}", "takes longer than 5 s"),
    ],
    ids=lambda value: value[:30],
)
def test_a_template_cannot_use_up_time_or_memory(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10**15, 6 * 10**9 if "pause" in source else 1))
    monkeypatch.setattr(sandbox, "monotonic_ns", lambda: next(now))
    source = source.replace("{{ pause() }}", "")
    with pytest.raises(RequestError, match=words) as caught:
        render(source)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_what_takes_long_on_the_loop_is_told_and_not_refused() -> None:
    template = ChatTemplate("{% for i in range(6000) %}x{% endfor %}", "", "")
    with pytest.raises(TakesLong):
        template.brief().render(HI)
    assert template.render(HI) == "x" * 6000


def test_the_operators_of_a_template_mean_what_they_did() -> None:
    source = (
        "{{ 1 ~ 'a' ~ [2] }}|{{ 'a' + 'b' }}|{{ [1] + [2] }}|{{ 3 * 2 }}|{{ '-' * 3 }}|{{ 7 % 4 }}"
    )
    assert render(source + "|{{ '%s!' % 'a' }}|{{ 2 ** 5 }}") == "1a[2]|ab|[1, 2]|6|---|3|a!|32"


def test_a_template_cannot_reach_its_meter() -> None:
    source = "{% set meter = 1 %}{% set turn = 2 %}{% for i in range(3) %}{{ i }}{% endfor %}"
    assert render(source) == "012"


def test_a_template_that_does_not_compile_is_a_broken_model() -> None:
    with pytest.raises(ModelError, match=r"the chat template, line 2: .*endfor"):
        render("\n{% for m in messages %}")


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>")


def test_a_new_turn_begins_only_if_that_is_asked_for() -> None:
    assert compiled(TURNS).render(HI) == "<user>hi</user><assistant>"
    assert compiled(TURNS).render(HI, add_generation_prompt=False) == "<user>hi</user>"


def test_an_open_prompt_ends_with_the_last_content_as_it_is() -> None:
    said: list[Message] = [*HI, {"role": "assistant", "content": "Once </assistant> \ufdd3 upon  "}]
    wanted = "<user>hi</user><assistant>Once </assistant> \ufdd3 upon  "
    assert compiled(TURNS).render_open(said) == wanted


def test_a_template_that_hides_the_last_content_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="does not show the last one's content") as caught:
        compiled("{{ messages[0].content }}").render_open([*HI, {"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_variables_are_seen_but_hide_no_name_of_the_template() -> None:
    source = "{{ style }}{{ messages | length }}{{ bos_token }}"
    names = {"style": "s", "messages": [], "bos_token": "forged"}
    assert compiled(source).render(HI, variables=names) == "s1<s>"
