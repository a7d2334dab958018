#!/usr/bin/env bash
# The main job: the four FC layers of a GPT-3 Small block (hidden 768, sequence 2048,
# one sequence) on an emulated 4x4 mesh, forward and both gradients, every algorithm,
# each answer checked before it is timed; then the tuned plan of GPT-3 175B on 256 chips
# of TPU v4, modelled. Some minutes on two cores, once installed.
# More options go to `meshslice bench`: ./scripts/quickstart.sh --json rows.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh ""

"$venv/bin/meshslice" bench --mesh 4x4 --devices 16 --model gpt3-125m \
    --algorithms all --dataflows auto --slices auto --passes fwd,dlhs,drhs "$@"

echo
echo "== the plan of GPT-3 175B on 256 chips: meshslice tune --model gpt3-175b --chips 256"
mkdir -p results
"$venv/bin/meshslice" tune --model gpt3-175b --chips 256 --out results/gpt3-175b-256.json
