#!/usr/bin/env bash
# Builds two TensorRT-LLM engines and the tokenizer from two Hugging Face models. It is made for the
# container nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3. See
# docs/tensorrt-llm/build-engines.md, and --help for the flags.
#
#   engines_build/build_engines.sh TARGET_HF DRAFT_HF OUT [flags]
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if ! python3 -c 'import rich, typer' 2>/dev/null; then
    if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
    fi
    echo "build_engines: python3 lacks rich or typer; run: python3 -m pip install rich typer" >&2
    exit 1
fi
export PYTHONPATH="$repository/backend:$repository/tools${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m smartspec_trtllm.build_engines "$@"
