"""A whole assistant turn as a grammar, from where its generation prefix ends (serving 4a).

The prefix has opened a channel already: the grammar lets that one be closed before it asks for
calls or JSON (serving 5A, rows 7 and 8). What the grammar accepts is what the renderer writes, so
the parser of the output finds nothing wrong in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from k3_serve.grammar.arguments import arguments_of
from k3_serve.grammar.lark import GrammarError, Lark, literal

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer

MAX_CALLS = 32
_MAX_OPENERS = 8192  # the tools times the calls: every call has its number in its opener


@dataclass(frozen=True)
class Tool:
    """A tool and how far its parameters bind: wholly, as far as can be, or not at all."""

    name: str
    parameters: Any
    strict: bool | None


@dataclass(frozen=True)
class Turn:
    """What an assistant turn has to be.

    `calls` says whether it makes calls; `json_schema` describes its response (None is any text).
    """

    channel: Literal["think", "response"]
    tools: tuple[Tool, ...] = ()
    calls: Literal["never", "maybe", "always"] = "maybe"
    max_calls: int = MAX_CALLS
    json_schema: Any = None

    @property
    def is_free(self) -> bool:
        """Whether any output will do, so that no grammar is needed."""
        is_any_call = self.calls == "maybe" and self.max_calls >= MAX_CALLS
        has_strict = any(tool.strict for tool in self.tools)
        return self.json_schema is None and (not self.tools or (is_any_call and not has_strict))


def turn_grammar(turn: Turn, tokenizer: K3Tokenizer, is_lenient: bool = False) -> str:
    """The grammar of a turn, in llguidance's Lark.

    Raises GrammarError for a schema that cannot be enforced. `is_lenient` drops what cannot be of
    the tools that do not demand it; nothing is dropped of a strict one.
    """
    lark = Lark(tokenizer)
    is_calling = bool(turn.tools) and turn.calls != "never"
    call_part = _calls(turn, lark, is_lenient) if is_calling else ""
    closed, end = lark.closer("response"), lark.closer("message")
    if turn.json_schema is None:
        text = f"{lark.text} {closed}"
        must_call = turn.calls == "always"
        rest = f"{text} {call_part if must_call or not call_part else f'({call_part})?'} {end}"
    else:
        content = lark.json(turn.json_schema, is_argument=False)
        arms = [f"{content} {closed} {end}"] if turn.calls != "always" else []
        arms += [f"{closed} {call_part} {end}"] if call_part else []
        rest = f"({' | '.join(arms)})"
    if turn.channel == "response":
        return lark.finish(rest)
    response = lark.opener('"response"')
    return lark.finish(f"{lark.text} {lark.closer('think')} {response} {rest}")


def _calls(turn: Turn, lark: Lark, is_lenient: bool) -> str:
    """The tools channel: calls with their numbers, from 1 on."""
    arguments = [_arguments(tool, lark, is_lenient) for tool in turn.tools]
    number = max(1, min(turn.max_calls, _MAX_OPENERS // len(turn.tools)))
    more = ""
    for index in range(number, 0, -1):
        arms = []
        for tool, rule in zip(turn.tools, arguments, strict=True):
            opener = lark.opener(literal(f'call tool="{tool.name}" index="{index}"'))
            arms.append(f"{opener} {rule} {lark.closer('call')}")
        call = lark.rule(" | ".join(arms))
        more = lark.rule(f"{call} {more}?" if more else call)
    return f"{lark.opener(literal('tools'))} {more} {lark.closer('tools')}"


def _arguments(tool: Tool, lark: Lark, is_lenient: bool) -> str:
    where = f"the parameters of {tool.name!r}"
    if tool.strict is False:
        return arguments_of(None, lark, where)
    lark.is_lenient = is_lenient and not tool.strict
    try:
        return arguments_of(tool.parameters, lark, where)
    except GrammarError:
        if tool.strict or not is_lenient:
            raise
        return arguments_of(None, lark, where)
    finally:
        lark.is_lenient = False
