"""check_pair on directories made for it: each wrong pair gets one sentence that names the cause."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from smartspec_py.engines.checkpoints import pair
from smartspec_py.engines.checkpoints.checks import ModelError
from smartspec_py.engines.checkpoints.pair import check_pair, check_pair_files
from smartspec_py.engines.tokenizer_file import num_token_ids, read_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
VOCAB = {"<end>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "bc": 5}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
CUSTOM = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
MERGES = [("a", "b"), ("b", "c")]


PHIMOE: dict[str, Any] = {"model_type": "phimoe", "architectures": ["PhimoeForCausalLM"]}


def make_model(
    folder: Path,
    *,
    vocab: dict[str, int] | None = None,
    merges: list[tuple[str, str]] | None = None,
    end_token: str = "<end>",
    **config: Any,
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file({"weight": np.zeros(4)}, folder / "model.safetensors")
    tokenizer = Tokenizer(models.BPE(vocab=vocab or VOCAB, merges=merges or MERGES))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_token}))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_model(tmp_path / "target")


def refusal(target: Path, draft: Path | None) -> str:
    with pytest.raises(ModelError) as caught:
        check_pair(target, draft)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_same_tokenizer_and_padded_vocabulary_is_a_pair(target: Path, tmp_path: Path) -> None:
    check_pair(target, make_model(tmp_path / "draft", vocab_size=64))


def test_a_tokenizer_that_both_share_is_read_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    original = pair._read_tokenizer

    def counted(name: str, folder: Path) -> Any:
        read.append(folder)
        return original(name, folder)

    monkeypatch.setattr(pair, "_read_tokenizer", counted)
    check_pair(target, make_model(tmp_path / "same"))
    assert read == [target]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"vocab": VOCAB | {"d": 6}},
            "token id 6 is None in the target .* and 'd' in the draft .*: choose a draft",
        ),
        (
            {"vocab": VOCAB | {"a": 2, "b": 1}},
            "token id 1 is 'a' in the target .* and 'b' in the d",
        ),
        ({"merges": MERGES[::-1]}, "merge differently: choose a draft"),
        ({"merges": MERGES[:1]}, "merge differently"),
        ({"end_token": "a"}, "ends a text with '<end>' and the draft .* with 'a': choose"),
        ({"vocab_size": 5}, "draft .* has a vocab_size of 5, but its tokenizer has the token id 5"),
    ],
)
def test_differing_tokenizers_are_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    draft = make_model(tmp_path / "draft", **changes)
    with pytest.raises(ModelError, match=sentence):
        check_pair(target, draft)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "model_type t5"),
        (
            {"model_type": "bloom", "architectures": ["BloomForCausalLM"]},
            "model_type bloom and the",
        ),
        ({"model_type": "gemma3"}, "does not serve: use a .*, gemma3_text, "),
        *(
            ({"model_type": "gemma3", "architectures": [], "text_config": of_text}, sentence)
            for of_text, sentence in (
                ({"model_type": "t5"}, "the text_config.model_type 't5' .* one of apertus, "),
                ({"model_type": []}, r"the text_config.model_type \[\]"),
                (7, "the text_config.model_type None"),
            )
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "class LlamaForSequenceClassif"),
        ({"model_type": None}, "the model_type None"),
        ({"architectures": ["MineForCausalLM"], "auto_map": CUSTOM}, "class MineForCausalLM, whic"),
        ({"rope_scaling": {"type": "su", "short_factor": []}}, r"type su \(rope_scaling in its c"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rotary embedding of the type dynamic"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "rotary embedding of the type dynamic",
        ),
        *(
            ({"quantization_config": settings}, f"is quantised with the {sentence}")
            for settings, sentence in (
                ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes .* read: use gptq, "),
                ({"bits": 4}, "quant_method None"),
                ("int4", "quant_method None"),
                ({"quant_method": "gptq", "bits": 3}, "bits 3 .* cannot be read: use 4, 8, or an"),
                ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "version gemv"),
                ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False"),
                (PACKED | {"format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
                (PACKED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config {.*dense"),
                (PACKED | {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "num_bits 3"),
            )
        ),
        (
            PHIMOE | {"sliding_window": 100},
            r"phimoe and has a sliding window of 100 tokens, which is supported only for the types "
            r"cohere2, exaone4, .*: set limits\.max_context_len to at most 100, or use another",
        ),
        *(
            (
                {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
                | {"sliding_window": window},
                f"the sliding_window {window} in its config.json, which must be a whole number ab",
            )
            for window in (0, -3)
        ),
    ],
)
def test_unfit_architectures_are_refused(
    tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        check_pair(make_model(tmp_path / "model", **config), None)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("architectures", -1, "the architectures -1 in its config.json, which must be a list"),
        (
            "architectures",
            99 * "x",
            rf"the architectures '{79 * 'x'}\.\. in its",
        ),
        ("model_type", 99 * "x", rf"the model_type {80 * 'x'}\.\. and the class"),
        ("model_type", [], r"the model_type \[\] and the class"),
        ("dtype", "x", "the dtype 'x' .* one of float32, bfloat16, float16, float64"),
        ("hidden_size", "x", "that Transformers cannot use .*hidden_size"),
        ("hidden_size", -1, "the hidden_size -1 in its config.json"),
        ("num_attention_heads", 0, "that Transformers cannot use"),
        ("head_dim", 0, r"the head_dim 0 .* a whole number in 1\.\.100000000"),
        ("vocab_size", 10**12, "the vocab_size 1000000000000 in its config.json"),
        ("num_hidden_layers", True, "num_hidden_layers"),
        ("rms_norm_eps", -1.0, r"the rms_norm_eps -1\.0 .* a number in 0\.\.1"),
        ("rms_norm_eps", float("nan"), "the rms_norm_eps nan"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 0},
            "the rope_theta 0 .* above 0",
        ),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}, "the rope_theta 'x'"),
        (
            "rope_parameters",
            {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0},
            r"the factor -2\.0",
        ),
        ("pad_token_id", 10**12, "the pad_token_id .* less than the vocab_size"),
    ],
)
def test_wrong_fields_of_the_configuration_are_named(
    target: Path, field: str, value: Any, sentence: str
) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelError, match=sentence):
        check_pair(target, None)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2},
        {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
        },
    ],
    ids=lambda config: config["model_type"],
)
def test_windows_are_served_of_some_types(tmp_path: Path, config: dict[str, Any]) -> None:
    check_pair(make_model(tmp_path / "model", sliding_window=4096, **config), None)


def test_a_window_that_is_not_shorter_than_the_context_is_none(tmp_path: Path) -> None:
    """As in the files of Phi-3.5-MoE, 131,072 of 131,072, and Phi-4-mini, 262,144 of 131,072."""
    longer = PHIMOE | {"max_position_embeddings": 1024}
    for number, (window, max_context_len, is_served) in enumerate(
        [
            (1024, None, True),
            (2048, None, True),
            (1023, None, False),
            (100, 100, True),
            (99, 100, False),
        ]
    ):
        model = make_model(tmp_path / str(number), sliding_window=window, **longer)
        if is_served:
            check_pair(model, None, max_context_len)
        else:
            with pytest.raises(ModelError, match=f"a sliding window of {window} tokens"):
                check_pair(model, None, max_context_len)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.json", None, "has no config.json"),
        ("model.safetensors", None, "has no weights (*.safetensors or *.bin): copy"),
        ("tokenizer.json", None, "has no tokenizer.json: save a fast tokenizer"),
        ("tokenizer.json", "{}", "has a tokenizer.json that cannot be used"),
        ("config.json", "{", "unreadable config.json"),
        ("config.json", "[]", "has a config.json that is not a JSON object"),
        ("config.json", "[" * 100_000, "unreadable config.json (maximum recursion depth"),
    ],
)
def test_missing_and_damaged_files_are_named(
    target: Path, file: str, content: str | None, sentence: str
) -> None:
    if content is None:
        (target / file).unlink()
    else:
        (target / file).write_text(content)
    assert sentence in refusal(target, None)


def tokenizer_of(model: models.Model, start: int | None = None) -> str:
    """A tokenizer.json; start: the id of a token that begins each text."""
    tokenizer = Tokenizer(model)
    if start is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=["<s>", "$A"], special_tokens=[("<s>", start)]
        )
    text: str = tokenizer.to_str()
    return text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (tokenizer_of(models.BPE()), "has a tokenizer.json without tokens: replace it"),
        (
            tokenizer_of(models.WordPiece(VOCAB, unk_token="[UNK]")),
            "cannot encode every text (WordPiece error: Missing [UNK] token",
        ),
        (
            tokenizer_of(models.BPE(VOCAB, MERGES), start=8),
            "has a vocab_size of 8, but its tokenizer has the token id 8",
        ),
    ],
)
def test_tokenizers_that_fail_with_a_text_are_refused(
    target: Path, content: str, sentence: str
) -> None:
    (target / "tokenizer.json").write_text(content)
    assert sentence in refusal(target, None)


def test_missing_directory_is_named(tmp_path: Path) -> None:
    assert "does not exist: give a local" in refusal(tmp_path / "nowhere", None)


@pytest.mark.parametrize("single", ["model.safetensors", "pytorch_model.bin"])
def test_weights_may_be_sharded(target: Path, single: str) -> None:
    """Beside an index other files do not matter."""
    shard = target / f"shard{Path(single).suffix}"
    (target / "model.safetensors").rename(shard)
    assert "has no weights" in refusal(target, None)
    (target / f"{single}.index.json").write_text(json.dumps({"weight_map": {"x": shard.name}}))
    (target / "other.safetensors").write_bytes(b"")
    check_pair(target, None)
    shard.unlink()
    assert f"lacks 1 of its 1 weight files, such as {shard.name}" in refusal(target, None)
    (target / f"{single}.index.json").write_text("{}")
    assert f"has a {single}.index.json without weight_map: replace it" in refusal(target, None)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_pointers_of_git_lfs_are_called_so(target: Path, file: str) -> None:
    (target / file).write_text("version https://git-lfs.github.com/spec/v1\nsize 5\n")
    said = refusal_of_files(target)
    assert f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in" in said


def test_a_missing_tokenizer_is_found_among_the_files(target: Path) -> None:
    """That is, before Triton starts."""
    (target / "tokenizer.json").unlink()
    assert "has no tokenizer.json: save a fast tokenizer there" in refusal_of_files(target)


def refusal_of_files(target: Path, max_context_len: int | None = None) -> str:
    with pytest.raises(ModelError) as raised:
        check_pair_files(target, None, max_context_len)
    return str(raised.value)


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", 5, None, ["x"]])
def test_shards_are_files_beside_their_index(target: Path, file: Any) -> None:
    (target / "model.safetensors").rename(target.parent / "x.safetensors")
    index = {"metadata": {}, "weight_map": {"y": file}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    sentence = f"has the file {file!r} for y in its model.safetensors.index.json, which must be "
    assert sentence in refusal(target, None)


@pytest.mark.parametrize(("length", "is_sharded"), [(0, True), (4, False), (40, True), (-1, False)])
def test_truncated_weights_are_named(target: Path, length: int, is_sharded: bool) -> None:
    """Whether the header or the data is cut off, and in whichever shard."""
    whole = (target / "model.safetensors").read_bytes()
    name = "model.safetensors"
    if is_sharded:
        name = "b.safetensors"
        (target / "model.safetensors").rename(target / "a.safetensors")
        index = {"weight_map": {"x": "a.safetensors", "y": name}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / name).write_bytes(whole[:length])
    said = refusal(target, None)
    assert f"has a truncated or damaged {name} (" in said
    assert said.endswith("): copy it again")


def test_a_type_that_transformers_has_needs_no_custom_code(tmp_path: Path) -> None:
    """Its own code, which would leave a file, is not run."""
    folder = make_model(tmp_path / "model", auto_map=CUSTOM)
    ran = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')")
    check_pair(folder, None)
    assert not ran.exists()


def test_a_context_that_the_target_does_not_reach_is_refused(tmp_path: Path) -> None:
    long = make_model(tmp_path / "long", max_position_embeddings=64)
    short = make_model(tmp_path / "short", max_position_embeddings=32)
    check_pair(long, short, max_context_len=64)
    sentence = "long supports 64 positions, fewer than the max_context_len of 65: "
    assert sentence in refusal_of_files(long, 65)


def test_yarn_multiplies_the_positions_of_the_training(tmp_path: Path) -> None:
    """As Qwen's model cards say: with `max_position_embeddings` as it was, or with the product."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    short = make_model(tmp_path / "short", max_position_embeddings=32, rope_scaling=yarn)
    long = make_model(tmp_path / "long", max_position_embeddings=128, rope_scaling=yarn)
    for folder in (short, long):
        check_pair(folder, None, max_context_len=128)
        assert " supports 128 positions, fewer than" in refusal_of_files(folder, 129)


