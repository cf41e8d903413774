from cases import *

PROVIDER = f'{{name="check", base_url="{BASE}/v1", wire_api="responses", env_key="CHECK_KEY"}}'


def ask(text):
    command = [FOLDER / "node_modules/.bin/codex", "exec", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", "-m", MODEL]
    command += ["-c", f"model_providers.check={PROVIDER}", "-c", 'model_provider="check"', text]
    return agent(command, CHECK_KEY="none")[0]


def responses_plain():
    text = ask(HELLO)
    assert HELLO_ANSWER in text or not EXACT, text


def responses_loop():
    text = ask("Codex, print number.txt.")
    assert "The number is 4711." in text, text


run(vars())
