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

# What hangs ends after so many seconds, and only itself.
run() { timeout "$1" "$PY" "${@:2}"; }

part() {
  case $1 in
    tests) timeout 300 scripts/test.sh --gpu -q ;;
    sanitize)
      for script in sanitize_kernels sanitize_gateup; do
        echo "== $script: memcheck"
        timeout 120 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 "$PY" "scripts/$script.py" --verbose || return 1
        echo "== $script: racecheck"
        timeout 240 compute-sanitizer --tool racecheck --error-exitcode 1 "$PY" "scripts/$script.py" --checked --verbose || return 1
      done ;;
    tune)  # what comes first matters most: a table is written after every call, and each step has its own limit
      rm -f "$OUT/table.json"
      tune() { limit=$1; shift; run "$limit" -m w3pack tune --model limits --output "$OUT/table.json" --json -q "$@"; }
      code=0
      tune 150 --shape 6144x4096 --shape 28672x4096 --tokens 8,16,4 --layout dense --qmap int8 --candidates 70 || code=$?
      tune 60 --tokens 64 --layout dense --qmap int8 --candidates 60 || code=$?
      tune 60 --tokens 8,16 --layout nibble --qmap float16 --candidates 40 || code=$?
      tune 45 --tokens 32 --layout dense --qmap int8 --candidates 40 || code=$?
      tune 60 --tokens 32,64 --layout nibble --qmap float16 --candidates 30 || code=$?
      tune 60 --tokens 8,16,64 --layout nibble --qmap int8 --candidates 24 || code=$?
      tune 60 --tokens 8,16,64 --layout dense --qmap float16 --candidates 24 || code=$?
      cp "$OUT/table.json" "$TABLE" && return $code ;;
    bench)
      run 180 -m w3pack bench --model limits --tokens 1,8,16,64,512,4096 --json -q > "$OUT/w3_h200.json" &&
        run 60 -m w3pack bench --model limits --tokens 1,8,16 --layout dense --qmap int8 --dtype bfloat16 --json -q > "$OUT/w3_bf16_h200.json" ;;
    gateup) run 300 scripts/measure_gateup_gpu.py > "$OUT/gateup_h200.json" ;;
    generation)
      local kept="$OUT/../w3pack-generation" state=0
      run 180 scripts/measure_generation_gpu.py --folder "$kept" > "$OUT/generation_h200.json" &&
        run 240 scripts/measure_generation_gpu.py --folder "$kept" --compile 1 > "$OUT/generation_compiled_h200.json" || state=1
      # offline: transformers would look for FP8 kernels to download, and wait
      HF_HUB_OFFLINE=1 run 300 scripts/measure_generation_fp8_gpu.py --folder "$kept" > "$OUT/generation_fp8_h200.json" || state=1
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