@pytest.mark.parametrize(("name", "vocab_size"), [("<added>", 6), ("<image_soft_token>", 8)])
def test_added_tokens_that_are_left_out(
    target: Path, tmp_path: Path, name: str, vocab_size: int
) -> None:
    """Those without a row, and Gemma 3's token for images. Others need a row."""
    folder = make_model(tmp_path / "model", vocab_size=vocab_size)
    tokenizer = read_tokenizer(folder)
    plain = tokenizer.encode("ab")
    tokenizer.add_special_tokens([name])
    tokenizer.save(str(folder / "tokenizer.json"))
    check_pair(folder, target)
    found = read_tokenizer(folder)
    assert num_token_ids(found) == 6
    assert found.encode("ab").ids == plain.ids
    assert 6 not in found.encode(f"ab{name}c").ids
    other = make_model(tmp_path / "other", vocab_size=5)
    assert "a vocab_size of 5, but its tokenizer has the token id 5" in refusal(other, None)


def test_a_default_number_of_positions_is_refused_too(tmp_path: Path) -> None:
    """Transformers knows it."""
    folder = make_model(tmp_path / "model", max_position_embeddings=2048)
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    check_pair_files(folder, None, 2049)
    with pytest.raises(ModelError, match="model supports 2048 positions, fewer than"):
        check_pair(folder, None, 2049)


def test_no_call_lets_a_checkpoint_bring_its_own_code() -> None:
    """Transformers asks the terminal unless it is told not to."""
    root = Path(__file__).parents[1]
    calls = [
        (path, call)
        for folder in ("backend", "tools", "scripts", "engines_build", "loadtest", "clients")
        for path in (root / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(call.func.value).startswith("Auto")
    ]
    assert len(calls) >= 5
    for path, call in calls:
        assert "trust_remote_code=False" in ast.unparse(call), path
