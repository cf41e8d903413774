"""The model repository for TensorRT-LLM, and its aliases, are what the contract's table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smartspec_launch.pbtxt import ALIASES, alias_pbtxt, config_pbtxt
from smartspec_py.api.contract import INPUTS
from smartspec_py.config import TrtllmEngineConfig, read_config

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "deploy" / "model_repository"

ENSEMBLE_INPUTS = (
    "text_input max_tokens bad_words stop_words exclude_input_in_output end_id pad_id top_k "
    "top_p temperature length_penalty repetition_penalty min_tokens presence_penalty "
    "frequency_penalty seed return_log_probs return_context_logits return_generation_logits "
    "return_perf_metrics num_return_sequences stream beam_width embedding_bias_words "
    "embedding_bias_weights guided_decoding_guide_type guided_decoding_guide "
    "return_num_input_tokens return_num_output_tokens num_draft_tokens use_draft_logits"
)
"""Of TensorRT-LLM 1.x's `ensemble` and `tensorrt_llm_bls`. The last two are of the latter only."""


@pytest.mark.parametrize("alias", ALIASES)
def test_the_aliases_of_the_repository_are_the_table_s(alias: str) -> None:
    assert alias_pbtxt(alias) == (MODELS / alias / "config.pbtxt").read_text()
    assert (MODELS / alias / "1").is_dir()
    assert (MODELS / "smartspec" / "config.pbtxt").read_text() == config_pbtxt()
    config = read_config(MODELS / "smartspec" / "1" / "engine.json")
    assert isinstance(config.engine, TrtllmEngineConfig)


def test_an_alias_takes_what_tensorrt_llm_s_clients_send() -> None:
    known = {tensor.name for tensor in INPUTS}
    assert known >= set(ENSEMBLE_INPUTS.split())


def test_an_alias_maps_all_that_it_declares() -> None:
    """And nothing twice: an ensemble's inputs and outputs share their names."""
    text = alias_pbtxt("ensemble")
    declared = re.findall(r'name: "(\w+)", data_type', text)
    mapped = re.findall(r'_map \{ key: "(\w+)" value: "(\w+)" \}', text)
    assert [key for key, _ in mapped] == declared == [value for _, value in mapped]
    assert len(set(declared)) == len(declared)
    assert {"text_input", "text_output", "finish_reason", "output_log_probs"} <= set(declared)
