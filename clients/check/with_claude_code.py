from cases import *


def ask(text):
    command = [FOLDER / "node_modules/.bin/claude", "-p", text, "--allowedTools", "Bash"]
    wait = str(CASE_S * 1000)
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "API_TIMEOUT_MS": wait}
    where = {"ANTHROPIC_BASE_URL": BASE, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL}
    return agent(command, **quiet, **where, ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL)[0].strip()


def messages_plain():
    same(ask(HELLO), HELLO_ANSWER)


def messages_loop():
    same(ask("Claude Code, print number.txt."), "The number is 4711.")


run(vars())
