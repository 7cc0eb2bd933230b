"""Where a model is: a local folder, or the name of a model bundled with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from .folder import CONFIG
from .headers import CheckpointError


def resolve_source(path_or_name: str | Path) -> Path:
    """The folder of a model. Nothing is downloaded.

    Raises CheckpointError when it is neither a folder with config.json nor a bundled model.
    """
    folder = Path(path_or_name)
    if (folder / CONFIG).is_file():
        return folder
    assets = Path(str(files("k3_core"))) / "assets"
    bundled = sorted(one.parent.name for one in assets.glob(f"*/{CONFIG}"))
    if str(path_or_name) in bundled:
        return assets / str(path_or_name)
    problem = f"a folder without {CONFIG}" if folder.is_dir() else "not a folder"
    raise CheckpointError(
        f"{str(path_or_name)!r} is {problem} and not a bundled model "
        f"({', '.join(bundled) or 'none is installed'}). Give a folder in the released layout; "
        "nothing is downloaded"
    )
