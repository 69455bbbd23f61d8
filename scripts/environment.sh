# Sourced by the other scripts: makes .venv if it is missing and puts it first on PATH.
# torch is pinned so that every machine tests the same one; a newer torch works as well.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
PYTHON=${PYTHON:-python3}
VENV="$ROOT/.venv"
if [ ! -x "$VENV/bin/python" ]; then
  echo "== making $VENV"
  "$PYTHON" -m venv "$VENV"
fi
export PATH="$VENV/bin:$PATH"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# install WHAT STAMP: pip install once for each version of pyproject.toml
install_once() {
  local stamp="$VENV/.installed-$2"
  if ! cmp -s pyproject.toml "$stamp"; then
    echo "== installing torch and $1 (a minute or two)"
    python -m pip install -q "torch==2.13.0"
    python -m pip install -q -e "$1"
    cp pyproject.toml "$stamp"
  fi
}
