"""JSON text of what callers pass in, and the error for what has none."""

import json
from typing import Any

from k3_core.errors import K3Error


class ConversationError(K3Error, ValueError):
    """A message, tool or option that XTML cannot express."""


def json_text(value: Any, where: str, is_compact: bool = False) -> str:
    """The value as JSON with non-ASCII kept; compact also sorts the keys of every object.

    Raises ConversationError, naming `where`, for values without a JSON form (NaN, infinity,
    foreign objects, keys that are no strings) and for nesting too deep to write.
    """
    separators = (",", ":") if is_compact else None
    try:
        return json.dumps(
            value,
            ensure_ascii=False,
            sort_keys=is_compact,
            separators=separators,
            allow_nan=False,
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ConversationError(f"{where} cannot be written as JSON: {error}") from None
