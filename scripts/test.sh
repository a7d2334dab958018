#!/usr/bin/env bash
# All tests; `--quick` for the daily run (pytest's default selection). Other arguments
# go to pytest. WORKERS sets the number of processes (default 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh "${EXTRAS:-dev}"

selection=(-m "slow or not slow")
if [ "${1:-}" = "--quick" ]; then
    selection=()
    shift
fi
exec "$venv_python" -m pytest -n "${WORKERS:-2}" --dist worksteal ${selection[@]+"${selection[@]}"} "$@"
