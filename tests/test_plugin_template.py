"""The example plugin, by entry point and by file: found, conforming, and used by a model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "examples" / "k3-plugin-template"
SOURCES = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]

USE = """
import torch
from k3_core import K3Config, K3ForConditionalGeneration
from k3_core.testing import check_impl

for request in (("attention", "kda", "kda.recurrent"), ("kernel", "situ_glu", "logistic")):
    assert check_impl(*request) >= 8, request

torch.manual_seed(0)
config = K3Config.preset("k3-test")
model = K3ForConditionalGeneration(config)
names = {key: resolution.chosen.name for key, resolution in model.resolutions.items()}
assert names["attention.kda"] == "kda.recurrent", names
assert names["kernel.situ_glu"] == "situ_glu.logistic", names
layers = [type(m).__name__ for m in model.modules() if type(m).__name__.endswith("KDA")]
assert layers and set(layers) == {"RecurrentKDA"}, layers

table = {"attention": {"kda": "default"}, "kernel.situ_glu": "reference"}
plain = K3ForConditionalGeneration(config, impl_overrides=table)
assert plain.resolutions["attention.kda"].source == "config"
plain.load_state_dict(model.state_dict())
ids = torch.randint(config.text.vocab_size, (2, 21))
difference = (model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max()
assert difference < 1e-4, difference
print("used")
"""


def _environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("K3_", "PYTHONPATH"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def _run(environment: dict[str, str], *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed the plugin into, without a network."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target"]
    _run(
        _environment(), "-m", "pip", "install", *options, str(target), str(TEMPLATE), folder=target
    )
    return target


def test_by_entry_point(installed: Path, tmp_path: Path) -> None:
    environment = _environment(PYTHONPATH=os.pathsep.join([str(installed), *SOURCES]))
    listed = _run(environment, "-m", "k3_core.cli.app", "plugins", "list", folder=tmp_path)
    row = next(line for line in listed.splitlines() if line.startswith("k3_plugin_template"))
    assert row.split()[1:5] == ["k3-plugin-template", "0.1.0", "ok", "2"]
    assert _run(environment, "-c", USE, folder=tmp_path).strip() == "used"


def test_by_file() -> None:
    environment = _environment(
        PYTHONPATH=os.pathsep.join(SOURCES), K3_PLUGINS="./src/k3_plugin_template/plugin.py"
    )
    listed = _run(environment, "-m", "k3_core.cli.app", "plugins", "list", folder=TEMPLATE)
    row = next(line for line in listed.splitlines() if line.startswith("k3_plugin_template"))
    assert row.split()[1:6] == ["file", "plugin.py", "file", "ok", "2"]
    assert _run(environment, "-c", USE, folder=TEMPLATE).strip() == "used"
