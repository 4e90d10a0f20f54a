"""Chat templates in the styles of released checkpoints, and conversations to render with them."""

from __future__ import annotations

from typing import Any

CHATML_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if message.role == 'user' %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content.split('</think>')[-1].lstrip('\\n') }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + (call.function.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """\
{{ bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") and "some day" %}
{%- endif %}
    {% if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {% else %}
{%- set system_message = "" %}
    {% endif %}
<|start|>system<|end|>
Today: {{ date_string }}
{{ system_message }}
    {% for message in messages %}
<|start|>{{ message['role'] }}<|end|>
{{ message['content'] | trim if message['content'] else (message['tool_calls'] | tojson(indent=4)) }}
    {% endfor %}
{% if add_generation_prompt %}<|start|>assistant<|end|>
{% endif %}
"""
ALTERNATING = """\
{%- set loop_messages = messages[1:] if messages[0].role == 'system' else messages -%}
{{ bos_token }}{% for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
{%- endif -%}
{%- if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML_WITH_TOOLS, "headers": HEADERS, "alternating": ALTERNATING}

PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": " What is {{ 7 * 7 }}? {% raise %} 日本 "},
    {"role": "assistant", "content": "<think>hm</think>\n\n49"},
    {"role": "user", "content": "Thanks 'so' much <|im_end|>"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "<b>&é</b>", "parameters": {"b": 1, "a": 2}},
    }
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
        ],
    },
    {"role": "tool", "content": "sunny", "name": "weather"},
]
