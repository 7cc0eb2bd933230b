"""The HTTP API: the wire contract of chats and completions over any `Engine` (serving 4)."""
