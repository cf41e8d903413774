import anthropic
import instructor
from cases import *
from instructor import Mode
from person import Person

import openai

OPENAI = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0)
ASKED = [{"role": "user", "content": PERSON}]


def ask(client, **more):
    fields = {"model": MODEL, "response_model": Person, "max_retries": 1, **more}
    is_tom(client.create(messages=ASKED, **fields))


def chat_required():
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
        ask(instructor.from_openai(OPENAI, mode=mode), max_tokens=100)


def chat_structured():
    for mode in (Mode.JSON, Mode.JSON_SCHEMA):
        ask(instructor.from_openai(OPENAI, mode=mode), max_tokens=100)


def chat_stream():
    client = instructor.from_openai(OPENAI, mode=Mode.JSON_SCHEMA)
    parts = client.create_partial(
        model=MODEL, response_model=Person, messages=ASKED, max_tokens=100
    )
    is_tom(list(parts)[-1])


def responses_required():
    ask(instructor.from_openai(OPENAI, mode=Mode.RESPONSES_TOOLS), max_output_tokens=100)


def messages_required():
    ask(instructor.from_anthropic(ANTHROPIC, mode=Mode.ANTHROPIC_TOOLS), max_tokens=100)


run(vars())
