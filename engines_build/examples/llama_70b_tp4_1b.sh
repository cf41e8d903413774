#!/usr/bin/env bash
# Never run on a GPU. Llama 3.1 70B on four GPUs of 80 GB, with Llama 3.2 1B on one of them, in bfloat16.
#
#   HUB=/models OUT=/models/engines engines_build/examples/llama_70b_tp4_1b.sh [--dry-run]
set -euo pipefail
hub="${HUB:-/models}"
exec "$(dirname "${BASH_SOURCE[0]}")/../build_engines.sh" \
    "$hub/Llama-3.1-70B-Instruct" "$hub/Llama-3.2-1B-Instruct" "${OUT:-/models/engines}" \
    --dtype bfloat16 --tp 4 --draft-tp 1 \
    --max-context-len 8192 --max-draft-len 10 --max-batch-size 64 "$@"
