"""config.pbtxt is written from the contract's table, and the one in the repository is that."""

import re
from pathlib import Path

from smartspec_py.serving.config import CONFIG_NAME, TorchEngineConfig, read_config
from smartspec_py.serving.contract import INPUTS, MODEL_NAME, OUTPUTS, TensorSpec, config_pbtxt

CONFIG_FILE = Path(__file__).parents[2] / "model_repository/smartspec/config.pbtxt"

TENSOR = re.compile(
    r'\{ name: "(?P<name>\w+)", data_type: TYPE_(?P<dtype>\w+), dims: \[ (?P<dims>-?\d+) \]'
    r"(?P<optional>, optional: true)? \}"
)


def tensors(heading: str) -> list[tuple[str, str, int, bool]]:
    """(name, type, dims, is optional) of every tensor under the heading."""
    section = re.search(rf"^{heading} \[\n(.*?)\n\]$", config_pbtxt(), re.DOTALL | re.MULTILINE)
    assert section is not None
    lines = section[1].split(",\n")
    found = [TENSOR.fullmatch(line.strip()) for line in lines]
    assert None not in found, lines
    return [(m["name"], m["dtype"], int(m["dims"]), bool(m["optional"])) for m in found if m]


def table(specs: tuple[TensorSpec, ...], is_input: bool) -> list[tuple[str, str, int, bool]]:
    return [(s.name, s.dtype, s.dims, is_input and s.is_optional) for s in specs]


def test_every_tensor_of_the_table_is_there_in_order() -> None:
    assert tensors("input") == table(INPUTS, is_input=True)
    assert tensors("output") == table(OUTPUTS, is_input=False)


def test_names_are_those_of_tensorrt_llm_clients() -> None:
    inputs = {spec.name: spec for spec in INPUTS}
    required = {name for name, spec in inputs.items() if not spec.is_optional}
    assert required == {"text_input", "max_tokens"}
    assert {"stream", "temperature", "top_k", "top_p", "random_seed", "stop_words"} <= set(inputs)
    assert inputs["stop_words"].dims == -1
    assert OUTPUTS[0].name == "text_output"


def test_names_are_unique_and_explained() -> None:
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)
        assert all(spec.meaning for spec in specs)


def test_one_decoupled_instance_with_batches_of_one() -> None:
    text = config_pbtxt("another")
    assert text.startswith('name: "another"\nbackend: "smartspec_py"\nmax_batch_size: 1\n')
    assert "model_transaction_policy { decoupled: true }" in text
    assert "instance_group [ { count: 1, kind: KIND_CPU } ]" in text


def test_brackets_are_balanced() -> None:
    text = config_pbtxt()
    for opening, closing in ("[]", "{}"):
        assert text.count(opening) == text.count(closing)


def test_the_file_in_the_repository_is_this_one() -> None:
    """Names and shapes only: the lines in between that start with # may say what they like."""
    lines = CONFIG_FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("#")) == config_pbtxt()


def test_the_shipped_engine_json_is_valid_and_its_models_are_there() -> None:
    """Paths in it are relative to its own folder."""
    folder = Path(__file__).parents[2] / "model_repository" / MODEL_NAME / "1"
    config = read_config(folder / CONFIG_NAME)
    assert isinstance(config.engine, TorchEngineConfig)
    assert config.engine.draft is not None
    for model in (config.engine.model, config.engine.draft):
        assert (folder / model / "model.safetensors").is_file()
