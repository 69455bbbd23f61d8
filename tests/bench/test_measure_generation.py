"""`scripts/measure_generation_gpu.py` with a tiny model on a CPU: every phase runs, and repeated layers load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import w3pack

SCRIPT = Path(w3pack.__file__).parents[1] / "scripts" / "measure_generation_gpu.py"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--quantise-layers", "1"]], ids=["all layers", "one layer repeated"])
def test_every_model_is_measured(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--small", "--device", "cpu", "--layers", "2", "--batch", "1", "2"]
    command += ["--tokens", "4", "--folder", str(tmp_path), *arguments]
    found = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout))
    first, again = found
    assert {"make", "quantise"} <= first["seconds"].keys()
    assert not {"make", "quantise"} & again["seconds"].keys()
    assert list(first["models"]) == ["bf16", "separate", "merged"]
    assert all(list(model["graph"]) == ["1", "2"] for model in first["models"].values())
    assert first["models"]["merged"]["prepared"][1].startswith("2 times q_proj + k_proj + v_proj")
    assert first["models"]["separate"]["prepared"][1:] == []
    assert first["models"]["merged"]["logits_against_separate"] < 1e-2
    assert first["speed_against_bf16"]["merged"]["graph"]["1"] > 0
