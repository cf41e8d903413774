#!/usr/bin/env bash
# Never run on a GPU. Llama 3.1 8B with Llama 3.2 1B on one H100 (80 GB), in bfloat16: 16 GB and 2.5 GB of weights.
#
#   HUB=/models OUT=/models/engines engines_build/examples/llama_8b_1b.sh [--dry-run]
set -euo pipefail
hub="${HUB:-/models}"
exec "$(dirname "${BASH_SOURCE[0]}")/../build_engines.sh" \
    "$hub/Llama-3.1-8B-Instruct" "$hub/Llama-3.2-1B-Instruct" "${OUT:-/models/engines}" \
    --dtype bfloat16 --max-context-len 8192 --max-draft-len 7 --max-batch-size 64 "$@"
