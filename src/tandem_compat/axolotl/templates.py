"""Chat templates that Axolotl has names for: of a model's family they are its tokenizer's own."""

from __future__ import annotations

import re
from collections.abc import Mapping

TEMPLATES: Mapping[str, str] = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "alpaca": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '### Instruction:\\n' + message['content'] }}{% elif message['role'] == 'assistant' %}"
    "{{ '### Response:\\n' + message['content'] + eos_token }}{% else %}{{ message['content'] }}{% endif %}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif %}",
}
"""Those of no family, by Axolotl's names."""


def brought_by(model: str, template: str) -> bool:
    """True if the model is of the family that a template is named after, and so brings that template itself."""
    family = "commandr" if template == "cohere" else "mistral" if template.startswith("mistral_") else template
    return _letters(family) in _letters(model)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
