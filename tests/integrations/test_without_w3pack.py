"""Stock transformers, which knows nothing of w3pack, must not run a packed checkpoint on random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

PROGRAM = """
import json, sys

folders = json.loads({folders!r})
# as if w3pack were not installed, also where its .pth has run already
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "w3pack_autoload"]
sys.modules["w3pack"] = sys.modules["w3pack_autoload"] = None

import torch, transformers
from transformers.quantizers import auto

assert "w3pack" not in auto.AUTO_QUANTIZER_MAPPING and "w3pack" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
outcomes = {{}}
for name, folder in folders.items():
    for kind in ("AutoModelForCausalLM", "AutoModel"):
        for kwargs in ({{}}, {{"dtype": torch.bfloat16}}, {{"device_map": "cpu"}}):
            key = f"{{name}} {{kind}} {{sorted(kwargs)}}"
            try:
                getattr(transformers, kind).from_pretrained(folder, **kwargs)
                outcomes[key] = None
            except Exception as error:
                outcomes[key] = f"{{type(error).__name__}}: {{error}}"

# the remedy that the guard tensor names works in the same process
del sys.modules["w3pack"], sys.modules["w3pack_autoload"]
import w3pack

for folder in folders.values():
    transformers.AutoModelForCausalLM.from_pretrained(folder)
print("OUTCOMES", json.dumps(outcomes))
"""


def test_stock_transformers_raises(lab: Any, python: Callable[[str], str]) -> None:
    experts = ("re:.*experts.*",)
    checkpoints = {
        "dense": lab.packed("llama"),
        "dense nibble": lab.packed("qwen2", layout="nibble"),
        "tied": lab.packed("gemma3_text"),
        "fused": lab.packed("phi3"),
        "head": lab.packed("llama", only=("lm_head",), lm_head=True),
        "moe": lab.packed("qwen3_moe"),
        "moe, experts only": lab.packed("qwen3_moe", only=experts),
        "mixtral": lab.packed("mixtral"),
        "mixtral, experts only": lab.packed("mixtral", only=experts),
        "mixtral, one projection": lab.packed("mixtral", only=(r"re:.*experts\.\d+\.w2",)),
        "one expert": lab.packed("qwen3_moe", only=("model.layers.0.mlp.experts.2.down_proj",)),
    }
    folders = json.dumps({name: str(packed.folder) for name, packed in checkpoints.items()})
    printed = python(PROGRAM.format(folders=folders)).partition("OUTCOMES ")[2]
    outcomes = json.loads(printed)
    assert len(outcomes) == 6 * len(checkpoints)
    # the base model of a checkpoint where only the head is packed is complete: it has no random weights
    silent = [key for key, outcome in outcomes.items() if outcome is None and not key.startswith("head AutoModel ")]
    assert silent == []
