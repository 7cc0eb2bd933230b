"""Whether a document was cut off: by its format's own rules, or in the middle of a sentence.

A cut at the end of a sentence or of a statement cannot be seen and is not looked for.
"""

import ast
import re
import warnings
from functools import lru_cache
from html.parser import HTMLParser

from k3_train.data.clean.binary import ends_inside_character
from k3_train.data.clean.brackets import C_LIKE, JSON, SCRIPT, is_unfinished
from k3_train.data.documents import Document

BRACED = {
    **dict.fromkeys((".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".go", ".rs", ".css"), C_LIKE),
    **dict.fromkeys((".js", ".ts", ".tsx", ".jsx"), SCRIPT),
    ".json": JSON,
}
NEWLINE_AT_END = frozenset({".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".go", ".rs", ".sh"})
"""Source files that end with a newline by convention; 4 of 11,771 installed .py files do not."""
MARKUP = frozenset({".html", ".htm", ".xhtml", ".xml", ".svg"})
TABLES = frozenset({".csv", ".tsv"})
MARKER = re.compile(
    r"(?:[\[(<]\s*(?:\w+ )?(?:truncated|continued|snip|cut)[^\])>]{0,40}[\])>]"
    r"|(?:read|see|show) more\W*|continue reading\W*|\.\.\.|…)$",
    re.IGNORECASE,
)
OPTIONAL_END = frozenset(
    {"area", "base", "body", "br", "col", "colgroup", "dd", "dt", "embed", "head", "hr", "html"}
    | {"img", "input", "li", "link", "meta", "option", "p", "param", "source", "tbody", "td"}
    | {"tfoot", "th", "thead", "tr", "track", "wbr"}
)
"""HTML elements that need no end tag."""


def is_truncated(document: Document) -> bool:
    """Whether the end of the document is missing."""
    text = document.text.rstrip()
    if not text:
        return False
    if ends_inside_character(document.data) or MARKER.search(text[-80:]):
        return True
    suffix = document.suffix
    if suffix in NEWLINE_AT_END and not document.text.endswith("\n"):
        return True
    if suffix in (".py", ".pyi"):
        return python_error(document.text) == "cut"
    if suffix in BRACED:
        return is_unfinished(text, BRACED[suffix])
    if suffix in MARKUP or text.startswith(("<!DOCTYPE", "<?xml", "<html")):
        return _markup_is_cut(text, suffix)
    if suffix in TABLES:
        return _table_is_cut(text)
    if text[0] in "{[" and is_unfinished(text, JSON):
        return True
    return text.count("\n```") % 2 == 1 or _prose_is_cut(text)


@lru_cache(maxsize=1)  # asked twice about one document
def python_error(text: str) -> str | None:
    """`cut` when Python code stops too early, `wrong` when it is no Python, None when it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except SyntaxError as error:
        message = error.msg or ""
        last = len(text.rstrip().splitlines())
        is_at_end = (error.lineno or 0) >= last
        early = ("was never closed", "unterminated", "unexpected EOF", "expected an indented block")
        return "cut" if is_at_end or any(one in message for one in early) else "wrong"
    except (ValueError, RecursionError, MemoryError):
        return "wrong"
    return None


class _Tags(HTMLParser):
    """Keeps the elements that are open."""

    def __init__(self, is_html: bool) -> None:
        super().__init__()
        self.open: list[str] = []
        self.free = OPTIONAL_END if is_html else frozenset[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.free:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def _markup_is_cut(text: str, suffix: str) -> bool:
    is_html = suffix not in (".xml", ".svg")
    parser = _Tags(is_html)
    parser.feed(text)
    lower = text.lower()
    is_document_open = "<html" in lower and "</html" not in lower
    return bool(parser.open) or bool(parser.rawdata) or (is_html and is_document_open)


def _table_is_cut(text: str) -> bool:
    lines = text.splitlines()
    separator = max(",;\t", key=lines[0].count)
    widths = [line.count(separator) for line in lines]
    is_regular = len(lines) > 2 and len(set(widths[:-1])) == 1
    return is_regular and widths[-1] < widths[0]


SENTENCE = re.compile(r"[.!?][\"')\]”’]*(?:\s|$)|[。！？]")
FINISHED = re.compile(r"[.!?:;。！？।؟`|}>=*_~-][\"'”’»)\]*_]*$|[\"'”»)\]]$|(?:://|www\.|@)\S+$")
STANDALONE = re.compile(
    r"^\s*(?:[-*+•>|#$=~—–]|\d+[.)]?\s|\d{4}-|©|Copyright|[A-Z][\w'’.-]*(?:\s+[A-Z][\w'’.-]*)+$|[^a-z]*$)"
)
"""A heading, a list item, a signature, a copyright: lines that end without a full stop."""
MIN_SENTENCES = 2
MIN_FINISHED = 0.85
"""Share of the other paragraphs that end with a full stop; below it the text is not such prose."""
SHORT = 10
"""Words of a last paragraph under a heading that need no full stop."""


def _prose_is_cut(text: str) -> bool:
    """Prose whose paragraphs end with full stops, except for the last one."""
    if len(SENTENCE.findall(text)) < MIN_SENTENCES:
        return False
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) == 1:
        paragraphs = _lines_or_one(paragraphs[0])
    *others, last = paragraphs
    line = last.splitlines()[-1]
    if _is_finished(last) or STANDALONE.match(line) or line.startswith(("  ", "\t")):
        return False
    if others and _ends_with_heading(others[-1]) and len(last.split()) <= SHORT:
        return False
    ends = [one for one in others if not STANDALONE.match(one.splitlines()[-1])]
    return sum(map(_is_finished, ends)) >= MIN_FINISHED * len(ends)


def _ends_with_heading(paragraph: str) -> bool:
    return STANDALONE.match(paragraph.splitlines()[-1]) is not None


def _lines_or_one(paragraph: str) -> list[str]:
    """Lines, when most of them end a sentence; hard-wrapped text is one paragraph."""
    lines = paragraph.splitlines()
    is_by_line = len(lines) > 1 and sum(map(_is_finished, lines[:-1])) >= len(lines[:-1]) / 2
    return lines if is_by_line else [paragraph]


def _is_finished(paragraph: str) -> bool:
    return FINISHED.search(paragraph.rstrip()[-100:]) is not None
