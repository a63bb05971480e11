"""Chat templates by name: the formats of well-known model families, in our own implementation.

A preset is for a base model without a template. A model that was fine-tuned before keeps its own template: it learned
the tokens between the turns.
"""

from __future__ import annotations

from typing import NamedTuple

# The system text goes into the first user turn, and turns alternate.
_SYSTEM_INTO_USER = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('only the first message can be the system\\'s') }}{% endif %}
{%- set ns.system = message.content %}
"""


class Preset(NamedTuple):
    """A template, and the special tokens that it needs in the tokenizer."""

    template: str
    special_tokens: tuple[str, ...]


# "{%-" and "{{-" take away the line breaks of this file, so that only "\\n" in a string is written
_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# BOS before each exchange, and no generation prompt: [/INST] is the end of the user's part
_LLAMA2 = (
    _SYSTEM_INTO_USER
    + """\
{%- elif message.role == 'user' %}
{%- set before = '<<SYS>>\\n' + ns.system + '\\n<</SYS>>\\n\\n' if ns.system else '' %}
{{- bos_token + '[INST] ' + before + message.content | trim + ' [/INST]' }}
{%- set ns.system = '' %}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + ' ' + eos_token }}
{%- else %}{{ raise_exception('llama2 has no role ' + message.role) }}
{%- endif %}
{%- endfor %}"""
)

# one BOS for the conversation, EOS behind each answer
_MISTRAL = (
    "{{- bos_token }}"
    + _SYSTEM_INTO_USER
    + """\
{%- elif message.role == 'user' %}
{{- '[INST] ' + (ns.system + '\\n\\n' if ns.system else '') + message.content + '[/INST]' }}
{%- set ns.system = '' %}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + eos_token }}
{%- else %}{{ raise_exception('mistral has no role ' + message.role) }}
{%- endif %}
{%- endfor %}"""
)

_GEMMA = (
    "{{- bos_token }}"
    + _SYSTEM_INTO_USER
    + """\
{%- elif message.role in ('user', 'assistant') %}
{%- set role = 'model' if message.role == 'assistant' else 'user' %}
{%- set before = ns.system + '\\n\\n' if ns.system and role == 'user' else '' %}
{{- '<start_of_turn>' + role + '\\n' + (before + message.content) | trim + '<end_of_turn>\\n' }}
{%- set ns.system = '' %}
{%- else %}{{ raise_exception('gemma has no role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
)

_ZEPHYR = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content | trim + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""

_PHI3 = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content | trim + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""

_GRANITE = """\
{%- for message in messages %}
{%- set role = 'tool_response' if message.role == 'tool' else message.role %}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

_ALPACA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content + '\\n\\n' }}
{%- elif message.role == 'user' %}{{- '### Instruction:\\n' + message.content + '\\n\\n' }}
{%- elif message.role == 'assistant' %}{{- '### Response:\\n' + message.content + eos_token + '\\n\\n' }}
{%- else %}{{ raise_exception('alpaca has no role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{% endif %}"""

_VICUNA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content | trim + '\\n\\n' }}
{%- elif message.role == 'user' %}{{- 'USER: ' + message.content | trim + '\\n' }}
{%- elif message.role == 'assistant' %}{{- 'ASSISTANT: ' + message.content | trim + eos_token + '\\n' }}
{%- else %}{{ raise_exception('vicuna has no role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{% endif %}"""

_QUESTION_ANSWER = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content + '\\n\\n' }}
{%- elif message.role == 'user' %}{{- 'Question: ' + message.content + '\\n\\n' }}
{%- elif message.role == 'assistant' %}{{- 'Answer: ' + message.content + eos_token }}
{%- else %}{{ raise_exception('question_answer has no role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Answer: ' }}{% endif %}"""

_PLAIN = "{%- for message in messages %}{{- message.content }}{%- endfor %}"

PRESETS: dict[str, Preset] = {
    "alpaca": Preset(_ALPACA, ()),
    "chatml": Preset(_CHATML, ("<|im_start|>", "<|im_end|>")),
    "gemma": Preset(_GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "granite": Preset(_GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")),
    "llama2": Preset(_LLAMA2, ()),
    "llama3": Preset(_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": Preset(_MISTRAL, ("[INST]", "[/INST]")),
    "phi3": Preset(_PHI3, ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")),
    "plain": Preset(_PLAIN, ()),
    "question_answer": Preset(_QUESTION_ANSWER, ()),
    "vicuna": Preset(_VICUNA, ()),
    "zephyr": Preset(_ZEPHYR, ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")),
}
