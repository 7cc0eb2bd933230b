"""The tiers against a dictionary: what they give is what was evicted, whole, or nothing (I11).

Every page and every state has bytes that follow from its prefix, so the dictionary is a function:
what a restore brings is compared with it. The bounds are compared with slots and with the folder.
"""

from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from k3_serve.cache import Checkpoint, EvictedCheckpoint, EvictedPages, seed_key, unit_keys
from k3_serve.cache.arena import Arena, ArenaLayout
from k3_serve.cache.tiers import TierStore
from k3_serve.cache.tiers.disk import LOCK, DiskTier
from k3_serve.cache.tiers.host import HostTier
from k3_serve.cache.tiers.restore import Restore
from k3_serve.observer import Silent
from k3_serve.testing.stepped import SteppedWorker

UNIT, UNITS_PER_PAGE, EXTENT = 2, 2, 2
LAYOUT = ArenaLayout(UNIT * UNITS_PER_PAGE, 48, EXTENT * 48, torch.float32, {}, {})
NUM_PAGES = 40
prefixes = st.sampled_from(
    [(0,) * n for n in (2, 4, 6, 8, 12, 16)] + [(0, 0, 1, 1), (0,) * 7 + (1,)]
)


def bytes_of(part, key):
    """The bytes of a page of latents or of a part of a state."""
    digest = blake2b(f"{part}".encode() + key, digest_size=48).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


damages = st.sampled_from(["flip", "flip", "cut", "delete"])


