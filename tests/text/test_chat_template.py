"""The chat template that make-tiny writes has MiniMax-M2's form, to the character."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from minimax_jax.errors import RequestError
from minimax_jax.text.tokenizer import Tokenizer, load_tokenizer
from minimax_jax.text.train import BOS, EOS, TURN, train_tokenizer

DATA = resources.files("minimax_jax") / "data"
TEMPLATE = (DATA / "chat_template.jinja").read_text(encoding="utf-8")
HEAD = "]~!b[]~b]system\nYou are terse.[e~[\n"
SYSTEM = {"role": "system", "content": "You are terse."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "温度 °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    text = (DATA / "gsm8k_excerpt.txt").read_text(encoding="utf-8")
    train_tokenizer(path, text, vocab_size=512, chat_template=TEMPLATE)
    loaded = load_tokenizer(path)
    assert loaded is not None
    return loaded


def render(tokenizer: Tokenizer, *messages: dict[str, Any], **options: Any) -> str:
    """The rendered text, after checking that the ids are those of this text and nothing else."""
    text = tokenizer.render_chat_template(messages, **options)
    ids = tokenizer.apply_chat_template(messages, **options)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(tokenizer.token_id(BOS)) == 1  # no second one on top
    return text


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_system_user_and_generation_prompt(tokenizer: Tokenizer) -> None:
    text = render(tokenizer, SYSTEM, user("Hi\n there "))
    assert text == f"{HEAD}]~b]user\nHi\n there [e~[\n]~b]ai\n<think>\n"


def test_without_a_generation_prompt_it_ends_with_the_last_turn(tokenizer: Tokenizer) -> None:
    text = render(tokenizer, SYSTEM, user("Hi"), add_generation_prompt=False)
    assert text == f"{HEAD}]~b]user\nHi[e~[\n"


def test_a_missing_system_message_is_one_sentence_of_identity(tokenizer: Tokenizer) -> None:
    text = render(tokenizer, user("Hi"))
    head, rest = text.split("[e~[\n", 1)
    assert head.startswith("]~!b[]~b]system\n")
    assert "MiniMax-M2" in head
    assert head.count("\n") == 1
    assert rest == "]~b]user\nHi[e~[\n]~b]ai\n<think>\n"


def test_date_and_location_follow_the_system_text(tokenizer: Tokenizer) -> None:
    text = render(tokenizer, SYSTEM, user("Hi"), current_date="2026-01-02", current_location="Köln")
    assert text.startswith(
        "]~!b[]~b]system\nYou are terse.\nCurrent date: 2026-01-02\nCurrent location: Köln[e~[\n]~b]user\n"
    )


def test_turns_of_a_conversation(tokenizer: Tokenizer) -> None:
    text = render(tokenizer, SYSTEM, user("1+1?"), assistant("2"), user("漢字 😀"), assistant(""), user(""))
    assert text == (
        f"{HEAD}]~b]user\n1+1?[e~[\n]~b]ai\n2[e~[\n"
        "]~b]user\n漢字 😀[e~[\n]~b]ai\n[e~[\n]~b]user\n[e~[\n]~b]ai\n<think>\n"
    )


def test_text_parts_are_joined(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert render(tokenizer, SYSTEM, user(parts)) == render(tokenizer, SYSTEM, user("a b"))


def test_tools_stand_in_the_system_turn_unescaped(tokenizer: Tokenizer) -> None:
    text = render(tokenizer, SYSTEM, user("Hi"), tools=[WEATHER, {"type": "function", "function": {"name": "g"}}])
    system = text.split("[e~[\n", 1)[0]
    assert system.startswith("]~!b[]~b]system\nYou are terse.\n\n# Tools\n")
    assert (
        '\n\n<tools>\n<tool>{"name": "weather", "description": "温度 °C", "parameters": '
        '{"type": "object", "properties": {"city": {"type": "string"}}}}</tool>\n'
        '<tool>{"name": "g"}</tool>\n</tools>\n\n'
    ) in system
    assert "\\u" not in system
    assert '<minimax:tool_call>\n<invoke name="' in system
    assert system.endswith("</invoke>\n</minimax:tool_call>")


@pytest.mark.parametrize("arguments", [{"city": "Zürich", "days": 3, "units": ["°C"], "now": True}, None])
def test_calls_and_results(tokenizer: Tokenizer, arguments: dict[str, Any] | None) -> None:
    text = render(
        tokenizer,
        SYSTEM,
        user("Weather?"),
        assistant("Let me look.", tool_calls=[call("weather", arguments), call("clock", {})]),
        tool("12 °C"),
        tool("noon"),
    )
    parameters = "" if arguments is None else (
        '<parameter name="city">Zürich</parameter>\n<parameter name="days">3</parameter>\n'
        '<parameter name="units">["°C"]</parameter>\n<parameter name="now">true</parameter>\n'
    )  # fmt: skip
    assert text == (
        f"{HEAD}]~b]user\nWeather?[e~[\n]~b]ai\nLet me look.\n<minimax:tool_call>\n"
        f'<invoke name="weather">\n{parameters}</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>[e~[\n'
        "]~b]tool\n<response>12 °C</response>\n<response>noon</response>[e~[\n]~b]ai\n<think>\n"
    )


def test_arguments_may_be_a_json_string(tokenizer: Tokenizer) -> None:
    as_object, as_string, bare = (
        render(tokenizer, SYSTEM, user("?"), assistant("", tool_calls=[c]), tool("ok"))
        for c in (
            call("f", {"city": "Paris"}),
            call("f", '{"city": "Paris"}'),
            call("f", {"city": "Paris"})["function"],
        )
    )
    assert as_object == as_string == bare


@pytest.mark.parametrize(("arguments", "message"), [('{"bad', "are not JSON"), ("[1]", "expected a JSON object")])
def test_arguments_that_are_no_object_are_refused(tokenizer: Tokenizer, arguments: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer.apply_chat_template([user("?"), assistant("", tool_calls=[call("f", arguments)])])


def test_a_result_in_parts_ends_with_a_line_end(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "12"}, {"type": "text", "text": " °C"}]
    text = render(tokenizer, SYSTEM, user("?"), tool(parts), add_generation_prompt=False)
    assert text.endswith("]~b]tool\n<response>12 °C\n</response>[e~[\n")


@pytest.mark.parametrize("spelling", ["field", "content"])
def test_reasoning_is_rendered_only_after_the_last_user_message(tokenizer: Tokenizer, spelling: str) -> None:
    def thinking(reasoning: str, answer: str, **more: Any) -> dict[str, Any]:
        if spelling == "field":
            return assistant(answer, reasoning_content=reasoning, **more)
        return assistant(f"<think>\n{reasoning}\n</think>\n\n{answer}", **more)

    text = render(
        tokenizer,
        SYSTEM,
        user("1"),
        thinking("old", "one"),
        user("2"),
        thinking("new\nlines", "calling", tool_calls=[call("f", {})]),
        tool("r"),
        thinking("newer", "two"),
    )
    assert text == (
        f"{HEAD}]~b]user\n1[e~[\n]~b]ai\none[e~[\n]~b]user\n2[e~[\n"
        "]~b]ai\n<think>\nnew\nlines\n</think>\n\ncalling\n<minimax:tool_call>\n"
        '<invoke name="f">\n</invoke>\n</minimax:tool_call>[e~[\n'
        "]~b]tool\n<response>r</response>[e~[\n]~b]ai\n<think>\nnewer\n</think>\n\ntwo[e~[\n]~b]ai\n<think>\n"
    )


def test_a_models_own_output_comes_without_the_opening_tag(tokenizer: Tokenizer) -> None:
    """The tag is in the prompt, so that a client sends back text that begins inside the reasoning."""
    text = render(tokenizer, SYSTEM, user("1"), assistant("thought\n</think>\n\nanswer"), add_generation_prompt=False)
    assert text.endswith("]~b]ai\n<think>\nthought\n</think>\n\nanswer[e~[\n")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "conversation is empty"),
        ([{"role": "robot", "content": "x"}], "role robot is not known"),
        ([user("a"), SYSTEM], "role system is not known"),
        ([user([{"type": "image_url", "image_url": "x"}])], "type image_url is not text"),
    ],
)
def test_what_cannot_be_rendered_is_one_line(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.apply_chat_template(messages)
    assert "\n" not in str(caught.value)


def test_a_broken_template_is_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = (DATA / "gsm8k_excerpt.txt").read_text(encoding="utf-8")[:2000]
    train_tokenizer(tmp_path, text, vocab_size=512, chat_template="{% if %}")
    broken = load_tokenizer(tmp_path)
    assert broken is not None
    with pytest.raises(RequestError, match="cannot render"):
        broken.apply_chat_template([user("x")])


def test_turn_marks_in_the_text_are_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([SYSTEM, user("Hi")])
    begin, end = tokenizer.token_id(TURN), tokenizer.token_id(EOS)
    assert [i for i in ids if i in (begin, end)] == [begin, end, begin, end, begin]
