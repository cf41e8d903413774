"""`smartspec doctor`: checks an installation. The part for TensorRT-LLM never ran on a GPU machine.

With TensorRT-LLM, it checks that the package can be imported, that the executor's bindings have the
names that the adapter uses, and that there is a GPU. Without the package and a GPU, it checks what
a server on the CPU needs.
"""

from __future__ import annotations

import importlib
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import typer

from smartspec_launch.interpreter import LaunchError, check_interpreter
from smartspec_py.cache_dir import cache_dir
from smartspec_py.engines.phases import size_text
from smartspec_py.engines.profile import machine_name, vector_instructions

TRTLLM_VERSION = "1.2.1"
"""The supported version of TensorRT-LLM; it is in Triton's containers 26.04 to 26.07."""

NAMES = {
    "CommunicationMode": "ORCHESTRATOR",
    "Executor": (
        "await_responses can_enqueue_requests cancel_request enqueue_requests "
        "get_latest_iteration_stats shutdown"
    ),
    "ExecutorConfig": (
        "enable_chunked_context gather_generation_logits kv_cache_config parallel_config"
    ),
    "ExternalDraftTokensConfig": "tokens",
    "FinishReason": "END_ID LENGTH STOP_WORDS",
    "IterationStats": "kv_cache_stats",
    "KvCacheConfig": "enable_block_reuse free_gpu_memory_fraction max_tokens",
    "KvCacheStats": "max_num_blocks tokens_per_block",
    "ModelType": "DECODER_ONLY",
    "OrchestratorConfig": "is_orchestrator worker_executable_path",
    "OutputConfig": "exclude_input_from_output return_generation_logits",
    "ParallelConfig": "communication_mode device_ids orchestrator_config",
    "Request": (
        "bad_words cache_salt_id embedding_bias end_id external_draft_tokens_config "
        "input_token_ids max_tokens output_config sampling_config stop_words streaming"
    ),
    "Response": "error_msg has_error request_id result",
    "Result": "finish_reasons generation_logits is_final output_token_ids",
    "SamplingConfig": (
        "frequency_penalty presence_penalty repetition_penalty seed temperature top_k top_p"
    ),
}
"""Classes of `tensorrt_llm.bindings.executor`: arguments, attributes, methods and enum members that
the adapter uses. From the sources of versions 1.1 to 1.2; none was labelled 1.2.1."""

QUERY = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,compute_cap",
    "--format=csv,noheader",
)


def doctor() -> None:
    """Check the installation, for TensorRT-LLM inside of its container.

    With TensorRT-LLM or a GPU, it checks that the bindings have all names that the adapter uses,
    and that there is a GPU; it needs no engines. Otherwise it checks Python, OpenVINO and the cache
    directory, and shows processor and free memory. Exit code 1: something is missing.
    """
    missing: list[str] = []
    package = _imported("tensorrt_llm", missing)
    gpus = query_gpus()
    if not gpus:
        missing.append("nvidia-smi lists no GPU: start the container with --gpus all")
    version = getattr(package, "__version__", "not found")
    typer.echo(f"TensorRT-LLM: {version} (supported: {TRTLLM_VERSION})")
    typer.echo(f"Python: {platform.python_version()}")
    for gpu in gpus:
        typer.echo(f"GPU: {gpu}")
    bindings = _imported("tensorrt_llm.bindings.executor", missing) if package else None
    if bindings is not None:
        missing += [f"the bindings have no {name}" for name in missing_names(bindings)]
    if package is None and not gpus:
        missing = list(_missing_on_cpu())
    for one in missing:
        typer.echo(f"Missing: {one}")
    if missing:
        raise typer.Exit(1)
    typer.echo("Nothing is missing.")


def _missing_on_cpu() -> Iterator[str]:
    """What a server on the CPU lacks. Shows what decides its speed and its models."""
    vnni = "with" if "vnni" in vector_instructions() else "without"
    typer.echo(f"Processor: {machine_name()}, {vnni} VNNI")
    try:
        check_interpreter()
    except LaunchError as error:
        yield str(error)
    try:
        import openvino
        import torch

        from smartspec_py.engines.runtimes.machine import free_bytes

        typer.echo(f"OpenVINO: {openvino.__version__}")
        typer.echo(f"Free memory: {size_text(free_bytes(torch.device('cpu')))}")
    except (ImportError, OSError) as error:
        yield f"{error}: run pip install 'smartspec-py[torch,openvino]'"
    folder = cache_dir()
    typer.echo(f"Cache directory: {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror})"
        yield f"{why}: set XDG_CACHE_HOME to a writable directory"


def missing_names(bindings: Any) -> Iterator[str]:
    """The names in NAMES that the bindings lack, such as `Request(end_id)`."""
    for class_name, names in NAMES.items():
        found = getattr(bindings, class_name, None)
        if found is None:
            yield class_name
            continue
        # A compiled constructor has its arguments only as text: nanobind writes it to
        # __nb_signature__ and to the docstring, pybind11 to the docstring.
        init = found.__init__
        text = f"{getattr(init, '__nb_signature__', '')} {init.__doc__ or ''}"
        for name in names.split():
            if not hasattr(found, name) and not re.search(rf"\b{name}\b", text):
                yield f"{class_name}({name})"


def query_gpus() -> tuple[str, ...]:
    """The GPUs that nvidia-smi lists; empty if it is missing or fails."""
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(answer.stdout.splitlines())


def _imported(name: str, missing: list[str]) -> Any:
    """Import a module. If it fails, also because of driver libraries, record it as missing."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        remedy = f"run in a Triton container with TensorRT-LLM {TRTLLM_VERSION}, with --gpus all"
        missing.append(f"{name} cannot be imported ({error}): {remedy}")
        return None
