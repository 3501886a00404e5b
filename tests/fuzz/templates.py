"""Chat templates: after those of Qwen3 and Mistral, and some that fail on what they are given."""

QWEN = """{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}<|end|>{% endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not(message.content.startswith('<tool>')) %}
{%- set ns.last = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in message.content %}
{%- set reasoning = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- endif %}
<|{{ message.role }}|>{{ reasoning + message.content }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}
{%- set tool_call = tool_call.function %}
{%- endif %}{{ tool_call.name + '(' }}{{ tool_call.arguments | tojson }}){%- endfor %}<|end|>{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate: ' + message['role']) }}
{%- endif %}
{%- if message.tool_calls is defined %}
{%- for call in message.tool_calls %}
{%- if call.id|length != 9 %}{{- raise_exception('no id') }}
{%- endif %}{{ call.function | tojson }}
{%- endfor %}
{%- endif %}[INST] {{ message['content'] | trim }} [/INST]{%- endfor %}"""
NOWHERE = "{{ messages[7].content.x.y }}{{ 'a' + 1 }}"
DIVIDES = "{{ messages | length / 0 }}"
GROWS = (
    "{% for m in messages %}{{ m.content | int + m.content | length ** 9 }}{{ '%d' | format(m.content) }}"
    "{{ strftime_now(m.content) }}{% endfor %}"
)
TEMPLATES = {"qwen": QWEN, "mistral": MISTRAL, "nowhere": NOWHERE, "divides": DIVIDES, "grows": GROWS}
