"""Whether a text is the output of a program: log lines, progress, stack traces."""

import json
import re

MIN_LINES = 5
MIN_SHARE = 0.5
"""Of the lines that are not empty."""
DATE = r"\d{4}[-/.]\d\d[-/.]\d\d"
TIME = r"\d\d:\d\d:\d\d"
LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|FATAL|CRITICAL|SEVERE)"
START = re.compile(
    "|".join(
        (
            rf".{{0,24}}{DATE}[T ,]\s?{TIME}",  # 2026-01-31 12:00:00
            rf"\W?[A-Z][a-z]{{2}}\s+\d{{1,2}} {TIME}",  # Jan 31 12:00:00
            rf"\W?{TIME}[.,\s\]|]",
            r"\[\s*\d+\.\d{3,}\]",  # seconds since the start
            rf"[IWEF]\d{{4}} {TIME}",
            rf"\W?(?:{LEVEL}|{LEVEL.lower()})\b\s?[\]:|>-]",
            rf".{{0,60}}[\[|(\s]{LEVEL}[\]|):\s].*\d",
            r"\d{10}(?:\d{3})?(?:\.\d+)?\b",  # seconds or milliseconds since 1970
            r"\W?\s*\d{1,3}\s?%[\]|\s]",
            r"\[\s*\d+/\d+\]",
            r"(?:step|epoch|iter|iteration|batch)\W{0,3}\d+.*\d",
            r"\s+at [\w.$<>]+\(",
            r'\s+File ".*", line \d+',
            r"make(?:\[\d+\])?: ",
        )
    )
)
ANYWHERE = re.compile(
    rf"\[\d\d/[A-Z][a-z]{{2}}/\d{{4}}:{TIME}"  # [31/Jan/2026:12:00:00
    r"|(?:\.\.\.|\s)\s?(?:ok|PASS(?:ED)?|FAIL(?:ED)?|SKIPPED)(?:\s+\[\s*\d+%\])?$"
)
TIMES = frozenset({"time", "timestamp", "ts", "@timestamp", "asctime", "date"})
LEVELS = frozenset({"level", "severity", "levelname", "lvl"})


def is_log(text: str) -> bool:
    """Whether at least half of the lines look like a program's output."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if len(lines) < MIN_LINES:
        return False
    return sum(map(is_log_line, lines)) >= MIN_SHARE * len(lines)


def is_log_line(line: str) -> bool:
    """Whether one line looks like that."""
    if line.startswith("{"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return False
        return not TIMES.isdisjoint(row) or not LEVELS.isdisjoint(row)
    return bool(START.match(line) or ANYWHERE.search(line))
