"""Render chat templates without transformers, but by its rules, so that a template gives the same text."""

from __future__ import annotations

import datetime
import functools
import json
import os
from typing import Any

from megarl.data.tokenizer_base import ChatTemplate


def read_text(path: str) -> str | None:
    """Return the text of a file, None if there is none."""
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read()


def compile_template(source: str, where: str, **special: str) -> ChatTemplate:
    """Return a function that renders messages, and tools, with a chat template, in a jinja sandbox with the functions
    that transformers 5.19 offers a template.

    Args:
        where: names the template in errors, e.g. the file.
        special: texts of special tokens by name, e.g. bos_token.
    Raises: ValueError if the source is no template."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag {% generation %}, which marks the assistant's text and changes nothing here."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        template = environment.from_string(source)
    except Exception as error:  # jinja2's own error, or one of the generated Python: blocks nested too deep
        raise ValueError(f"{where} is not a jinja template: {error}") from error

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        return template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=True, **special
        )

    return render


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
