from cases import *


def ask(text, *options):
    command = [FOLDER / "bin/aider", "--model", f"openai/{MODEL}", "--no-show-model-warnings"]
    command += ["--yes-always", "--no-check-update", "--analytics-disable", "--no-gitignore"]
    command += ["--no-pretty", "--edit-format", "whole", *options, "--message", text]
    return agent(command, OPENAI_API_BASE=f"{BASE}/v1", OPENAI_API_KEY="none")


def chat_plain():
    output, _ = ask(HELLO)
    assert HELLO_ANSWER in output or not EXACT, output


def chat_loop():
    output, files = ask("aider, set the number to 4712.", "--file", "number.txt")
    assert files["number.txt"].strip() == "4712", output


run(vars())
