"""The whole config.json: wrapper layout as released, or the flat text-only layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from .errors import ConfigError, bad_value
from .part import ConfigPart
from .text import DType, TextConfig
from .vision import VisionConfig

_SECTIONS = {"text_config": "text", "vision_config": "vision"}
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "architectures", "model_type")


@dataclass(frozen=True, kw_only=True)
class K3Config(ConfigPart):
    """Configuration of a K3 model.

    is_flat: the file has no `text_config` and tensor names have no `language_model.` prefix.
    In that layout the ids, dtype and architectures are those of `text`.
    """

    text: TextConfig
    vision: VisionConfig | None = None
    is_flat: bool = False
    architectures: tuple[str, ...] | None = ("KimiK3ForConditionalGeneration",)
    model_type: Literal["kimi_k3", "kimi_linear"] = "kimi_k3"
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    media_placeholder_token_id: int | None = None
    ignore_index: int = -100
    image_placeholder: str = "<|kimi_image_placeholder|>"
    tie_word_embeddings: Literal[False] = False
    dtype: DType = "bfloat16"

    @classmethod
    def _fields(cls) -> list[Any]:
        return [one for one in super()._fields() if one.name != "is_flat"]

    def validate(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.text.vocab_size:
                allowed = f"0 to vocab_size - 1 = {self.text.vocab_size - 1}"
                raise bad_value(name, value, allowed)
        if self.vision is not None:
            self._check_vision(self.vision)
        if self.is_flat:
            self._check_flat()
        elif self.model_type != "kimi_k3":
            raise bad_value("model_type", self.model_type, "'kimi_k3' with a text_config")

    def _check_vision(self, vision: VisionConfig) -> None:
        if vision.text_hidden_size != self.text.hidden_size:
            allowed = f"text_config.hidden_size = {self.text.hidden_size}"
            raise bad_value("vision_config.text_hidden_size", vision.text_hidden_size, allowed)
        if self.media_placeholder_token_id is None:
            problem = "is missing although there is a vision_config"
            raise ConfigError("media_placeholder_token_id", problem, "Add the id.")

    def _check_flat(self) -> None:
        if self.vision is not None:
            raise ConfigError("is_flat", "a flat config has no vision tower", "Use is_flat=False.")
        for name in _SHARED:
            if getattr(self, name) != getattr(self.text, name):
                step = f"In the flat layout set {name} in `text` and here alike."
                raise bad_value(name, getattr(self, name), repr(getattr(self.text, name)), step)
        if self.dtype != (self.text.dtype or "bfloat16"):
            raise bad_value("dtype", self.dtype, f"{self.text.dtype!r}, the dtype of `text`")

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Read either layout. Raises ConfigError naming the value, the range and the next step."""
        if "text_config" not in data:
            return cls._from_flat(data)
        renamed = {_SECTIONS.get(key, key): value for key, value in data.items()}
        try:
            return super().from_dict(renamed)
        except ConfigError as error:
            head, _, rest = error.path.partition(".")
            outside = {inner: outer for outer, inner in _SECTIONS.items()}
            path = ".".join(filter(None, (outside.get(head, head), rest)))
            raise error.at(path) from None

    @classmethod
    def _from_flat(cls, data: Mapping[str, object]) -> Self:
        text = TextConfig.from_dict(data)
        shared: dict[str, Any] = {name: getattr(text, name) for name in _SHARED}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if shared[name] is None:
                raise ConfigError(name, "is missing and has no default", f"Add {name}.")
        return cls(text=text, is_flat=True, dtype=text.dtype or "bfloat16", **shared)

    def to_dict(self) -> dict[str, object]:
        """The file as JSON values, with exactly the keys that were read and those changed."""
        if self.is_flat:
            return self.text.to_dict()
        outside = {inner: outer for outer, inner in _SECTIONS.items()}
        return {outside.get(key, key): value for key, value in super().to_dict().items()}

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read config.json, or the config.json in a folder."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            problem = "no such file"
            raise ConfigError(str(file), problem, "Give a folder that holds config.json.")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(str(file), f"not JSON ({error})", "Repair the file.") from None
        if not isinstance(data, dict):
            raise ConfigError(str(file), "not a JSON object", "Repair the file.")
        return cls.from_dict(data)

    @classmethod
    def preset(cls, name: str) -> K3Config:
        """A named configuration: k3, k3-mini, k3-nano, k3-test, k3-test-vision or a plugin's."""
        from .presets import load_preset

        return load_preset(name)

    @property
    def is_quantized(self) -> bool:
        """Whether the routed experts are stored as MXFP4 according to the configuration."""
        return self.text.quantization_config is not None
