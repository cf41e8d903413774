from cases import *
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from person import Person

OPENAI = {"model": MODEL, "base_url": f"{BASE}/v1", "api_key": "none", "max_retries": 0}
MODELS = {
    "chat": ChatOpenAI(**OPENAI),
    "responses": ChatOpenAI(**OPENAI, use_responses_api=True),
    "messages": ChatAnthropic(model=MODEL, base_url=BASE, api_key="none", max_retries=0),
}


@tool
def get_weather(city: str) -> str:
    """The temperature in a city."""
    return DEGREES


def is_weather(message):
    [call, *_] = message.tool_calls
    is_call(call["name"], call["args"])


def plain(model):
    same(model.invoke(HELLO).text, HELLO_ANSWER)


def stream(model):
    same("".join(chunk.text for chunk in model.stream(HELLO)), HELLO_ANSWER)


def tools(model):
    is_weather(model.bind_tools([get_weather]).invoke(WEATHER))


def required(model):
    is_weather(model.bind_tools([get_weather], tool_choice="any").invoke(WEATHER))
    by_tool = model.with_structured_output(Person, method="function_calling")
    is_tom(by_tool.invoke(PERSON))


def structured(model):
    is_tom(model.with_structured_output(Person, method="json_schema").invoke(PERSON))


def loop(model):
    bound, messages = model.bind_tools([get_weather]), [HumanMessage(WEATHER)]
    messages.append(bound.invoke(messages))
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    same(bound.invoke(messages).text, WEATHER_ANSWER)


run(vars(), MODELS)
