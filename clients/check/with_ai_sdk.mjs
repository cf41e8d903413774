// The Vercel AI SDK. It runs in the folder where it is installed; see cases.py for the rest.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { BASE_URL, EXACT, CASE_S } = process.env;
const maxRetries = 0, maxOutputTokens = 100;
const compatible = createOpenAICompatible({
  name: "smartspec", baseURL: `${BASE_URL}/v1`, apiKey: "none", supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${BASE_URL}/v1`, apiKey: "none" });
const models = { chat: compatible("smartspec"), messages: anthropic("smartspec") };
const schema = z.object({ name: z.string(), age: z.number().int() });
const tools = {
  get_weather: tool({
    description: "The temperature in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "18 degrees",
  }),
};

function same(found, wanted) {
  const isSame = EXACT === "1" ? found === wanted : typeof found === typeof wanted;
  if (!isSame) throw new Error(`got ${JSON.stringify(found)}, expected ${JSON.stringify(wanted)}`);
}
function isTom(person) {
  same(person.name, "Tom");
  same(person.age, 20);
}
const HELLO = "Say hello.", WEATHER = "How warm is it in Paris?";
const PERSON = "Extract the person as JSON: Tom is 20.";
const cases = {
  async plain(options) {
    same((await generateText({ ...options, prompt: HELLO })).text, "Hello, world.");
  },
  async stream(options) {
    let text = "", failure;
    const onError = ({ error }) => { failure = error; };
    for await (const part of streamText({ ...options, prompt: HELLO, onError }).textStream) text += part;
    if (failure) throw failure;
    same(text, "Hello, world.");
  },
  async required(options) {
    const result = await generateText({ ...options, prompt: WEATHER, tools, toolChoice: "required" });
    same(result.toolCalls[0].toolName, "get_weather");
    same(result.toolCalls[0].input.city, "Paris");
  },
  async structured(options) {
    isTom((await generateObject({ ...options, prompt: PERSON, schema })).object);
    let last, failure;
    const onError = ({ error }) => { failure = error; };
    const streamed = streamObject({ ...options, prompt: PERSON, schema, onError });
    for await (const part of streamed.partialObjectStream) last = part;
    if (failure) throw failure;
    isTom(last);
  },
  async loop(options) {
    if (EXACT !== "1") return null;
    const steps = { stopWhen: stepCountIs(3), tools };
    same((await generateText({ ...options, ...steps, prompt: WEATHER })).text, "It is 18 degrees in Paris.");
  },
};
const seconds = Number(CASE_S);
for (const [name, test] of Object.entries(cases)) {
  for (const [route, model] of Object.entries(models)) {
    let error = "";
    const abortSignal = AbortSignal.timeout(seconds * 1000);
    try {
      if (await test({ model, maxRetries, maxOutputTokens, abortSignal }) === null) continue;
    } catch (reason) { error = `${reason.name}: ${reason.message}`; }
    console.log(JSON.stringify({ route, case: name, error }));
  }
}
