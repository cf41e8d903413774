#!/usr/bin/env bash
# Builds two TensorRT-LLM engines and the tokenizer from two Hugging Face models. Never run on a GPU.
# Run it in the container nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3, which has the tools.
# docs/tensorrt-llm/build-engines.md explains the commands.
#
#   engines_build/build_engines.sh TARGET_HF DRAFT_HF OUT [options]
#
#   --max-context-len N     tokens of the longest sequence, prompt and text (4096)
#   --max-draft-len N       tokens of the longest draft (7)
#   --max-batch-size N      sequences at the same time (64)
#   --max-num-tokens N      tokens of an iteration (8 of the longest sequences, in 8192..65536)
#   --tp N                  GPUs of the target (1)
#   --draft-tp N            GPUs of the draft (1)
#   --dtype TYPE            auto, float16 or bfloat16 (auto)
#   --quantization Q        of the target: none, or fp8 with an fp8 KV cache (none)
#   --draft-quantization Q  of the draft (none)
#   --calib-dataset DIR     texts for fp8; by default, quantize.py downloads some
#   --examples DIR          the examples of TensorRT-LLM (/app/examples)
#   --dry-run               print the commands and run nothing
#   --force                 run all commands, even if they have not changed
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
TOKENIZER_FILES=(tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    generation_config.json config.json chat_template.jinja tokenizer.model vocab.json merges.txt)

fail() {
    echo "build_engines: $1" >&2
    exit 2
}

declare -A set=([max-context-len]=4096 [max-draft-len]=7 [max-batch-size]=64 [max-num-tokens]=""
    [tp]=1 [draft-tp]=1 [dtype]=auto [quantization]=none [draft-quantization]=none
    [calib-dataset]="" [examples]=/app/examples)
places=() dry_run="" force=""
while (($#)); do
    case "$1" in
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    --dry-run) dry_run=1 ;;
    --force) force=1 ;;
    --*)
        [[ -v "set[${1#--}]" ]] || fail "$1: no such option; --help lists them"
        (($# > 1)) || fail "$1: needs a value"
        set[${1#--}]="$2"
        shift
        ;;
    *) places+=("$1") ;;
    esac
    shift
done
((${#places[@]} == 3)) || fail "needs TARGET_HF, DRAFT_HF and OUT, got ${#places[@]}; see --help"
target="${places[0]}" draft="${places[1]}" out="${places[2]}"
for name in max-context-len max-draft-len max-batch-size tp draft-tp; do
    [[ "${set[$name]}" =~ ^[1-9][0-9]*$ ]] || fail "--$name: got '${set[$name]}', must be at least 1"
done
for name in quantization draft-quantization; do
    [[ "${set[$name]}" =~ ^(none|fp8)$ ]] || fail "--$name: got '${set[$name]}', must be none or fp8"
done
families="$(python3 "$here/check_models.py" "$target" "$draft" \
    "${set[max-context-len]}" "${set[tp]}" "${set[draft-tp]}")" || exit 2
read -r target_family draft_family <<<"$families"

# The scheduler counts a verification with its whole text. So the default of trtllm-build, 8192,
# would allow only one or two long sequences per iteration.
length=$((set[max-context-len] + set[max-draft-len]))
tokens=$((length * (set[max-batch-size] < 8 ? set[max-batch-size] : 8)))
((tokens = tokens > 65536 ? 65536 : tokens, tokens = tokens < 8192 ? 8192 : tokens))
((tokens = tokens < length ? length : tokens, tokens = (tokens + 63) / 64 * 64))
tokens="${set[max-num-tokens]:-$tokens}"
((tokens >= length)) || fail "--max-num-tokens: got $tokens, must be at least $length"

# run NAME OUTPUT COMMAND...: skipped if the same command has succeeded; OUTPUT is emptied first.
run() {
    local name="$1" output="$2" done_file="$out/commands/$1"
    shift 2
    if [[ -n "$dry_run" ]]; then
        printf '# %s\n' "$name"
        printf '%q ' "$@" | sed 's/ --/ \\\n    --/g; s/ $/\n/'
        return
    fi
    if [[ -z "$force" && -s "$done_file" && "$(<"$done_file")" == "$*" ]]; then
        echo "$name: nothing has changed, skipped"
        return
    fi
    [[ -e "$done_file" || ! -e "$output" ]] || fail "$output: not made by this script; remove it"
    mkdir -p "$out/commands" "$out/logs"
    local later="$out/commands/build-${name#convert-}"
    [[ ! -s "$later" ]] || : >"$later" # a new checkpoint needs a new engine
    : >"$done_file"
    rm -rf "$output"
    echo "$name: running, log in $out/logs/$name.log"
    if ! "$@" >"$out/logs/$name.log" 2>&1; then
        tail -n 20 "$out/logs/$name.log" >&2
        fail "$name failed; the whole log is $out/logs/$name.log"
    fi
    printf '%s' "$*" >"$done_file"
}

# build ROLE MODEL FAMILY TP QUANTIZATION LENGTH FLAGS...
build() {
    local role="$1" model="$2" tp="$4" length="$6" checkpoint="$out/checkpoints/$1" gemm=auto
    local common=(--model_dir "$model" --output_dir "$checkpoint" --dtype "${set[dtype]}"
        --tp_size "$tp")
    if [[ "$5" == fp8 ]]; then
        gemm=disable
        run "convert-$role" "$checkpoint" python3 "${set[examples]}/quantization/quantize.py" \
            "${common[@]}" --qformat fp8 --kv_cache_dtype fp8 --calib_size 512 \
            ${set[calib-dataset]:+--calib_dataset "${set[calib-dataset]}"}
    else
        run "convert-$role" "$checkpoint" python3 \
            "${set[examples]}/models/core/$3/convert_checkpoint.py" "${common[@]}"
    fi
    run "build-$role" "$out/$role" trtllm-build --checkpoint_dir "$checkpoint" \
        --output_dir "$out/$role" --max_batch_size "${set[max-batch-size]}" \
        --max_input_len "$length" --max_seq_len "$length" --max_num_tokens "$tokens" \
        --max_beam_width 1 --kv_cache_type paged --tokens_per_block 64 \
        --remove_input_padding enable --context_fmha enable --use_paged_context_fmha enable \
        --gpt_attention_plugin auto --gemm_plugin "$gemm" --workers "$tp" "${@:7}"
}

build target "$target" "$target_family" "${set[tp]}" "${set[quantization]}" "$length" \
    --speculative_decoding_mode draft_tokens_external --max_draft_len "${set[max-draft-len]}"
build draft "$draft" "$draft_family" "${set[draft-tp]}" "${set[draft-quantization]}" \
    "${set[max-context-len]}"
files=()
for file in "${TOKENIZER_FILES[@]}"; do
    [[ ! -f "$target/$file" ]] || files+=("$target/$file")
done
run tokenizer "$out/tokenizer" install -D -m 644 -t "$out/tokenizer" "${files[@]}"
