"""Rendering of chats, against transformers, and what a template or a message cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import processors

from ep_server.errors import CheckpointError, ContextLengthExceeded, InvalidArgument
from ep_server.text.chat_template import ChatTemplate
from ep_server.text.tokenizer import Tokenizer
from tests.support import tokenizers as made
from tests.support.chat_templates import ALTERNATING, CALLS, PLAIN, TEMPLATES, TOOLS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENS = {"bos_token": "<s>", "eos_token": "<eos>"}
ANY = 1 << 20  # bytes
HELLO = [{"role": "user", "content": "hello"}]


def oracle(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    inner = made.byte_level()
    inner.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    bos = inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **TOKENS)


def rendered(template: ChatTemplate, messages: Any = HELLO, **given: Any) -> str:
    return template.render(messages, max_bytes=ANY, **given)


@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no prompt"])
@pytest.mark.parametrize(
    ("messages", "tools", "variables"),
    [(PLAIN, None, {"enable_thinking": False}), (CALLS, TOOLS, {"date_string": "1 May"}), (CALLS, None, {})],
    ids=["plain", "tools", "calls"],
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name: str, messages: Any, tools: Any, variables: Any, prompt: bool) -> None:
    if name == "alternating" and messages is CALLS:
        messages = CALLS[:1]
    other, own = oracle(TEMPLATES[name]), ChatTemplate({"default": TEMPLATES[name]}, TOKENS)
    given = {"tools": tools, "add_generation_prompt": prompt}
    expected = other.apply_chat_template(messages, tokenize=False, **given, **variables)
    text = rendered(own, messages, variables=variables, **given)
    assert text == expected and len(text) > 20
    ids = other.apply_chat_template(messages, return_dict=False, **given, **variables)
    assert Tokenizer(other.backend_tokenizer).encode(text, special=False) == ids


def test_named_templates_are_chosen_as_in_transformers() -> None:
    named = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "{{ documents }}"}
    other, own = oracle(named), ChatTemplate(named, TOKENS)
    for tools in (None, TOOLS, []):
        assert rendered(own, tools=tools) == other.apply_chat_template(HELLO, tools=tools, tokenize=False)


def test_template_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": None}
    for given in ("{{ bos_token }}{{ eos_token }}!", [{"name": "default", "template": "{{ bos_token }}!"}]):
        config["chat_template"] = given
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        found = ChatTemplate.load(tmp_path)
        assert found is not None and rendered(found) == "<s>!"
    (tmp_path / "chat_template.jinja").write_text("own {{ bos_token }}")
    found = ChatTemplate.load(tmp_path)
    assert found is not None and rendered(found) == "own <s>"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{% for %}", "does not compile"),
        ([{"name": "default"}], "neither a text nor named templates"),
        ([{"name": "rag", "template": "x"}], "no template named default"),
        (7, "neither a text nor named templates"),
    ],
    ids=str,
)
def test_broken_templates_are_named(tmp_path: Path, given: Any, why: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    with pytest.raises(CheckpointError, match=why):
        ChatTemplate.load(tmp_path)


def test_refusal_of_the_template_reaches_the_caller() -> None:
    template = ChatTemplate({"default": ALTERNATING}, TOKENS)
    with pytest.raises(InvalidArgument, match=r"2 messages.*Roles must alternate") as caught:
        rendered(template, HELLO * 2)
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% set _ = messages.append(1) %}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].deep | tojson }}",
    ],
)
def test_sandbox_holds(template: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidArgument, match="what the model's chat template accepts"):
        rendered(ChatTemplate({"default": template}, {}), [{**HELLO[0], "deep": deep}])
    while deep:  # freed level by level
        deep = deep.pop()


def test_messages_are_never_templates() -> None:
    hostile = "{{ ''.__class__ }}{% for i in range(9) %}{# x #}{0.__class__}%s"
    template = ChatTemplate({"default": "{{ messages[0]['role'] ~ messages[0].content | trim }}"}, {})
    assert rendered(template, [{"role": hostile, "content": hostile}]) == hostile * 2


def test_length_and_time_are_limited() -> None:
    loop = "{% for i in range(90000) %}"
    endless = f"{loop}{loop}{{{{ messages[0].content }}}}{{% endfor %}}{{% endfor %}}"
    template = ChatTemplate({"default": endless}, {})
    with pytest.raises(ContextLengthExceeded, match="chat of more than 1000 bytes"):
        template.render(HELLO, max_bytes=1000)
    with pytest.raises(InvalidArgument, match="rendered in time"):
        template.render(HELLO, max_bytes=ANY, seconds=0)
