// An application on Vercel's AI SDK; prints what its user sees as JSON. Its arguments: the address, the folder of the
// packages, which provider speaks to the address, and the path of a file for which the model is to wait, if any.
import { createRequire } from "node:module";

const [, , url, packages, name, wait] = process.argv;
const require = createRequire(packages + "/");
const { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { baseURL: url, apiKey: "any", name: "swarm" };
const model = {
  responses: () => createOpenAI(settings)("tiny"),
  chat: () => createOpenAI(settings).chat("tiny"),
  anthropic: () => createAnthropic(settings)("tiny"),
  compatible: () => createOpenAICompatible({ ...settings, supportsStructuredOutputs: true })("tiny"),
}[name]();
const visit = jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] });
const reasoning = { openai: { forceReasoning: true, reasoningEffort: "low", reasoningSummary: "auto" } };

let ran = 0;
const weather = tool({
  description: "The weather in a city",
  inputSchema: visit,
  execute: async ({ city }) => {
    ran += 1;
    return `${city} is sunny`;
  },
});

async function told(stream) {
  let text = "";
  let deltas = 0;
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") {
      text += part.text;
      deltas += 1;
    }
  }
  return { text, deltas };
}

if (wait !== undefined) {
  await generateText({ model, prompt: `WAIT ${wait}`, maxRetries: 0 });
  process.exit();
}
const plain = await generateText({ model, system: "Be kind.", prompt: "Hello" });
const streamed = await told(streamText({ model, prompt: "Hello" }));

const asked = { role: "user", content: "THINK of both\nHow is it in Rome and Oslo?" };
const toolbox = { model, tools: { weather }, stopWhen: stepCountIs(3), providerOptions: reasoning };
const first = await generateText({ ...toolbox, messages: [asked] });
const messages = [asked, ...first.response.messages, { role: "user", content: "And now?" }];
const second = await generateText({ model, messages });

const stream = streamText({ ...toolbox, messages: [asked] });
const tools = await told(stream);
const after = [asked, ...(await stream.response).messages, { role: "user", content: "And now?" }];
const third = await told(streamText({ model, messages: after }));

const png = Buffer.from("iVBORw0KGgo=", "base64");
const parts = [{ type: "text", text: "What is it?" }, { type: "image", image: png, mediaType: "image/png" }];
const image = (await generateText({ model, messages: [{ role: "user", content: parts }] })).text;

const object = (await generateObject({ model, schema: visit, prompt: "Where to?" })).object;
console.log(
  JSON.stringify({
    plain: plain.text,
    streamed: streamed.text,
    deltas: streamed.deltas,
    tools: [first.text, tools.text],
    again: [second.text, third.text],
    thought: first.steps[0].reasoningText ?? null,
    ran,
    image,
    object,
  }),
);
