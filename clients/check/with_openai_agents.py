import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import *
from person import Person

from openai import AsyncOpenAI

set_tracing_disabled(True)
loop_of_all = asyncio.new_event_loop()
asyncio.set_event_loop(loop_of_all)
client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
MODELS = {
    "chat": OpenAIChatCompletionsModel(MODEL, client),
    "responses": OpenAIResponsesModel(MODEL, client),
}


@function_tool
def get_weather(city: str) -> str:
    """The temperature in a city."""
    return DEGREES


def ask(model, text, **fields):
    agent = Agent(name="check", instructions="Be brief.", model=model, **fields)
    return Runner.run_sync(agent, text).final_output


def plain(model):
    same(ask(model, HELLO), HELLO_ANSWER)


def stream(model):
    async def read():
        result = Runner.run_streamed(Agent(name="check", model=model), HELLO)
        async for _ in result.stream_events():
            pass
        return result.final_output

    same(loop_of_all.run_until_complete(read()), HELLO_ANSWER)


def required(model):
    """The agent stops at the first result."""
    forced = ModelSettings(tool_choice="required")
    stops = {"tool_use_behavior": "stop_on_first_tool", "model_settings": forced}
    same(ask(model, WEATHER, tools=[get_weather], **stops), DEGREES)


def structured(model):
    is_tom(ask(model, PERSON, output_type=Person))


def loop(model):
    same(ask(model, WEATHER, tools=[get_weather]), WEATHER_ANSWER)


run(vars(), MODELS)
