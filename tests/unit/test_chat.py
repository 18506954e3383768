"""Messages to tokens: what was sampled stays as it was sampled, and what is around it is what the template renders."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tandem.errors import EnvError
from tandem.rollout.chat import EngineChat
from tandem.rollout.template import Template
from tandem.types import Completion, Finish, Message, Sampling, Task


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


class Scripted:
    """An engine that says what it is told to."""

    def __init__(self, says: Sequence[tuple[Sequence[int], Finish]], context: int = 1024) -> None:
        self.says = list(says)
        self.context = context
        self.requests: list[tuple[tuple[int, ...], int]] = []

    async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
        self.requests.append((tuple(prompt), key))
        tokens, finish = self.says.pop(0)
        num = len(tokens)
        return Completion(tokens=tuple(tokens), logprobs=(-1.0,) * num, versions=(0,) * num, finish=finish)


def task(*messages: Message) -> Task:
    return Task(id="3+4", env="e", prompt=messages or (user("3 + 4?"),), answer="7")


def user(content: str) -> Message:
    return Message(role="user", content=content)


def chat_with(tokenizer: Any, engine: Scripted, *opening: Message, stream: str = "0/a", **sampling: Any) -> EngineChat:
    return EngineChat(engine, Template(tokenizer, {}), task(*opening), Sampling(**sampling), stream)  # type: ignore[arg-type]


def converse(chat: EngineChat, replies: Sequence[Sequence[Message]]) -> list[Message]:
    """The policy speaks once more than it is replied to."""

    async def go() -> list[Message]:
        answers = [await chat.reply()]
        for reply in replies:
            chat.add(*reply)
            answers.append(await chat.reply())
        return answers

    return asyncio.run(go())


def canonical(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """What the template makes of a whole conversation."""
    text = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


TEXT = st.text(max_size=12).filter(lambda text: "<|" not in text and "\u2042" not in text)
REPLY = st.lists(
    st.builds(Message, role=st.sampled_from(["user", "tool", "system"]), content=TEXT), min_size=1, max_size=2
)


@pytest.mark.slow
@given(turns=st.lists(st.tuples(TEXT, st.booleans(), REPLY), min_size=1, max_size=3), last=TEXT)
def test_bridges_are_what_the_template_would_render(
    tokenizer: Any, turns: list[tuple[str, bool, list[Message]]], last: str
) -> None:
    """With the end token sampled, and without it where a stop text ended the turn: it is then filled in."""
    end = tokenizer.eos_token_id
    says: list[tuple[list[int], Finish]] = [
        ([*ids_of(tokenizer, text), *([end] if ended else [])], "stop") for text, ended, _ in turns
    ]
    # A completion holds at least one token.
    says = [(tokens or [end], finish) for tokens, finish in says]
    engine = Scripted([*says, ([*ids_of(tokenizer, last), end], "stop")])
    chat = chat_with(tokenizer, engine)
    converse(chat, [reply for _, _, reply in turns])
    at = 1
    replies = [*(reply for _, _, reply in turns), ()]
    for turn, (prompt, _), reply in zip(chat.turns, engine.requests, replies, strict=True):
        assert list(turn.prompt) == list(prompt) == canonical(tokenizer, chat.messages[:at])
        at += 1 + len(reply)


def test_sampled_tokens_are_never_tokenised_again(tokenizer: Any) -> None:
    """Half of a character, and special tokens in the middle: no text leads back to them."""
    end = tokenizer.eos_token_id
    half = ids_of(tokenizer, "é")[:1]
    odd = [*ids_of(tokenizer, "a"), *half, tokenizer.bos_token_id, *ids_of(tokenizer, "b"), end]
    engine = Scripted([(odd, "stop"), (half, "stop"), ([end], "stop")])
    chat = chat_with(tokenizer, engine)
    answers = converse(chat, [[user("so?")], [user("well?")]])
    assert ids_of(tokenizer, answers[0].content) != odd[:-1], "or else this proves nothing"
    first, second, third = chat.turns
    assert list(first.prompt) == canonical(tokenizer, task().prompt)
    bridge = ids_of(tokenizer, "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n")
    assert list(second.prompt) == [*first.prompt, *odd, *bridge]
    assert list(third.prompt) == [
        *second.prompt,
        *half,
        end,  # it was not sampled: a stop text ended the turn
        *ids_of(tokenizer, "\n<|im_start|>user\nwell?<|im_end|>\n<|im_start|>assistant\n"),
    ]
    assert [turn.completion.tokens for turn in chat.turns] == [tuple(odd), tuple(half), (end,)]


def test_template_that_rewrites_earlier_turns_changes_nothing_that_was_sampled(tokenizer: Any) -> None:
    """Reasoning models' templates leave the thinking of earlier turns out."""
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    thought = [*ids_of(tokenizer, "<think>hm</think>7"), tokenizer.eos_token_id]
    chat = chat_with(forgetful, Scripted([(thought, "stop"), (thought, "stop")]))
    converse(chat, [[user("sure?")]])
    first, second = chat.turns
    bridge = ids_of(tokenizer, "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")
    assert list(second.prompt) == [*first.prompt, *thought, *bridge]


