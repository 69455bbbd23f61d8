#!/usr/bin/env bash
# Every check: style, types, import contracts, tests (newest and oldest supported transformers).
# usage: scripts/test.sh [pytest arguments]      scripts/test.sh --slow adds the tests that take minutes
#        scripts/test.sh --gpu                   on a machine with a GPU: the tests that need one, with the python that is there
set -euo pipefail
if [ "${1:-}" = "--gpu" ]; then
  shift
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" W3PACK_REQUIRE_GPU="${W3PACK_REQUIRE_GPU:-1}"
  # side by side where pytest-xdist is there: most of the time goes into imports and building kernels
  "${PYTHON:-python3}" -c 'import xdist' 2>/dev/null && set -- -n "${W3PACK_TEST_PROCESSES:-6}" --dist loadfile "$@"
  exec "${PYTHON:-python3}" -m pytest -m gpu -rs "$@"
fi
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install_once ".[dev]" dev

OLDEST="transformers==5.17.0 huggingface_hub==1.33.0"
OLDEST_DIR="$VENV/oldest"
if [ ! -f "$OLDEST_DIR/.complete" ]; then
  echo "== installing $OLDEST beside the newest"
  rm -rf "$OLDEST_DIR"
  python -m pip install -q --no-deps --target "$OLDEST_DIR" $OLDEST httpx httpcore h11 anyio
  touch "$OLDEST_DIR/.complete"
fi

echo "== ruff";           ruff check .
echo "== format";         ruff format --check .
echo "== mypy";           mypy
echo "== import contracts"; lint-imports
echo "== results page";   python scripts/render_results.py --check
echo "== kernels for every architecture"; python scripts/compile_all.py --quiet --jobs 2
echo "== real model";     python scripts/fetch.py smollm2-135m || echo "not available: tests that need it will say so"
echo "== tests";          OMP_NUM_THREADS=1 python -m pytest -n 2 -rs "$@"
echo "== transformers 5.17.0"
OMP_NUM_THREADS=1 PYTHONPATH="$OLDEST_DIR" python -c 'import transformers; assert transformers.__version__ == "5.17.0", transformers.__version__'
OMP_NUM_THREADS=1 PYTHONPATH="$OLDEST_DIR" python -m pytest -n 2 -rs tests/integrations