class TierMachine(RuleBasedStateMachine):
    """Evictions, copies that end late, restores, damaged files, restarts, other weights."""

    @initialize(
        cpu=st.sampled_from([6, 12, 40, 3]), disk=st.sampled_from([60_000, 0, 6_000, 2_500])
    )
    def set_up(self, cpu, disk):
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.cpu, self.disk, self.version = cpu, disk, 0
        self.is_damaged = False
        self.arena = Arena(LAYOUT, NUM_PAGES, "cpu")
        self.evicted, self.texts = set(), []
        self.start()

    def start(self):
        self.host = HostTier(LAYOUT, self.cpu * LAYOUT.page_bytes, torch.device("cpu"))
        self.files = None
        if self.disk:
            self.files = DiskTier(self.folder, self.disk, LAYOUT, self.space())
        self.writer, self.reader = SteppedWorker("w", 3), SteppedWorker("r", 9)
        self.store = TierStore(self.host, self.files, self.writer, self.reader, Silent())

    def space(self):
        return f"{self.version:032x}"

    def keys(self, prefix):
        return unit_keys(seed_key(self.version, "", "float32"), prefix, UNIT)

    def page_keys(self, keys):
        ends = range(UNITS_PER_PAGE, len(keys) + UNITS_PER_PAGE, UNITS_PER_PAGE)
        return tuple(keys[min(end, len(keys)) - 1] for end in ends)

    @rule(prefix=prefixes, kind=st.sampled_from(["prompt", "turn", "head"]))
    def evict(self, prefix, kind):
        keys = self.keys(prefix)
        named = self.page_keys(keys)
        extent, pages = tuple(range(EXTENT)), tuple(range(EXTENT, EXTENT + len(named)))
        for part in extent:
            self.arena.bytes_PB[part] = bytes_of(part, keys[-1])
        for page, key in zip(pages, named, strict=True):
            self.arena.bytes_PB[page] = bytes_of("mla", key)
        checkpoint = Checkpoint(keys[-1], len(keys) * UNIT, extent, kind)
        self.store.write_back(self.arena, EvictedCheckpoint(checkpoint, pages, named))
        self.store.write_back(self.arena, EvictedPages(keys[-1], len(keys) * UNIT, pages[-1:]))
        self.evicted.add(keys[-1])
        self.texts = [*self.texts[-5:], prefix]
        self.arena.bytes_PB.fill_(0xFF)

    @rule(most=st.integers(1, 3))
    def copy(self, most):
        self.writer.run(most)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), num_held=st.integers(0, 3), is_cancelled=st.booleans())
    def come_back(self, data, num_held, is_cancelled):
        """A prompt goes on where one that was evicted ended, or parted from it."""
        text = data.draw(st.sampled_from(self.texts))
        self.restore((*text, *data.draw(prefixes))[:16], num_held, is_cancelled)

    def restore(self, prefix, num_held, is_cancelled):
        keys = self.keys(prefix)
        known = [tier.ledger.entries for tier in (self.host, self.files) if tier is not None]
        best = max((i for i, k in enumerate(keys) if any(k in e for e in known)), default=None)
        found = self.store.find(keys)
        assert (found is None) == (best is None)
        if found is None:
            return
        tier, entry = found
        assert entry.key == keys[best] in self.evicted and entry.num_tokens == (best + 1) * UNIT
        named = self.page_keys(keys[: best + 1])
        assert entry.pages == named and entry.kind in ("prompt", "turn", "head")
        missing = named[num_held:]
        places = list(range(10, 10 + len(missing)))
        pages = list(zip(missing, places, strict=True))
        job = Restore(tier, entry, [8, 9], pages, self.arena)
        done = []
        self.store.start(job, lambda: done.append(job))
        if is_cancelled:
            job.cancel()
        self.reader.run()
        self.store.leave(tier, entry)
        assert done == [job]
        if is_cancelled:
            assert bool((self.arena.bytes_PB == 0xFF).all())
        elif job.failure is not None:
            assert self.is_damaged and tier is self.files
            assert entry.key not in tier.ledger.entries
        else:
            for part, page in enumerate(job.extent):
                assert torch.equal(self.arena.bytes_PB[page], bytes_of(part, entry.key))
            for key, page in pages:
                assert torch.equal(self.arena.bytes_PB[page], bytes_of("mla", key))
        self.arena.bytes_PB.fill_(0xFF)

    @rule(which=st.integers(0, 999), how=damages)
    def damage(self, which, how):
        files = sorted(f for f in self.folder.glob("*.*") if f.stat().st_size)
        if not files:
            return
        self.is_damaged = True
        file = files[which % len(files)]
        data = bytearray(file.read_bytes())
        at = len(data) - 1 - which % 40 if which % 2 else which * 37 % len(data)  # often payload
        data[at] ^= 4
        if how == "delete":
            file.unlink()
        else:
            file.write_bytes(data if how == "flip" else data[:at])

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0, 999), how=damages)
    def restart(self, which, how):
        """A new engine finds in the files what the old one left there."""
        self.store.close()
        if which % 4:
            self.damage(which, how)
        self.start()
        for text in self.texts:
            self.restore(text, 0, False)

    @rule(odds=st.integers(0, 9))
    def update_weights(self, odds):
        if odds != 5:
            return
        self.version += 1
        self.store.forget(self.space)
        for prefix in ((0,) * 16, (0, 0, 0, 1)):
            assert self.store.find(self.keys(prefix)) is None

    @invariant()
    def the_host_memory_is_accounted_for(self):
        if not hasattr(self, "host"):
            return
        ledger = self.host.ledger
        pages = {key for entry in ledger.entries.values() for key in entry.pages}
        num_slots = len(ledger.entries) * EXTENT + len(pages)
        assert ledger.used == num_slots * LAYOUT.page_bytes <= self.cpu * LAYOUT.page_bytes
        assert len(self.host._free) == self.cpu - num_slots
        assert set(self.host._pages) == pages and set(self.host._states) == set(ledger.entries)

    @invariant()
    def the_folder_keeps_its_bound(self):
        if getattr(self, "files", None) is None:
            return
        files = [f for f in self.folder.iterdir() if f.name != LOCK]
        total = sum(f.stat().st_size for f in files)
        assert total <= self.disk and self.files.used <= self.disk
        if not self.is_damaged and not self.writer.jobs:
            assert total == self.files.used
            named = {f.stem.split("-")[1] for f in files if f.suffix == ".latents"}
            for entry in self.files.ledger.entries.values():
                assert {key.hex() for key in entry.pages} <= named

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.temporary.cleanup()


def run(max_examples):
    options = settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(TierMachine, settings=options)


def test_a_restore_brings_what_was_evicted_or_nothing():
    run(60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_restores_bring_what_was_evicted_or_nothing():
    run(500)
