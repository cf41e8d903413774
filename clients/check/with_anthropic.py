from anthropic import Anthropic, beta_tool
from cases import *
from person import Person

client = Anthropic(base_url=BASE, api_key="none", max_retries=0)
TOOL = {"name": "get_weather", "description": ABOUT, "input_schema": PARAMETERS}


def fields(text, **more):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 100, **more}


def messages_plain():
    same(client.messages.create(**fields(HELLO)).content[0].text, HELLO_ANSWER)
    assert client.messages.count_tokens(model=MODEL, messages=fields(HELLO)["messages"])


def messages_stream():
    with client.messages.stream(**fields(HELLO)) as stream:
        same("".join(stream.text_stream), HELLO_ANSWER)


def messages_tools():
    [use] = client.messages.create(**fields(WEATHER, tools=[TOOL])).content
    is_call(use.name, use.input)


def messages_required():
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = client.messages.create(**fields(WEATHER, tools=[TOOL], tool_choice=choice))
        is_call(answer.content[0].name, answer.content[0].input)


def messages_structured():
    is_tom(client.messages.parse(**fields(PERSON), output_format=Person).parsed_output)


@beta_tool
def get_weather(city: str) -> str:
    """The temperature in a city."""
    return DEGREES


def messages_loop():
    answer = client.beta.messages.tool_runner(**fields(WEATHER, tools=[get_weather])).until_done()
    same(answer.content[0].text, WEATHER_ANSWER)


run(vars())
