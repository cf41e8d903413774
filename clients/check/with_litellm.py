import litellm
from cases import *
from person import Person

MODELS = {
    "chat": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{BASE}/v1"},
    "messages": {"model": f"anthropic/{MODEL}", "api_base": BASE},
}
RESPONSES = {"model": f"openai/{MODEL}", "api_base": f"{BASE}/v1"}


def ask(where, text, **more):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    fields = {"messages": messages, "max_tokens": 100, "api_key": "none", "num_retries": 0}
    return litellm.completion(**where, **fields, **more)


def is_weather(answer):
    [call, *_] = answer.choices[0].message.tool_calls
    is_call(call.function.name, call.function.arguments)


def plain(where):
    same(ask(where, HELLO).choices[0].message.content, HELLO_ANSWER)


def stream(where):
    chunks = ask(where, HELLO, stream=True)
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), HELLO_ANSWER)


def tools(where):
    is_weather(ask(where, WEATHER, tools=[CHAT_TOOL]))


def required(where):
    is_weather(ask(where, WEATHER, tools=[CHAT_TOOL], tool_choice="required"))


def structured(where):
    answer = ask(where, PERSON, response_format=Person)
    is_tom(json.loads(answer.choices[0].message.content))


def loop(where):
    asked = [{"role": "user", "content": WEATHER}]
    message = ask(where, asked, tools=[CHAT_TOOL]).choices[0].message
    asked += [message]
    asked += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": DEGREES}]
    answer = ask(where, asked, tools=[CHAT_TOOL])
    same(answer.choices[0].message.content, WEATHER_ANSWER)


def responses_plain():
    answer = litellm.responses(**RESPONSES, input=HELLO, max_output_tokens=100, api_key="none")
    same(answer.output[0].content[0].text, HELLO_ANSWER)


run(vars(), MODELS)
