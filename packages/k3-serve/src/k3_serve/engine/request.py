"""A request as the scheduler sees it: rows, pages, a slot. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from k3_serve.cache.keys import extend_unit_keys
from k3_serve.cache.records import Checkpoint

NO_SLOT = -1


@dataclass(frozen=True)
class Restored:
    """What a tier gave to a request: tokens beyond the hit that it had, bytes, seconds."""

    num_tokens: int
    num_bytes: int
    seconds: float
    tier: str

    def report(self) -> dict[str, float | str]:
        """Its part of an answer's `k3_cache`."""
        return {
            "restored_tokens": self.num_tokens,
            "restored_bytes": self.num_bytes,
            "restore_ms": round(1000 * self.seconds, 3),
            "tier": self.tier,
        }


@dataclass(eq=False)
class RequestState:
    """A request's place in the engine.

    `rows` are the token ids that keys are made of, an image's placeholder once per row of it;
    generated tokens are appended. The first `num_computed` of them are in the cache.
    """

    request_id: str
    rows: list[int]
    request_class: str
    priority: int = 0
    seed: bytes = b""
    """Key of the empty prefix: version of the weights, salt, dtype."""
    images: tuple[tuple[int, bytes], ...] = ()
    """(first row, content hash) of each image."""
    images_end: int = 0
    """The row after the last image row: before it, ids alone do not say what a row is."""
    cost: int = 0
    """Tokens booked in the queue of its class, until it first runs."""
    submitted: float = 0.0
    """Seconds of a monotonic clock."""
    can_hit: bool = True
    """False for a request that needs the logits of its whole prompt."""

    num_head: int = 0
    """Rows of the stable head of the prompt; 0 when it is not known."""

    arrival: int = 0
    num_prompt: int = 0
    """Rows that are given, not generated, as the request was last (re)started."""
    slot: int = NO_SLOT
    num_computed: int = 0
    num_latent: int = 0
    """Rows whose latents were in the cache at the first admission, usable or not."""
    num_cached: int | None = None
    """Rows that came from the cache at the first admission; None before it."""
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    wanted: dict[int, str] = field(default_factory=dict)
    """Lasting checkpoints to take: number of tokens -> kind."""
    moving: Checkpoint | None = None
    """The latest checkpoint of the running request, which the next one supersedes."""
    is_suspect: bool = False
    """A step that it took part in failed: it runs alone until its prompt is computed."""
    num_refusals: int = 0
    """Steps in which it was not admitted for lack of room."""
    draft: tuple[int, ...] = ()
    """Token ids that may follow `rows`, for the next step to verify."""
    is_restoring: bool = False
    """It waits for a tier."""
    has_asked_tiers: bool = False
    """The tiers were asked for its prefix since it last waited."""
    restored: Restored | None = None

    @property
    def is_running(self) -> bool:
        """Whether it holds a slot."""
        return self.slot != NO_SLOT

    @property
    def is_decoding(self) -> bool:
        """Whether all but the last of its rows are computed."""
        return self.is_running and 0 < self.num_computed == len(self.rows) - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is served first and preempted last."""
        return (-self.priority, self.arrival)

    def room_in_unit(self, unit: int) -> int:
        """Rows behind the present ones up to the end of the unit of the last one."""
        return -len(self.rows) % unit

    def key_at(self, num_tokens: int, unit: int) -> bytes:
        """The key of a prefix of whole units, which may end in drafted rows."""
        keys = self.unit_keys(unit)
        if num_tokens > len(self.rows):
            rows = [*self.rows, *self.draft]
            keys = extend_unit_keys([*keys], self.seed, rows, unit, self.images)
        return keys[num_tokens // unit - 1]

    def unit_keys(self, unit: int) -> list[bytes]:
        """The keys of all whole units so far."""
        return extend_unit_keys(self.keys, self.seed, self.rows, unit, self.images)

    def want_checkpoints(self, unit: int, junction: int | None) -> None:
        """Lasting checkpoints of an admitted request: stable head, end of the prompt, junction."""
        last = (len(self.rows) - 1) // unit * unit
        if head := min(self.num_head // unit * unit, last):
            self.wanted[head] = "head"
        if self.num_prompt == len(self.rows) and last:
            self.wanted[last] = "prompt"
        if junction:
            self.wanted.setdefault(junction, "junction")

    def abandon(self) -> None:
        """Lets go of a slot and pages whose books are gone."""
        self.slot, self.pages, self.num_computed = NO_SLOT, [], 0
        self.wanted, self.moving, self.num_refusals, self.draft = {}, None, 0, ()
        self.has_asked_tiers = False

    def restart(self, seed: bytes) -> None:
        """Other weights: all rows are to be computed again, under new keys."""
        self.seed, self.keys, self.moving = seed, [], None
        self.has_asked_tiers = False
