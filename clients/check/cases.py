"""What the programs of Python clients share: prompts, checks, and how cases run.

A program defines a function ROUTE_CASE for each case, or CASE with the model of a route as its
argument, and ends with `run`. Each case prints one line, a JSON object. Environment: BASE_URL of
the server, EXACT if its texts are those of script.json, FOLDER where the client is installed,
CASE_S seconds for each case.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

BASE = os.environ["BASE_URL"]
EXACT = os.environ["EXACT"] == "1"
FOLDER = Path(os.environ["FOLDER"])
CASE_S = int(os.environ["CASE_S"])
MODEL = "smartspec"

HELLO, HELLO_ANSWER = "Say hello.", "Hello, world."
WEATHER, DEGREES, WEATHER_ANSWER = (
    "How warm is it in Paris?",
    "18 degrees",
    "It is 18 degrees in Paris.",
)
PERSON = "Extract the person as JSON: Tom is 20."
ROUTES = ("chat", "responses", "messages")
KINDS = ("plain", "stream", "tools", "required", "structured", "loop")
NEEDS_EXACT = ("tools", "loop")
"""Cases that only a scripted model passes for sure."""

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT = "The temperature in a city."
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": ABOUT, "parameters": PARAMETERS},
}


def same(found, wanted):
    """Compare, if texts are exact; else only their types."""
    is_same = found == wanted if EXACT else isinstance(found, type(wanted))
    assert is_same, f"got {found!r}, expected {wanted!r}"


def is_tom(person):
    """person: an object with name and age, or a dict of them."""
    fields = person if isinstance(person, dict) else vars(person)
    same((fields["name"], fields["age"]), ("Tom", 20))
    assert isinstance(fields["name"], str)
    assert isinstance(fields["age"], int)


def is_call(name, arguments):
    """arguments: an object or its JSON."""
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather", f"the tool {name!r} is called"
    assert list(arguments) == ["city"], f"the arguments are {arguments!r}"
    same(arguments["city"], "Paris")


def run(names, models=None):
    """names: of the program. models: by route, for its functions CASE."""
    signal.signal(signal.SIGALRM, _expire)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an agent is ended, too
    for kind in KINDS:
        for route in ROUTES:
            case = names.get(f"{route}_{kind}")
            if case is None and kind in names and route in (models or {}):
                case = partial(names[kind], models[route])
            if case is not None and (EXACT or kind not in NEEDS_EXACT):
                print(json.dumps({"route": route, "case": kind, "error": _error(case)}), flush=True)


def _error(case):
    """Why the case fails; empty if it passes."""
    signal.alarm(CASE_S)
    try:
        case()
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"
    finally:
        signal.alarm(0)
    return ""


def _expire(*_):
    raise TimeoutError(f"no result within {CASE_S} s")


def agent(command, **environment):
    """Run an agent in a new git repository with a file number.txt. Returns its output, and the
    files that it left, by name."""
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()
        (work / "number.txt").write_text("4711\n")
        git = ["git", "-c", "user.name=check", "-c", "user.email=check@localhost"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
            subprocess.run([*git, *words], cwd=work, check=True)
        # Some take PWD for the working directory.
        places = {"HOME": str(home), "PWD": str(work), "CI": "1"}
        output, errors, code = _ended(command, work, os.environ | places | environment)
        files = {path.name: path.read_text() for path in work.iterdir() if path.is_file()}
    output = re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert code == 0, f"exit code {code}: {(output + errors)[-600:]}"
    return output, files


def _ended(command, folder, environment):
    """Output, errors and exit code of a command, whose children are ended too."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return *process.communicate(), process.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
