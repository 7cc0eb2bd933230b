"""The prefix cache of `k3 serve`, as its options say it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_core.errors import K3Error

FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(text: str, option: str) -> int:
    """Bytes of a size such as 512MB, 4GB (powers of 1000) or 2GiB (of 1024); K3Error otherwise."""
    found = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?) ?([A-Za-z]*)", text.strip(), re.ASCII)
    if found is None or found[2].upper() not in FACTORS:
        raise K3Error(
            f"{option} is {text!r}; give bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or "
            "TiB, as in 512MB or 2GiB"
        )
    return int(float(found[1]) * FACTORS[found[2].upper()])


@dataclass(frozen=True)
class CacheChoice:
    """Sizes of the prefix cache. None leaves the engine's default."""

    size: int | None = None
    cpu_size: int = 0
    folder: Path | None = None
    disk_size: int | None = None
    unit: int | None = None
    token_budget: int | None = None

    @classmethod
    def read(
        cls,
        size: str,
        cpu_size: str,
        folder: Path | None,
        disk_size: str,
        unit: int | None,
        token_budget: int | None,
    ) -> CacheChoice:
        """From the texts of the options, "" for one not given; K3Error for a bad one."""
        if disk_size and folder is None:
            raise K3Error("--disk-cache-size needs --disk-cache, the folder of the files")
        if folder is not None and folder.exists() and not folder.is_dir():
            raise K3Error(f"--disk-cache {folder} is not a folder")
        return cls(
            size=parse_size(size, "--cache-size") if size else None,
            cpu_size=parse_size(cpu_size, "--cpu-cache") if cpu_size else 0,
            folder=folder,
            disk_size=parse_size(disk_size, "--disk-cache-size") if disk_size else None,
            unit=unit,
            token_budget=token_budget,
        )

    def options(self) -> dict[str, Any]:
        """Arguments of `ContinuousEngine`."""
        given = {
            "cache_bytes": self.size,
            "disk_cache_bytes": self.disk_size,
            "unit": self.unit,
            "token_budget": self.token_budget,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return {"cpu_cache_bytes": self.cpu_size, "disk_cache": self.folder, **given}
