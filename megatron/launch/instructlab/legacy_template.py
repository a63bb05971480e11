"""The chat template of InstructLab's first models (use_legacy_tmpl), in the form of a chat_tmpl_path.

Read as text, never run. Source for the format: chat_templates/ibm_legacy_tmpl.py of instructlab/training, whose tokens
are spelled as here, the first one included.
"""

SPECIAL_TOKENS = {
    "bos": "<|begginingoftext|>",
    "eos": "<|endoftext|>",
    "pad": "<|pad|>",
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
}

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>\\n' + message.content + '<|endoftext|>' + ('' if loop.last else '\\n') }}
{%- elif message.role in ('system', 'user') %}{{- '<|' + message.role + '|>\\n' + message.content + '\\n' }}
{%- else %}{{ raise_exception('the legacy template has no role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""
