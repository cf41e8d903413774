"""Which modules may import which: the backend is alone, its core is pure, and tools form layers."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKEND, TOOLS = ROOT / "backend", ROOT / "tools"

TOKENIZER = ROOT / "engines_build" / "tiny" / "target" / "tokenizer.json"

DEPENDENCIES = {
    "gguf",  # of the extra openvino
    "llguidance",
    "numpy",
    "openvino",  # an extra
    "pydantic",
    "safetensors",
    "tensorrt_llm",  # of NVIDIA's container
    "tokenizers",
    "torch",
    "transformers",
    "triton",  # the language of GPU kernels; comes with torch for CUDA
    "triton_python_backend_utils",  # of Triton itself
}
"""What the backend may import beside itself and the standard library."""

LAYERS = (
    "smartspec_py",
    "smartspec_launch",
    "smartspec_gateway",
    "smartspec_testing",
    "smartspec_sim",
    "smartspec_bench",
    "smartspec_cli",
)
"""Each imports only those before it."""


def modules_of(folder: Path) -> dict[str, Path]:
    """Files by their dotted names."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }


MODULES = modules_of(BACKEND) | modules_of(TOOLS)


@cache
def imports_of(path: Path) -> list[str]:
    """Dotted names of all imports, including those inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def tops_of(paths: Iterable[Path]) -> set[str]:
    """Top-level packages that these files import, without the standard library."""
    names = {name.partition(".")[0] for path in paths for name in imports_of(path)}
    return names - set(sys.stdlib_module_names)


def test_triton_needs_every_file_of_the_backend() -> None:
    seen, left = set[str](), {"smartspec_py.model"}
    while left:
        name = left.pop()
        seen.add(name)
        left.add(name.rpartition(".")[0])
        for each in imports_of(MODULES[name]):
            while each not in MODULES and each:
                each = each.rpartition(".")[0]
            left.add(each)
        left -= seen | {""}
    assert seen == set(modules_of(BACKEND))


def test_the_backend_has_few_dependencies() -> None:
    assert tops_of(BACKEND.rglob("*.py")) - {"smartspec_py"} == DEPENDENCIES


ABOVE_CACHES = ("engines.drafts", "engines.local", "engines.trtllm")
ABOVE_RUNTIMES = ("engines.cache", *ABOVE_CACHES)


@pytest.mark.parametrize(
    ("part", "above"),
    [
        ("core", ("engines", "config", "api", "serving")),
        ("engines", ("api", "serving")),
        ("engines/checkpoints", ("engines.decoding", "engines.runtimes", *ABOVE_RUNTIMES)),
        ("engines/decoding", ("engines.checkpoints", "engines.runtimes", *ABOVE_RUNTIMES)),
        ("engines/runtimes", ("engines.decoding", *ABOVE_RUNTIMES)),
        ("engines/cache", ABOVE_CACHES),
        ("engines/drafts", ("engines.local", "engines.trtllm")),
    ],
)
def test_a_part_of_the_backend_imports_nothing_above_it(part: str, above: tuple[str, ...]) -> None:
    forbidden = tuple(f"smartspec_py.{name}" for name in above)
    for path in (BACKEND / "smartspec_py" / part).rglob("*.py"):
        assert not [name for name in imports_of(path) if name.startswith(forbidden)], path


def test_the_core_needs_only_numpy() -> None:
    core = BACKEND / "smartspec_py" / "core"
    assert tops_of(core.rglob("*.py")) == {"numpy", "smartspec_py"}


def test_the_step_does_no_linear_algebra_with_numpy() -> None:
    """It would wake the threads of NumPy's OpenBLAS, which then spin beside those of passes."""
    for part in ("core", "serving"):
        for path in (BACKEND / "smartspec_py" / part).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            assert not called & {"linalg", "dot", "matmul", "inner", "einsum", "polyfit"}, path
            assert not any(isinstance(node, ast.MatMult) for node in nodes), path


def test_packages_form_layers() -> None:
    assert {path.name for folder in (BACKEND, TOOLS) for path in folder.glob("smartspec_*")} == set(
        LAYERS
    )
    for index, package in enumerate(LAYERS):
        folder = (BACKEND if package == "smartspec_py" else TOOLS) / package
        forbidden = {*LAYERS[index + 1 :], "tests"}
        assert not forbidden & tops_of(folder.rglob("*.py")), package


def test_the_parts_of_the_endpoint_form_layers() -> None:
    """Formats of models know no API, and APIs not the application that serves them."""
    package = "smartspec_gateway.openai"
    application = ("app", "endpoint", "pieces")
    for part, above in (("formats", ("apis", *application)), ("apis", application)):
        forbidden = {f"{package}.{name}" for name in above}
        for path in (TOOLS / package.replace(".", "/") / part).glob("*.py"):
            found = {".".join(name.split(".")[:3]) for name in imports_of(path)}
            assert not found & forbidden, path


def test_the_folder_serves_without_being_installed(tmp_path: Path) -> None:
    """A copy of the backend, in a Python that has its dependencies but not this project."""
    folder = tmp_path / "smartspec_py"
    shutil.copytree(BACKEND / "smartspec_py", folder, ignore=shutil.ignore_patterns("__pycache__"))
    program = f"""
import importlib.util, sys, types
sys.path.append({sysconfig.get_path("purelib")!r})  # without its .pth files
utils = types.ModuleType("triton_python_backend_utils")
utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
sys.modules["triton_python_backend_utils"] = utils
assert importlib.util.find_spec("smartspec_py") is None
spec = importlib.util.spec_from_file_location("model", {str(folder / "model.py")!r})
model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model)
print(sys.modules["smartspec_py"].__path__[0], model.TritonPythonModel.__name__)
from tokenizers import Tokenizer
from smartspec_py.core.types import GuideType
from smartspec_py.engines.structured.compiler import GrammarCompiler
compiler = GrammarCompiler(Tokenizer.from_file({str(TOKENIZER)!r}), 2048, (0,))
print(compiler.compile(GuideType.CHOICE, '["a"]').num_bytes > 0)
compiler.close()
"""
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(folder), "TritonPythonModel", "True"]
