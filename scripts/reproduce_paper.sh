#!/usr/bin/env bash
# The paper's numbers beside ours, from one calibration: the table, all rows as JSON and
# CSV, and plots with their data, under results/paper. Seconds, once installed; nothing
# is measured. More options go to `meshslice reproduce`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh plot

mkdir -p results/paper
"$venv/bin/meshslice" reproduce --json results/paper/rows.json --csv results/paper/rows.csv \
    --plot results/paper "$@"
echo "written: results/paper"
