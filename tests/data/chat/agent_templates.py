"""Templates for agents, each with a difficulty of a known family, in our own words."""

# ruff: noqa: E501  a line end in a template is text

from __future__ import annotations

# one call a turn in place of the answer, another end for it; results under the role ipython
LLAMA = """\
{{- bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>

{% for t in tools %}{{ t | tojson(indent=4) }}
{% endfor %}<|eot_id|>{% endif %}
{%- for m in messages %}
{%- if m.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson if m.content is mapping else m.content }}<|eot_id|>
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{{ '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}<|eom_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# arguments must be text; the results of one turn share a block; earlier reasoning in a content is cut off
DEEPSEEK = """\
{{- bos_token }}{% set ns = namespace(outputs=false) %}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.outputs = false %}<|User|>{{ m.content }}
{%- elif m.role == 'tool' %}
{%- if not ns.outputs %}<|outputs_begin|>{% set ns.outputs = true %}{% endif %}<|output_begin|>{{ m.content }}<|output_end|>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|outputs_end|>{% endif %}
{%- elif m.role == 'assistant' %}
{%- if not ns.outputs %}<|Assistant|>{% endif %}{% set ns.outputs = false %}
{%- if m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}
{%- if m.tool_calls %}<|calls_begin|>
{%- for call in m.tool_calls %}<|call_begin|>{{ 'function<|sep|>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' }}<|call_end|>
{%- if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}<|calls_end|>{% endif %}{{ eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.outputs %}<|Assistant|>{% endif %}"""

# a call and an answer have other headers than the prompt, and the last turn another end than earlier ones
CHANNELS = """\
{%- for t in tools or [] %}<|start|>developer<|message|>{{ t | tojson }}<|end|>{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and (loop.last or m.tool_calls) %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- if m.tool_calls %}
{%- for call in m.tool_calls %}<|start|>assistant<|channel|>commentary to={{ call.function.name }}<|message|>{{ call.function.arguments | tojson }}{{ '<|call|>' if loop.last else '<|end|>' }}{% endfor %}
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# arguments as XML, value by value; the answer begins with a line end after the header
XML = """\
[gMASK]{% for t in tools or [] %}<|system|>
{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning_content %}{{ '\\n<think>' + m.reasoning_content + '</think>' }}{% else %}{{ '\\n<think></think>' }}{% endif %}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}</arg_value>{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}<|{{ m.role }}|>
{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"""

# generation marks around a whole turn; results repeat the name of their call
MARKED = """\
{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ (m.content or '') }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endgeneration %}
{%- elif m.role == 'tool' %}{% set ns = namespace(name='') %}
{%- for other in messages %}{% for call in other.tool_calls or [] if call.id == m.tool_call_id %}{% set ns.name = call.function.name %}{% endfor %}{% endfor %}<|im_start|>tool {{ ns.name }}
{{ m.content }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

AGENT_TEMPLATES = {"llama": LLAMA, "deepseek": DEEPSEEK, "channels": CHANNELS, "xml": XML, "marked": MARKED}
