"""Who may import whom: what Triton loads stands alone, its core is pure, and tools form layers."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKEND, TOOLS = ROOT / "backend", ROOT / "tools"

DEPENDENCIES = {
    "numpy",
    "openvino",  # an extra
    "pydantic",
    "safetensors",
    "tensorrt_llm",  # of NVIDIA's container
    "threadpoolctl",
    "tokenizers",
    "torch",
    "transformers",
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

OTHERS = {"tests"}
"""Of this repository, and not installed."""


def modules_of(folder: Path) -> dict[str, Path]:
    """Files by their dotted names."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }


MODULES = modules_of(BACKEND) | modules_of(TOOLS)


def imports_of(path: Path) -> Iterator[str]:
    """Names as they stand in the file, those inside functions too; modules among them or what is
    in modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: a relative import"
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str:
    """Of this repository, the module that the name is or is in; empty: none."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def closure_of(start: str) -> set[str]:
    """All modules of this repository that importing one leads to, with the packages around them."""
    seen: set[str] = set()
    left = {start}
    while left:
        name = left.pop()
        seen.add(name)
        parts = name.split(".")
        packages = {".".join(parts[:length]) for length in range(1, len(parts))}
        left |= {module_of(each) for each in imports_of(MODULES[name])} | packages
        left -= seen | {""}
    return seen


def test_what_triton_loads_is_all_that_its_folder_has() -> None:
    """Each file is needed by model.py, and none of another folder is."""
    assert closure_of("smartspec_py.model") == set(modules_of(BACKEND))


def test_the_backend_has_few_dependencies() -> None:
    found = {name.partition(".")[0] for path in BACKEND.rglob("*.py") for name in imports_of(path)}
    assert found - set(sys.stdlib_module_names) - {"smartspec_py"} == DEPENDENCIES


def test_the_core_is_pure() -> None:
    """NumPy and the standard library."""
    for path in (BACKEND / "smartspec_py" / "core").rglob("*.py"):
        for name in imports_of(path):
            is_own = name.startswith("smartspec_py.core.")
            top = name.partition(".")[0]
            assert is_own or top == "numpy" or top in sys.stdlib_module_names, (path, name)


@pytest.mark.parametrize(
    ("part", "above"),
    [("core", ("engines", "config", "api", "serving")), ("engines", ("api", "serving"))],
)
def test_a_part_of_the_backend_imports_nothing_above_it(part: str, above: tuple[str, ...]) -> None:
    forbidden = tuple(f"smartspec_py.{name}" for name in above)
    for path in (BACKEND / "smartspec_py" / part).rglob("*.py"):
        assert not [name for name in imports_of(path) if name.startswith(forbidden)], path


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    above = {*LAYERS[LAYERS.index(package) + 1 :], *OTHERS}
    for module, path in MODULES.items():
        if module.partition(".")[0] == package:
            assert not above & {name.partition(".")[0] for name in imports_of(path)}, module


def test_every_package_has_its_layer() -> None:
    assert {name.partition(".")[0] for name in MODULES} == set(LAYERS)


def test_the_folder_serves_without_being_installed(tmp_path: Path) -> None:
    """A copy of it, in a Python whose packages are there and this project is not."""
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
import smartspec_py.engines.torch.build, smartspec_py.engines.trtllm.build
print(smartspec_py.engines.torch.build.__file__, model.TritonPythonModel.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(folder / "engines/torch/build.py"), "TritonPythonModel"]
