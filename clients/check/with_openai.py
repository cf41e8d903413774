from cases import *
from person import Person
from pydantic import BaseModel

from openai import OpenAI, pydantic_function_tool

client = OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
TOOL = {"type": "function", "name": "get_weather", "description": ABOUT, "parameters": PARAMETERS}


class Weather(BaseModel):
    city: str


def ask(text, create=client.chat.completions.create, **fields):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return create(model=MODEL, messages=messages, max_tokens=100, **fields)


def chat_plain():
    same(ask(HELLO).choices[0].message.content, HELLO_ANSWER)


def chat_stream():
    chunks = ask(HELLO, stream=True, stream_options={"include_usage": True})
    same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), HELLO_ANSWER)


def chat_tools():
    [call] = ask(WEATHER, tools=[CHAT_TOOL]).choices[0].message.tool_calls
    is_call(call.function.name, call.function.arguments)


def chat_required():
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        [call, *_] = (
            ask(WEATHER, tools=[CHAT_TOOL], tool_choice=choice).choices[0].message.tool_calls
        )
        is_call(call.function.name, call.function.arguments)


def chat_structured():
    parse = client.chat.completions.parse
    is_tom(ask(PERSON, parse, response_format=Person).choices[0].message.parsed)


def chat_loop():
    """A parsed message is sent back as it came."""
    parse, messages = client.chat.completions.parse, [{"role": "user", "content": WEATHER}]
    tools = [pydantic_function_tool(Weather, name="get_weather", description=ABOUT)]
    message = ask(messages, parse, tools=tools).choices[0].message
    [call] = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": DEGREES}]
    same(ask(messages, parse, tools=tools).choices[0].message.content, WEATHER_ANSWER)


def respond(given, **fields):
    return client.responses.create(model=MODEL, input=given, max_output_tokens=100, **fields)


def responses_plain():
    same(respond(HELLO).output_text, HELLO_ANSWER)


def responses_stream():
    with client.responses.stream(model=MODEL, input=HELLO, max_output_tokens=100) as stream:
        stream.until_done()
        same(stream.get_final_response().output_text, HELLO_ANSWER)


def responses_tools():
    [call] = respond(WEATHER, tools=[TOOL]).output
    is_call(call.name, call.arguments)


def responses_required():
    [call, *_] = respond(WEATHER, tools=[TOOL], tool_choice="required").output
    is_call(call.name, call.arguments)


def responses_structured():
    answer = client.responses.parse(
        model=MODEL, input=PERSON, text_format=Person, max_output_tokens=100
    )
    is_tom(answer.output_parsed)


def responses_loop():
    given = [{"role": "user", "content": WEATHER}]
    output = respond(given, tools=[TOOL]).output
    result = {"type": "function_call_output", "call_id": output[0].call_id, "output": DEGREES}
    same(respond([*given, *output, result], tools=[TOOL]).output_text, WEATHER_ANSWER)


run(vars())
