"""Looking up a value through one tool call: question, call, result, answer."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from k3_core.tasks.base import Message, Question, check_effort
from k3_core.tasks.words import KEYS, draw_keys, draw_values

LETTERS = 0.1
NUMBERED = 0.5
NOT_FOUND = "not found"
# attribute -> (tool name, name of its one argument)
TOOLS = {
    "value": ("get_value", "key"),
    "price": ("get_price", "item"),
    "code": ("get_code", "name"),
}
WORDINGS = (
    'Use the tool: what is the {attribute} of "{asked}"?',
    'Find the {attribute} of "{asked}" with the tool.',
    'Call the tool and tell me the {attribute} of "{asked}".',
)


def declare(attribute: str) -> dict[str, Any]:
    """The declaration of the tool that returns `attribute`."""
    name, argument = TOOLS[attribute]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Get the {attribute}.",
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }


@dataclass(frozen=True)
class ToolLookupQuestion(Question):
    """The `attribute` of `asked`, which only the tool knows."""

    family: ClassVar[str] = "tool_lookup"
    attribute: str
    asked: str

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The one tool of the request."""
        return [declare(self.attribute)]

    def tool_result(self, call: Mapping[str, Any]) -> str:
        """The value if `call` is right, else `not found`; its arguments are a dict or JSON text."""
        function = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError:
                return NOT_FOUND
        name, argument = TOOLS[self.attribute]
        is_right = function["name"] == name and arguments == {argument: self.asked}
        return self.answer if is_right else NOT_FOUND

    def reasoning(self, effort: str) -> str:
        """The think channel before the call."""
        name, argument = TOOLS[self.attribute]
        if effort == "low":
            return ""
        if effort == "high":
            return f"Call {name}."
        return (
            f"Asked for the {self.attribute}.\nThe tool is {name}.\n"
            f'Set {argument} to "{self.asked}".'
        )

    def conclusion(self, effort: str) -> str:
        """The think channel after the result."""
        if effort == "low":
            return ""
        if effort == "high":
            return f"The result is {self.answer}."
        return (
            f'The result is {self.answer}.\nCheck: asked for "{self.asked}", '
            f'called with "{self.asked}".'
        )

    def reference_turn(self, effort: str) -> list[Message]:
        """Assistant call, tool result, assistant answer."""
        check_effort(effort)
        name, argument = TOOLS[self.attribute]
        function = {"name": name, "arguments": {argument: self.asked}}
        call = {"id": "call_1", "type": "function", "function": function}
        return [
            {
                "role": "assistant",
                "reasoning_content": self.reasoning(effort),
                "content": "",
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": self.tool_result(call)},
            self.final_message(self.conclusion(effort)),
        ]


def make(rng: random.Random) -> ToolLookupQuestion:
    """Draw a name and what is asked of it; the split is theirs, whatever the tool returns."""
    attribute, asked = rng.choice(tuple(TOOLS)), _name(rng)
    (answer,) = draw_values(rng, 1)
    prompt = rng.choice(WORDINGS).format(attribute=attribute, asked=asked)
    return ToolLookupQuestion(
        key=f"{attribute} of {asked}",
        prompt=prompt,
        answer=answer,
        attribute=attribute,
        asked=asked,
    )


def _name(rng: random.Random) -> str:
    """A word, a word with a number below 100, or three letters: too many to learn by heart."""
    if rng.random() < LETTERS:
        return draw_keys(rng, 1, letters=1.0)[0]
    return rng.choice(KEYS) + (str(rng.randrange(100)) if rng.random() < NUMBERED else "")
