#!/usr/bin/env bash
# Never run on a GPU. Llama 3.1 8B with Llama 3.2 1B in fp8 with fp8 caches, on a GPU with fp8 (Ada,
# Hopper or newer). quantize.py downloads texts for calibration; --calib-dataset DIR has local ones.
#
#   HUB=/models OUT=/models/engines engines_build/examples/llama_8b_1b_fp8.sh [--dry-run]
set -euo pipefail
hub="${HUB:-/models}"
exec "$(dirname "${BASH_SOURCE[0]}")/../build_engines.sh" \
    "$hub/Llama-3.1-8B-Instruct" "$hub/Llama-3.2-1B-Instruct" "${OUT:-/models/engines}" \
    --quantization fp8 --draft-quantization fp8 \
    --max-context-len 8192 --max-draft-len 7 --max-batch-size 128 "$@"
