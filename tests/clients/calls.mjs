// What pages and servers in JavaScript send, by the packages that they use. Prints what came as JSON.
import OpenAI from "openai";
import { experimental_generateImage, generateImage, streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const baseURL = `${process.argv[2]}/v1`;
const client = new OpenAI({ baseURL, apiKey: "EMPTY", maxRetries: 0 });
const found = {};

const image = await client.images.generate({ model: "dall-e-2", prompt: "a cat", size: "64x32", n: 2, seed: 5, response_format: "b64_json" });
found.images = image.data.map((one) => [one.b64_json.slice(0, 8), one.tilework.slo_source, one.tilework.seed]);

const messages = [{ role: "user", content: "a cat" }];
const stream = await client.chat.completions.create({ model: "dall-e-2", messages, stream: true });
found.content = "";
found.reasoning = "";
for await (const chunk of stream) {
  found.content += chunk.choices[0].delta.content ?? "";
  found.reasoning += chunk.choices[0].delta.reasoning_content ?? "";
  found.finish = chunk.choices[0].finish_reason;
}
try {
  await client.images.generate({ model: "dall-e-2", prompt: "a cat", size: "7x7" });
} catch (error) {
  found.error = [error.constructor.name, error.param];
}

const provider = createOpenAICompatible({ name: "tilework", baseURL, apiKey: "EMPTY" });
const drawn = await (generateImage ?? experimental_generateImage)({
  model: provider.imageModel("dall-e-2"),
  prompt: "a dog",
  size: "64x32",
  providerOptions: { tilework: { seed: 9, slo_s: 60 } },
});
found.sdk_image = [drawn.image.mediaType, drawn.image.base64.slice(0, 8)];
const told = streamText({ model: provider("dall-e-2"), prompt: "a dog" });
found.sdk_text = "";
found.sdk_reasoning = "";
for await (const part of told.fullStream) {
  if (part.type === "text-delta") found.sdk_text += part.text;
  if (part.type === "reasoning-delta") found.sdk_reasoning += part.text;
  if (part.type === "error") throw part.error;
}
console.log(JSON.stringify(found));
