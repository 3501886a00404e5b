"""Render chat templates without transformers, but by its rules, so that a template gives the same text."""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
from typing import Any

from megarl.data.tokenizer_base import CLOSE, OPEN, ChatTemplate

_TAG = re.compile(r"{%-?\s*generation\s*-?%}")


def read_text(path: str) -> str | None:
    """Return the text of a file, None if there is none."""
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read()


def compile_template(source: str | dict[str, str], where: str, **special: str) -> ChatTemplate:
    """Return a function that renders messages with a chat template, in a jinja sandbox with the functions
    that transformers 5.19 offers a template.

    The function takes `tools`, `add_generation_prompt` (default: True), `tagged` and the template's own
    arguments. With `tagged`, OPEN and CLOSE stand around what {% generation %} marks.

    Args:
        source: the template, or several by name: "tool_use" is for messages with tools, else "default".
        where: names the template in errors, e.g. the file.
        special: texts of special tokens by name, e.g. bos_token.
    Raises: ValueError if the source is no template."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    is_tagged = False

    class Generation(jinja2.ext.Extension):
        """The tag {% generation %}, which marks the assistant's text."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}" if is_tagged else caller()

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    sources = {"default": source} if isinstance(source, str) else source
    try:
        templates = {name: environment.from_string(one) for name, one in sources.items()}
    except Exception as error:  # jinja2's own error, or one of the generated Python: blocks nested too deep
        raise ValueError(f"{where} is not a jinja template: {error}") from error

    def render(
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tagged: bool = False,
        **arguments: Any,
    ) -> str:
        nonlocal is_tagged
        is_tagged = tagged
        template = templates["tool_use" if tools and "tool_use" in templates else "default"]
        own = {"messages": messages, "tools": tools, "documents": None}
        return template.render(own, add_generation_prompt=add_generation_prompt, **{**special, **arguments})

    render.marks_answers = any(_TAG.search(one) for one in sources.values())
    return render


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
