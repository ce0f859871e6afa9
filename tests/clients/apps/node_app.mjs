// An application on OpenAI's SDK for Node; prints what its user sees as JSON.
import { createRequire } from "node:module";
const OpenAI = createRequire(process.argv[3] + "/")("openai").OpenAI;

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any" });
const model = "tiny";
const ask = { model, messages: [{ role: "user", content: "Hello, Grüße!" }] };

const plain = await client.chat.completions.create(ask);

let streamed = "";
let deltas = 0;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
  const text = chunk.choices[0]?.delta?.content;
  if (text) {
    streamed += text;
    deltas += 1;
  }
}

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const runner = client.chat.completions.runTools({
  model,
  stream: true,
  messages: [{ role: "user", content: "How is it in Rome and Oslo?" }],
  tools: [
    {
      type: "function",
      function: { name: "weather", parse: JSON.parse, parameters: city, function: ({ city }) => `${city} is sunny` },
    },
  ],
});
const tools = await runner.finalContent();

const parsed = await client.chat.completions.parse({
  ...ask,
  response_format: { type: "json_schema", json_schema: { name: "visit", schema: city, strict: true } },
});

const first = await client.responses.create({ model, input: "Hello" });
const again = client.responses.stream({ model, input: "And now?", previous_response_id: first.id });
const second = await again.finalResponse();

const refused = await client.chat.completions.create({ ...ask, model: "other" }).catch((error) => error);

console.log(
  JSON.stringify({
    plain: plain.choices[0].message.content,
    streamed,
    deltas,
    tools,
    parsed: parsed.choices[0].message.content,
    responses: [first.output_text, second.output_text],
    refused: [refused instanceof OpenAI.NotFoundError, refused.code],
  }),
);
