from cases import *

CONFIG = {
    "provider": {
        "check": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{BASE}/v1", "apiKey": "none"},
            "models": {MODEL: {"name": MODEL}},
        }
    },
    "model": f"check/{MODEL}",
    "autoupdate": False,
    "share": "disabled",
}


def ask(text):
    command = [FOLDER / "node_modules/.bin/opencode", "run", text]
    return agent(command, OPENCODE_CONFIG_CONTENT=json.dumps(CONFIG))[0]


def chat_plain():
    text = ask(HELLO)
    assert HELLO_ANSWER in text or not EXACT, text


def chat_loop():
    text = ask("opencode, print number.txt.")
    assert "The number is 4711." in text, text


run(vars())
