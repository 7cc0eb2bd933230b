"""`k3 inspect` against the published sizes, and on sound and unsound folders."""

import json
import shutil
import subprocess
import sys

import pytest

from k3_core.cli.app import run


def test_preset_k3_equals_the_published_checkpoint(capsys, golden):
    assert run(["inspect", "--preset", "k3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "total 2,779.93 B" in text
    assert "active 104.19 B (input embedding excluded)" in text
    assert "ViT 401.2 M" in text
    assert "checkpoint 1,560,860,324,864 bytes in 497,220 tensors" in text


def test_json_of_preset_k3(capsys, golden):
    assert run(["inspect", "--preset", "k3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    published = json.loads((golden("released_checkpoint") / "tensors.json").read_text())
    assert report["checkpoint_bytes"] == published["total_size_bytes"]
    assert report["checkpoint_tensors"] == published["tensor_count"]
    assert report["parameters"]["total"] == 2_779_931_834_976
    assert report["differences"] == []
    sizes = {(row["name"], tuple(row["shape"])): row["count"] for row in report["tensors"]}
    first = published["tensors"][0]
    assert sizes[first["name"], tuple(first["shape"])] == first["count"]
    assert sum(sizes.values()) == published["tensor_count"]


def test_folder(capsys, golden):
    assert run(["inspect", str(golden("mxfp4_tiny")), "--json", "--tensors"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint_tensors"] == 660 and report["differences"] == []
    assert run(["inspect", str(golden("mxfp4_tiny")), "--tensors"]) == 0
    assert "experts.{expert}.w1.weight_packed" in capsys.readouterr().out


def test_folder_that_does_not_fit_lists_differences(capsys, golden, tmp_path):
    shutil.copytree(golden("text_tiny"), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["num_experts"] = 17
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert run(["inspect", str(tmp_path / "m")]) == 1
    out = capsys.readouterr().out
    assert "missing tensor model.layers.1.block_sparse_moe.experts.16.w1.weight" in out
    assert "more differences" in out


@pytest.mark.parametrize(
    "arguments", [[], ["x", "--preset", "k3"], ["--preset", "k4"], ["nothing"]]
)
def test_wrong_arguments_explain_themselves(capsys, arguments):
    assert run(["inspect", *arguments]) == 2
    assert "k3: error:" in capsys.readouterr().err


def test_inspect_imports_no_torch():
    program = (
        "import sys; from k3_core.cli.app import run; run(['inspect', '--preset', 'k3-test']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