def test_record_keeps_messages_replies_and_temperature(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    engine = Scripted([([*ids_of(tokenizer, "six"), end], "stop"), ([*ids_of(tokenizer, "7"), end], "stop")])
    opening = (Message(role="system", content="Be brief."), user("3 + 4?"))
    chat = chat_with(tokenizer, engine, *opening, temperature=0.7)
    reply = (Message(role="tool", content="no"), user("again"))
    answers = converse(chat, [reply])
    assert [m.content for m in answers] == ["six", "7"]
    assert chat.messages == (*opening, answers[0], *reply, answers[1])
    assert [turn.temperature for turn in chat.turns] == [0.7, 0.7]
    greedy = chat_with(tokenizer, Scripted([([end], "stop")]), temperature=0.0)
    converse(greedy, [])
    assert greedy.turns[0].temperature == 1.0, "greedy logprobs are those of temperature 1"


def test_every_turn_and_every_conversation_has_its_own_stream(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id

    def keys(stream: str) -> list[int]:
        engine = Scripted([([end], "stop")] * 2)
        converse(chat_with(tokenizer, engine, stream=stream), [[user("?")]])
        return [key for _, key in engine.requests]

    assert keys("0/a") == keys("0/a")
    assert len({*keys("0/a"), *keys("1/a"), *keys("0/b")}) == 6
    assert all(0 <= key < 2**64 for key in keys("0/a"))


def test_cut_answer_closes_the_conversation(tokenizer: Any) -> None:
    chat = chat_with(tokenizer, Scripted([(ids_of(tokenizer, "so lon"), "length")]))
    assert chat.open
    converse(chat, [])
    assert not chat.open


def test_full_context_costs_the_conversation_and_not_the_engine(tokenizer: Any) -> None:
    room = len(canonical(tokenizer, task().prompt))
    engine = Scripted([], context=room)
    chat = chat_with(tokenizer, engine)
    assert not chat.open
    with pytest.raises(EnvError, match=rf"task 3\+4 has {room} tokens and the context is {room}"):
        converse(chat, [])
    # The same in a later turn, for an environment that does not look at `open`.
    engine = Scripted([([tokenizer.eos_token_id], "stop")], context=room + 10)
    chat = chat_with(tokenizer, engine)
    with pytest.raises(EnvError, match="shorten it"):
        converse(chat, [[user("a long reply" * 9)]])
    assert len(engine.requests) == 1
    assert len(chat.turns) == 1


def test_speaking_twice_without_a_message_between_is_refused(tokenizer: Any) -> None:
    chat = chat_with(tokenizer, Scripted([([tokenizer.eos_token_id], "stop")] * 2))
    with pytest.raises(EnvError, match="speak twice"):
        converse(chat, [[]])


def test_what_an_environment_says_before_the_policy_speaks_is_in_its_prompt(tokenizer: Any) -> None:
    engine = Scripted([(ids_of(tokenizer, "7"), "stop")] * 2)
    system = Message(role="system", content="You add.")
    chat = chat_with(tokenizer, engine, system)
    chat.add(user("3 + 4?"))
    answers = converse(chat, [[user("And 1 more?")]])
    conversations = [[system, user("3 + 4?")], [system, user("3 + 4?"), answers[0], user("And 1 more?")]]
    assert [list(prompt) for prompt, _ in engine.requests] == [canonical(tokenizer, one) for one in conversations]
    assert chat.messages[3] == user("And 1 more?")


def test_two_replies_at_once_are_refused(tokenizer: Any) -> None:
    """They would be two first turns from one random stream, which are the same."""

    class Slow(Scripted):
        async def generate(self, prompt: Sequence[int], sampling: Sampling, key: int) -> Completion:
            await asyncio.sleep(0)
            return await super().generate(prompt, sampling, key)

    chat = chat_with(tokenizer, Slow([(ids_of(tokenizer, "7"), "stop")] * 2))

    async def both() -> tuple[Message | BaseException, Message | BaseException]:
        return await asyncio.gather(chat.reply(), chat.reply(), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first == Message(role="assistant", content="7")
    assert isinstance(second, EnvError)
    assert "two replies at once" in str(second)
    assert len(chat.turns) == 1


def test_only_messages_are_said(tokenizer: Any) -> None:
    chat = chat_with(tokenizer, Scripted([]))
    with pytest.raises(TypeError, match=r"got a dict; expected a tandem\.Message"):
        chat.add({"role": "user", "content": "?"})  # type: ignore[arg-type]
    assert len(chat.messages) == 1


def test_half_of_a_surrogate_pair_is_a_question_mark(tokenizer: Any) -> None:
    template = Template(tokenizer, {})
    assert template.prompt([user("cut \ud83d")]) == template.prompt([user("cut ?")])
    assert template.prompt([Message(role="text", content="\udc00")]) == template.text("?")


def test_template_that_refuses_a_role_says_so(tokenizer: Any) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(EnvError, match="user, tool: no tools"):
        Template(strict, {}).prompt([user("?"), Message(role="tool", content="!")])


def test_a_template_that_leaves_out_what_a_message_holds_is_refused(tokenizer: Any) -> None:
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = "{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}"
    calls = {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    template = Template(silent, {})
    with pytest.raises(EnvError, match="leaves out messages of role developer"):
        template.prompt([Message(role="developer", content="Be brief."), user("?")])
    with pytest.raises(EnvError, match="leaves out tool_calls"):
        template.prompt([user("?"), Message(role="assistant", content="", fields=calls), user("?")])
    silent.chat_template = (
        "{% for m in messages %}{{ m.tool_calls[0].function if m.tool_calls else m.name }}{% endfor %}"
    )
    messages = [
        Message(role="user", content="?", fields={"name": "ann"}),
        Message(role="assistant", content="", fields=calls),
    ]
    assert template.decode(template.prompt(messages)) == "ann{'name': 'add', 'arguments': {}}"


def test_a_text_has_no_special_token_but_its_own(tokenizer: Any) -> None:
    begun = copy.deepcopy(tokenizer)
    begun._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")],
    )
    text = "<|im_start|>assistant\nLet me"
    assert Template(begun, {}).prompt([Message(role="text", content=text)]) == ids_of(tokenizer, text)


def test_a_text_is_gone_on_with_as_it_is(tokenizer: Any) -> None:
    """No chat template is put around it, neither before the policy speaks nor after."""
    engine = Scripted([(ids_of(tokenizer, "7"), "stop")])
    chat = chat_with(tokenizer, engine, Message(role="text", content="3 + 4 ="))
    with pytest.raises(EnvError, match="no message can follow it"):
        converse(chat, [[user("And then?")]])
    assert engine.requests[0][0] == tuple(tokenizer("3 + 4 =")["input_ids"]) == tuple(ids_of(tokenizer, "3 + 4 ="))
    assert chat.messages[:2] == (Message(role="text", content="3 + 4 ="), Message(role="assistant", content="7"))


def test_turns_are_marked_with_rewards_of_their_own_or_left_out(tokenizer: Any) -> None:
    engine = Scripted([(ids_of(tokenizer, text), "stop") for text in "78"])
    chat = chat_with(tokenizer, engine, user("?"))

    async def play() -> None:
        await chat.reply()
        chat.mark(reward=0.5)
        chat.add(user("And then?"))
        await chat.reply()
        chat.mark(trained=False)

    asyncio.run(play())
    assert [(turn.reward, turn.trained) for turn in chat.turns] == [(0.5, True), (None, False)]
    assert user("And then?") in chat.messages


def test_options_reach_the_template(tokenizer: Any) -> None:
    optional = copy.deepcopy(tokenizer)
    optional.chat_template = "{{ 'loud' if shout else 'quiet' }}"
    assert Template(optional, {"shout": True}).prompt([user("?")]) == ids_of(tokenizer, "loud")
    assert Template(optional, {}).prompt([user("?")]) == ids_of(tokenizer, "quiet")


def test_pieces_and_text(tokenizer: Any) -> None:
    template = Template(tokenizer, {})
    tokens = [*ids_of(tokenizer, "ab"), tokenizer.eos_token_id]
    assert template.pieces(tokens) == ["a", "b", "<|im_end|>"]
    assert template.decode(tokens) == "ab"
