"""A grammar in llguidance's dialect of Lark, written rule by rule (serving 10).

A control token is named by its id, `<[163587]>`: no text can spell it, as nothing that a caller
writes becomes one. Rules have lower-case names; a terminal, in upper case, is one regular
expression and may use `&` and `~`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer

MAX_CHARS = 4 * 2**20
"""Longest grammar. A schema whose definitions are used in many places is written once for each."""

# The separators that K3 is trained to write arguments with (serving 4a).
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A response may be indented, but not be whitespace for ever.
_FREE_STYLE = {"whitespace_pattern": r"[ \n\r\t]{1,64}"}


class GrammarError(ValueError):
    """A schema that no grammar here can enforce; the message says which part and what to do."""


class Lark:
    """Collects rules; equal bodies share a name.

    While `is_lenient` is set, keywords and formats of schemas that cannot be enforced are ignored.
    """

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._open = f"<[{tokenizer.open_id}]>"
        self._close = f"<[{tokenizer.close_id}]>"
        self._sep = f"<[{tokenizer.sep_id}]>"
        self._names: dict[str, str] = {}
        self._num_chars = 0
        self.is_lenient = False
        self.text = self.terminal("/(?s:.*)/")

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._name("r", body)

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body."""
        return self._name("T", body)

    def json(self, schema: Any, *, is_argument: bool) -> str:
        """The name of a rule for JSON text that a schema describes."""
        schema = dict(schema) if isinstance(schema, dict) else {"allOf": [schema]}
        style = _JSON_STYLE if is_argument else _FREE_STYLE
        schema["x-guidance"] = {**style, "lenient": self.is_lenient}
        return self.rule(f"%json {json.dumps(schema)}")

    def opener(self, inside: str) -> str:
        """An element's opener; `inside` is an expression for its tag and attributes."""
        return f"{self._open} {inside} {self._sep}"

    def closer(self, tag: str) -> str:
        """An element's closer."""
        return f"{self._close} {literal(tag)} {self._sep}"

    def finish(self, start: str) -> str:
        """The whole grammar, which begins with the expression `start`."""
        rules = [f"{name}: {body}" for body, name in self._names.items()]
        return "\n".join([f"start: {start}", *rules]) + "\n"

    def _name(self, prefix: str, body: str) -> str:
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = f"{prefix}{len(self._names)}"
            self._num_chars += len(body)
            if self._num_chars > MAX_CHARS:
                raise GrammarError(
                    f"the grammar of the schemas is longer than {MAX_CHARS} characters; "
                    f"use fewer tools or smaller schemas"
                )
        return name


def literal(text: str) -> str:
    """An expression that matches exactly this text."""
    return json.dumps(text, ensure_ascii=False) if text else '""'


def either(expressions: list[str]) -> str:
    """An expression that matches what one of the others does."""
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"
