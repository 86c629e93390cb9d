// Build the body of a request from a conversation and its settings.
import { type Message, type Settings } from "./tree";

const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
] as const;

/** Return the body for the answer to the last of `messages`. Throws an Error that names an invalid setting. */
export function requestBody(messages: Message[], settings: Settings): Record<string, unknown> {
  const body: Record<string, unknown> = {
    messages: [
      ...(settings.system.trim() ? [{ role: "system", content: settings.system }] : []),
      ...messages.map(apiMessage),
    ],
    stream: true,
    stream_options: { include_usage: true },
    include_receipt: true,
  };
  if (settings.model) body.model = settings.model;
  for (const name of NUMBERS) {
    const text = settings[name].trim();
    if (!text) continue;
    const value = Number(text);
    if (!Number.isFinite(value)) throw new Error(`${name} must be a number, got "${text}"`);
    body[name] = value;
  }
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.schema.trim()) {
    const schema = parse("JSON schema", settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (settings.tools.trim()) body.tools = tools(parse("Tools", settings.tools));
  return body;
}

function apiMessage({ role, text, images, calls, callId }: Message): Record<string, unknown> {
  if (role === "tool") return { role, tool_call_id: callId, content: text };
  if (role === "assistant") {
    if (!calls?.length) return { role, content: text };
    const tool_calls = calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
    return { role, content: text || null, tool_calls };
  }
  if (!images?.length) return { role, content: text };
  const parts: unknown[] = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

function parse(name: string, text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} must be JSON: ${(error as Error).message}`);
  }
}

/** Return tools in OpenAI's format. A list of bare functions is accepted as well. */
function tools(value: unknown): unknown[] {
  const list = Array.isArray(value) ? value : [value];
  return list.map((tool) => (tool?.type ? tool : { type: "function", function: tool }));
}
