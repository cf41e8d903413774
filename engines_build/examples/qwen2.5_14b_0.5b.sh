#!/usr/bin/env bash
# Never run on a GPU. Qwen2.5 14B with Qwen2.5 0.5B on one GPU of 80 GB, bfloat16.
#
#   HUB=/models OUT=/models/engines engines_build/examples/qwen2.5_14b_0.5b.sh [--dry-run]
set -euo pipefail
hub="${HUB:-/models}"
exec "$(dirname "${BASH_SOURCE[0]}")/../build_engines.sh" \
    "$hub/Qwen2.5-14B-Instruct" "$hub/Qwen2.5-0.5B-Instruct" "${OUT:-/models/engines}" \
    --dtype bfloat16 --max-context-len 4096 --max-draft-len 7 --max-batch-size 64 "$@"
