import asyncio

from cases import *
from person import Person
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

loop_of_all = asyncio.new_event_loop()
asyncio.set_event_loop(loop_of_all)
OPENAI = OpenAIProvider(base_url=f"{BASE}/v1", api_key="none")
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=OPENAI),
    "responses": OpenAIResponsesModel(MODEL, provider=OPENAI),
    "messages": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE, api_key="none")),
}


def get_weather(city: str) -> str:
    """The temperature in a city."""
    return DEGREES


def plain(model):
    same(Agent(model).run_sync(HELLO).output, HELLO_ANSWER)


def stream(model):
    async def read():
        async with Agent(model).run_stream(HELLO) as result:
            return await result.get_output()

    same(loop_of_all.run_until_complete(read()), HELLO_ANSWER)


def required(model):
    """Its default: the output is a call of the tool final_result."""
    is_tom(Agent(model, output_type=Person).run_sync(PERSON).output)


def structured(model):
    """It has no native output for unknown models of Anthropic's API."""
    kind = PromptedOutput if isinstance(model, AnthropicModel) else NativeOutput
    if kind is NativeOutput or EXACT:
        is_tom(Agent(model, output_type=kind(Person)).run_sync(PERSON).output)


def loop(model):
    same(Agent(model, tools=[get_weather]).run_sync(WEATHER).output, WEATHER_ANSWER)


run(vars(), MODELS)
