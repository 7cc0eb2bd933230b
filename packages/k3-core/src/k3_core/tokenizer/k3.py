"""`K3Tokenizer`: the released tokenizer, and that of every smaller K3 model (architecture 7)."""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from k3_core.checkpoint.source import resolve_source
from k3_core.tokenizer.hf_json import added_token, tokenizer_json
from k3_core.tokenizer.ranks import TokenizerError, read_file, read_ranks, write_ranks
from k3_core.tokenizer.slots import NAMED_SLOTS, NUM_SLOTS, PATTERN, slot_names
from k3_core.tokenizer.text import cut_long, join_surrogates
from k3_core.xtml.render import chat_segments
from k3_core.xtml.segments import Segment

if TYPE_CHECKING:
    import tiktoken

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"


class K3Tokenizer:
    """Byte pair encoding over tiktoken ranks, then 256 special slots from `num_base_tokens` on.

    `ranks` maps token bytes to ids below `num_base_tokens`; gaps are allowed.
    """

    def __init__(self, ranks: Mapping[bytes, int], num_base_tokens: int) -> None:
        self.num_base_tokens = num_base_tokens
        self.vocab_size = num_base_tokens + NUM_SLOTS
        self.ranks = dict(ranks)
        self.special_ids = slot_names(num_base_tokens)
        self._bytes = {rank: token for token, rank in self.ranks.items()}
        self._bytes |= {token_id: name.encode() for name, token_id in self.special_ids.items()}
        self.bos_id = self.special_ids["[BOS]"]
        self.eos_id = self.special_ids["[EOS]"]
        self.end_of_msg_id = self.special_ids["<|end_of_msg|>"]
        self.open_id = self.special_ids["<|open|>"]
        self.close_id = self.special_ids["<|close|>"]
        self.sep_id = self.special_ids["<|sep|>"]
        self.media_begin_id = self.special_ids["<|media_begin|>"]
        self.media_content_id = self.special_ids["<|media_content|>"]
        self.media_end_id = self.special_ids["<|media_end|>"]
        self.media_pad_id = self.special_ids["<|media_pad|>"]
        self.unk_id = self.special_ids["[UNK]"]
        self.pad_id = self.special_ids["[PAD]"]
        # tokenizer_config.json and generation_config.json disagree on the end: both stop.
        self.stop_ids = frozenset({self.end_of_msg_id, self.eos_id})

    @classmethod
    def from_ranks(cls, path: str | Path, num_base_tokens: int) -> "K3Tokenizer":
        """From a rank file (`base64 rank` lines); the released one has 163,584 base tokens."""
        return cls(read_ranks(Path(path), num_base_tokens), num_base_tokens)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "K3Tokenizer":
        """From a folder with tiktoken.model and tokenizer_config.json, which numbers the slots.

        `folder` may also be the name of a bundled model. Raises CheckpointError when it is
        neither, TokenizerError for a missing or damaged file and when a named slot of the
        configuration is not where this tokenizer puts it.
        """
        if not (Path(folder) / CONFIG_FILE).is_file():
            folder = resolve_source(folder)
        config_path = Path(folder) / CONFIG_FILE
        contents = _read_slots(config_path)
        first_name = NAMED_SLOTS[0].name
        first = [token_id for token_id, content in contents.items() if content == first_name]
        if not first:
            raise TokenizerError(f"{config_path}: added_tokens_decoder has no {first_name!r}")
        tokenizer = cls.from_ranks(Path(folder) / RANKS_FILE, first[0])
        for token_id, content in contents.items():
            if tokenizer.special_ids.get(content) != token_id:
                raise TokenizerError(
                    f"{config_path}: {content!r} has id {token_id}, K3 has it at "
                    f"{tokenizer.special_ids.get(content)}; this is another tokenizer's folder"
                )
        return tokenizer

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tiktoken.model, tokenizer_config.json and tokenizer.json of the same ranks."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_ranks(folder / RANKS_FILE, self.ranks)
        _write_json(folder / CONFIG_FILE, self._config(), indent=2)
        content = tokenizer_json(self.ranks, self.num_base_tokens)
        _write_json(folder / "tokenizer.json", content, indent=None)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of the text, without a start token.

        Spellings of special tokens are ordinary text unless `allow_special`, which only trusted
        text may have. A lone surrogate encodes as U+FFFD.
        """
        pieces = cut_long(join_surrogates(text))
        if allow_special:
            encode = self._encoding.encode
            return [i for piece in pieces for i in encode(piece, allowed_special="all")]
        return [i for piece in pieces for i in self._encoding.encode_ordinary(piece)]

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of each segment encoded on its own, specials recognised in control segments only."""
        return [i for text, is_control in segments for i in self.encode(text, is_control)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens by their names; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The concatenated bytes of the ids."""
        return b"".join(self.token_bytes(token_id) for token_id in ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id, the name for a special one. Raises TokenizerError for an unused id."""
        try:
            return self._bytes[token_id]
        except KeyError:
            raise TokenizerError(
                f"token id {token_id} has no token; ids are 0..{self.vocab_size - 1}"
                + (" and the ranks have gaps" if 0 <= token_id < self.num_base_tokens else "")
            ) from None

    def chat_segments(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = True,
        thinking_effort: str | None = "max",
        tool_choice: str | None = None,
        response_format: dict[str, Any] | None = None,
        image_prompts: list[str] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """The conversation as `(text, is_control)` pairs: see `k3_core.xtml.chat_segments`."""
        return chat_segments(
            messages,
            tools=tools,
            thinking=thinking,
            thinking_effort=thinking_effort,
            tool_choice=tool_choice,
            response_format=response_format,
            image_prompts=image_prompts,
            add_generation_prompt=add_generation_prompt,
        )

    @overload
    def apply_chat_template(
        self, *conversation: Any, tokenize: Literal[True] = True, **options: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, *conversation: Any, tokenize: Literal[False], **options: Any
    ) -> str: ...

    def apply_chat_template(
        self, *conversation: Any, tokenize: bool = True, **options: Any
    ) -> list[int] | str:
        """Ids (or with `tokenize=False` the text); all other arguments are chat_segments'.

        The ids are those of the segments one by one: encoding the text again is not the same.
        """
        segments = self.chat_segments(*conversation, **options)
        if tokenize:
            return self.encode_segments(segments)
        return "".join(text for text, _ in segments)

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken  # on use: saving and decoding work on machines that lack it

        return tiktoken.Encoding(
            "k3", pat_str=PATTERN, mergeable_ranks=self.ranks, special_tokens=self.special_ids
        )

    def _config(self) -> dict[str, Any]:
        added = {
            str(self.num_base_tokens + offset): added_token(slot.name, offset)
            for offset, slot in NAMED_SLOTS.items()
        }
        return {
            "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }


def _read_slots(config_path: Path) -> dict[int, str]:
    """id -> spelling of the tokens that a tokenizer_config.json names."""
    raw = read_file(config_path)
    try:
        added = json.loads(raw)["added_tokens_decoder"]
        return {int(token_id): entry["content"] for token_id, entry in added.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerError(
            f"{config_path} does not describe K3's tokens ({type(error).__name__}: {error}); "
            f"save the tokenizer again"
        ) from None


def _write_json(path: Path, content: dict[str, Any], indent: int | None) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", "utf-8")
