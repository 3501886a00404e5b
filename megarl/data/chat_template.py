"""Render chat templates without transformers, but by its rules, so that a template gives the same text."""

from __future__ import annotations

import datetime
import json
from typing import Any


def compile_template(source: str, where: str) -> Any:
    """Return a jinja2.Template in a sandbox, with the functions that transformers 5.19 offers a template.

    Args:
        where: names the template in errors, e.g. the file.
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
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:  # jinja2's own error, or one of the generated Python: blocks nested too deep
        raise ValueError(f"{where} is not a jinja template: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
