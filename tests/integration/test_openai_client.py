"""The clients that agents are built on, OpenAI's and Anthropic's own, against the proxy."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from integration.atropos_peers import HERE, atropos_python, verifiers_python
from support.fake_engine import END
from support.proxy_sessions import Scripted

from tandem.agents.server import Proxy, Session
from tandem.rollout.template import Template
from tandem.types import Sampling

CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Roomy(Scripted):
    context = 4000


CHAT = (CALL, "three", CALL, "three", "<call>", CALL)
BOTH = (CALL, "three", CALL, CALL, "three", CALL)


@pytest.mark.parametrize(
    ("script", "python", "texts"),
    [("openai_client.py", atropos_python, CHAT), ("dialects_client.py", verifiers_python, BOTH)],
    ids=["chat and completions", "responses and messages"],
)
def test_a_client(script: str, python: Callable[[], Path], texts: Sequence[str], tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    template = Template(tokenizer, {})
    replies = [[*template.more(text), END] for text in texts]

    async def go() -> tuple[int, str]:
        engine = Roomy(*replies)
        session = Session(engine, template, Sampling(max_tokens=100), "s")  # type: ignore[arg-type]
        proxy = Proxy(session, model="m")
        async with proxy.serving() as url:
            process = await asyncio.create_subprocess_exec(
                python(),
                HERE / script,
                f"{url}/{proxy.key}/v1",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            try:
                out, _ = await asyncio.wait_for(process.communicate(), 60)
            finally:
                if process.returncode is None:
                    process.kill()
            one, two = session.turns[:2]
            assert two.prompt[: len(one.prompt) + len(replies[0])] == (*one.prompt, *replies[0])
            assert len(session.turns) == 6
            return process.returncode or 0, out.decode()

    status, out = asyncio.run(go())
    assert status == 0, out
