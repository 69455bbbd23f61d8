#!/usr/bin/env bash
# What docs/results has from a GPU, made on the GPU that is here, with the python that is here.
# usage: scripts/measure_gpu.sh FOLDER [PART...]     parts: tests sanitize tune bench gateup generation (all, in this order)
# Each part leaves a log, and its JSON, in FOLDER; one that fails does not stop the others. The exit status says whether any did.
set -uo pipefail
OUT=$(realpath "${1:?usage: scripts/measure_gpu.sh FOLDER [PART...]}")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PY=${PYTHON:-python3}
TABLE=$("$PY" -c 'from w3pack.ops.w3_table import table_path; from w3pack.ops.device import device_name; print(table_path(device_name(0)))')
[ $# -gt 0 ] || set -- tests sanitize tune bench gateup generation

part() {
  case $1 in
    tests) scripts/test.sh --gpu -q ;;
    sanitize)
      for script in sanitize_kernels sanitize_gateup; do
        echo "== $script: memcheck"
        compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 "$PY" "scripts/$script.py" --verbose || return 1
        echo "== $script: racecheck"
        compute-sanitizer --tool racecheck --error-exitcode 1 "$PY" "scripts/$script.py" --checked --verbose || return 1
      done ;;
    tune)
      rm -f "$OUT/table.json"
      tune() { "$PY" -m w3pack tune --model limits --model llama-3-8b --output "$OUT/table.json" --json -q "$@"; }
      tune --tokens 4,8,16 --layout dense --qmap int8 --candidates 120 &&
        tune --tokens 32,64 --layout dense --qmap int8 --candidates 60 &&
        tune --tokens 8,16 --layout nibble --qmap float16 --candidates 50 && cp "$OUT/table.json" "$TABLE" ;;
    bench)
      "$PY" -m w3pack bench --model limits --tokens 1,8,16,64,512,4096 --json -q > "$OUT/w3_h200.json" &&
        "$PY" -m w3pack bench --model limits --tokens 1,8,16 --layout dense --qmap int8 --dtype bfloat16 --json -q > "$OUT/w3_bf16_h200.json" ;;
    gateup) "$PY" scripts/measure_gateup_gpu.py > "$OUT/gateup_h200.json" ;;
    generation)
      local kept="$OUT/../w3pack-generation" state=0
      "$PY" scripts/measure_generation_gpu.py --folder "$kept" > "$OUT/generation_h200.json" &&
        "$PY" scripts/measure_generation_gpu.py --folder "$kept" --compile 1 > "$OUT/generation_compiled_h200.json" || state=1
      # offline: transformers would look for FP8 kernels to download, and wait
      HF_HUB_OFFLINE=1 "$PY" scripts/measure_generation_fp8_gpu.py --folder "$kept" > "$OUT/generation_fp8_h200.json" || state=1
      return $state ;;
    *) echo "expected a part, got $1; see the head of this script"; return 2 ;;
  esac
}

failed=0
for name in "$@"; do
  begin=$SECONDS
  if part "$name" > "$OUT/$name.log" 2>&1; then state=ok; else state="FAILED ($?)"; failed=1; fi
  echo "$name: $state, $((SECONDS - begin)) s"
  tail -n 3 "$OUT/$name.log"
done
exit $failed
