"""What one server is told once, at its start (serving 8): limits, keys, origins, media, times."""

from __future__ import annotations

from dataclasses import dataclass, field

from k3_core.errors import K3Error
from k3_serve.api.profile import PROFILES
from k3_serve.limits import Limits
from k3_serve.ops.auth import KeyRing
from k3_serve.ops.fetch import MediaPolicy


@dataclass(frozen=True)
class Settings:
    """The settings of an application. The defaults are those of a server on loopback.

    `cors_origins` are the origins of web pages that may call the server; `drain_seconds` is how
    long requests may still run after SIGTERM; `has_vllm_names` adds the metric names that routers
    made for vLLM read; `profile` is one of `k3_serve.api.profile.PROFILES`.
    """

    limits: Limits = field(default_factory=Limits)
    keys: KeyRing = field(default_factory=KeyRing)
    cors_origins: tuple[str, ...] = ()
    media: MediaPolicy = field(default_factory=MediaPolicy)
    drain_seconds: float = 30.0
    has_vllm_names: bool = False
    profile: str = "open"

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise K3Error(f"profile {self.profile!r} is not one of {', '.join(PROFILES)}")
