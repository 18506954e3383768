"""Chat templates that Axolotl has names for, written from their formats: what stands around each message."""

from __future__ import annotations

import re
from collections.abc import Mapping


def _around(user: str, assistant: str, system: str, speaks: str, opening: str = "") -> str:
    """A template that writes each message by its role; X stands for its content.

    Args:
        user: around a user's message.
        assistant: around the policy's.
        system: around the system message; empty: the template has none.
        speaks: what the policy's next words follow.
        opening: what everything begins with, an expression of Jinja.
    """

    def written(text: str) -> str:
        before, _, after = text.partition("X")
        return f"{{{{ {_quoted(before)} + message['content'] + {_quoted(after)} }}}}"

    no_system = "{{ raise_exception('this chat template has no system message') }}"
    return (
        (f"{{{{ {opening} }}}}" if opening else "")
        + "{% for message in messages %}"
        + f"{{% if message['role'] == 'system' %}}{written(system) if system else no_system}"
        + f"{{% elif message['role'] == 'assistant' %}}{written(assistant)}{{% else %}}{written(user)}{{% endif %}}"
        + "{% endfor %}"
        + (f"{{% if add_generation_prompt %}}{{{{ {_quoted(speaks)} }}}}{{% endif %}}" if speaks else "")
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("\n", "\\n") + "'"


_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_HEADED = "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"

TEMPLATES: Mapping[str, str] = {
    "chatml": _CHATML,
    "qwen_25": "{% if messages[0]['role'] != 'system' %}"
    f"{{{{ '<|im_start|>system\\n{_QWEN}<|im_end|>\\n' }}}}{{% endif %}}{_CHATML}",
    "llama3": f"{{{{ bos_token }}}}{{% for message in messages %}}{{{{ {_HEADED} + message['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "gemma": _around(
        user="<start_of_turn>user\nX<end_of_turn>\n",
        assistant="<start_of_turn>model\nX<end_of_turn>\n",
        system="",
        speaks="<start_of_turn>model\n",
        opening="bos_token",
    ).replace("message['content']", "message['content'] | trim"),
    "phi_3": _around(
        user="<|user|>\nX<|end|>\n<|assistant|>\n",
        assistant="X<|end|>\n",
        system="<|system|>\nX<|end|>\n",
        speaks="",
        opening="bos_token",
    ),
    "phi_35": _around(
        user="<|user|>\nX<|end|>\n",
        assistant="<|assistant|>\nX<|end|>\n",
        system="<|system|>\nX<|end|>\n",
        speaks="<|assistant|>\n",
    ),
    "alpaca": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '### Instruction:\\n' + message['content'] }}{% elif message['role'] == 'assistant' %}"
    "{{ '### Response:\\n' + message['content'] + eos_token }}{% else %}{{ message['content'] }}{% endif %}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif %}",
}
"""By Axolotl's names."""

FAMILIES = (
    "mistral_v1", "mistral_v2v3", "mistral_v3_tekken", "mistral_v7_tekken", "cohere", "command_a", "aya", "llama4",
    "llama3_2_vision", "deepseek_v2", "deepseek_v3", "jamba", "qwen3", "qwen3_5", "qwen2_vl", "falcon_h1", "nemotron_h",
    "exaone", "exaone4", "metharme", "pixtral", "llava", "gemma3", "gemma3n", "gemma4", "phi_4",
)  # fmt: skip
"""Other names: of models that bring the template with them."""

_OTHERWISE = {"cohere": "commandr", "qwen2_vl": "qwen25vl"}
"""How a family's models are called where the template is called otherwise."""


def brought_by(model: str, template: str) -> bool:
    """True if the model is of the family that a template is named after, and so brings that template itself."""
    family = _OTHERWISE.get(template, "mistral" if template.startswith("mistral_") else template)
    return template in FAMILIES and _letters(family) in _letters(model)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
