"""A scan of code in any language with brackets, strings and comments: is it finished?"""

import re
from dataclasses import dataclass

PAIRS = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True)
class Syntax:
    """What to skip: comments to the end of the line, block comments, string quotes."""

    line_comment: str = r"//[^\n]*"
    quotes: str = "\"'"
    has_block_comments: bool = True

    def tokens(self) -> re.Pattern[str]:
        """Matches a comment, a string, a bracket, or the start of an unfinished one of them."""
        strings = [rf"{q}(?:\\.|[^\\{q}\n])*{q}" for q in self.quotes]
        blocks = [r"/\*.*?\*/", r"(?P<open>/\*)"] if self.has_block_comments else []
        line = [self.line_comment] if self.line_comment else []
        brackets = r"(?P<bracket>[()\[\]{}])"
        return re.compile("|".join([*blocks, *line, *strings, brackets]), re.S)


JSON = Syntax(line_comment="", quotes='"', has_block_comments=False).tokens()
C_LIKE = Syntax().tokens()
SCRIPT = Syntax(quotes="\"'`").tokens()


def is_unfinished(text: str, tokens: re.Pattern[str]) -> bool:
    """Whether the end comes inside a bracket or a block comment; wrong nesting is not that."""
    stack: list[str] = []
    for match in tokens.finditer(text):
        if match.groupdict().get("open"):
            return True
        bracket = match["bracket"]
        if bracket is None:
            continue
        if bracket not in PAIRS:
            stack.append(bracket)
        elif not stack or stack.pop() != PAIRS[bracket]:
            return False
    return bool(stack)
