// Answers of the model: each is one request, whose stream is written into a message.
import { ApiError, describeError, readEvents, request } from "../shared/api";
import { Store } from "../shared/store";
import { requestBody } from "./body";
import { addMessage, changeMessage, conversations } from "./history";
import { type Cost, type Message, type ToolCall, branchTo, newId } from "./tree";

/** Identifier of a conversation -> the request of the answer that is being streamed. */
export const running = new Store<Record<string, AbortController>>({});

export function stop(conversationId: string): void {
  running.get()[conversationId]?.abort();
}

/** Add a question after `parent`, as a new branch if there is one already, and answer it. */
export function ask(conversationId: string, parent: string | null, text: string, images: string[] = []): void {
  const message: Message = { id: newId(), parent, role: "user", text, time: Date.now() };
  if (images.length) message.images = images;
  addMessage(conversationId, message);
  void answer(conversationId, message.id);
}

/** Add the results of tools after the answer that called them, and let the model continue. */
export function returnResults(conversationId: string, caller: Message, results: Record<string, string>): void {
  let parent = caller.id;
  for (const call of caller.calls ?? []) {
    const text = results[call.id] ?? "";
    const message: Message = { id: newId(), parent, role: "tool", callId: call.id, text, time: Date.now() };
    addMessage(conversationId, message);
    parent = message.id;
  }
  void answer(conversationId, parent);
}

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
  engine?: {
    request_id: string;
    queue_ms: number | null;
    decode_ms: number | null;
    accepted_draft_tokens: number;
    prefix_match: string;
  };
}

/** Stream an answer to the message `parent` into a new child of it. */
export async function answer(conversationId: string, parent: string): Promise<void> {
  const conversation = conversations.get()[conversationId];
  if (!conversation || running.get()[conversationId]) return;
  const { settings } = conversation;
  const message: Message = {
    id: newId(),
    parent,
    role: "assistant",
    text: "",
    time: Date.now(),
    cost: { model: settings.model },
  };
  const controller = new AbortController();
  running.update((all) => ({ ...all, [conversationId]: controller }));
  addMessage(conversationId, message);
  const draft = new Draft(message);
  let frame = 0;
  const show = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      changeMessage(conversationId, message.id, draft.patch(), true);
    });
  };
  let error = "";
  try {
    const body = requestBody(branchTo(conversation, parent), settings);
    const response = await request("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal: controller.signal,
    });
    draft.cost.requestId = response.headers.get("x-request-id") ?? undefined;
    for await (const data of readEvents(response)) {
      draft.add(JSON.parse(data));
      show();
    }
    if (!draft.cost.finish) error = "The connection was lost before the answer was complete.";
  } catch (problem) {
    if (controller.signal.aborted) draft.cost.finish = "stopped";
    else error = describeError(problem);
  } finally {
    cancelAnimationFrame(frame);
    draft.end();
    changeMessage(conversationId, message.id, error ? { ...draft.patch(), error } : draft.patch());
    running.update(({ [conversationId]: _, ...others }) => others);
  }
}

/** An answer while it arrives. */
class Draft {
  readonly cost: Cost;
  private readonly start = performance.now();
  private text = "";
  private reasoning = "";
  private calls: ToolCall[] = [];

  constructor(message: Message) {
    this.cost = { ...message.cost! };
  }

  /** Apply one event of the stream. Throws an ApiError for an event that reports an error. */
  add(event: { error?: { message: string }; model?: string; choices?: { delta: Delta; finish_reason?: string }[]; usage?: Usage }): void {
    if (event.error) throw new ApiError(500, event.error.message);
    if (event.model) this.cost.model = event.model;
    const choice = event.choices?.[0];
    if (choice) {
      const { content, reasoning_content, tool_calls } = choice.delta;
      if (content || reasoning_content || tool_calls) this.cost.firstTokenS ??= this.elapsedS;
      this.text += content ?? "";
      this.reasoning += reasoning_content ?? "";
      for (const part of tool_calls ?? []) {
        const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
        call.id ||= part.id ?? "";
        call.name += part.function?.name ?? "";
        call.arguments += part.function?.arguments ?? "";
      }
      if (choice.finish_reason) this.cost.finish = choice.finish_reason;
    }
    if (event.usage) this.addUsage(event.usage);
  }

  private addUsage({ prompt_tokens, completion_tokens, prompt_tokens_details, engine }: Usage): void {
    const { cost } = this;
    cost.promptTokens = prompt_tokens;
    cost.outputTokens = completion_tokens;
    cost.cachedTokens = prompt_tokens_details?.cached_tokens;
    if (!engine) return;
    cost.requestId = engine.request_id;
    cost.queueS = (engine.queue_ms ?? 0) / 1000;
    cost.decodeS = (engine.decode_ms ?? 0) / 1000;
    cost.draftTokens = engine.accepted_draft_tokens;
    cost.prefixMatch = engine.prefix_match;
  }

  end(): void {
    this.cost.totalS = this.elapsedS;
  }

  patch(): Partial<Message> {
    const patch: Partial<Message> = { text: this.text, cost: { ...this.cost } };
    if (this.reasoning) patch.reasoning = this.reasoning;
    if (this.calls.length) patch.calls = this.calls.map((call) => ({ ...call }));
    return patch;
  }

  private get elapsedS(): number {
    return (performance.now() - this.start) / 1000;
  }
}

/** Return the tokens per second of an answer, not counting the time to the first token. */
export function tokensPerSecond({ outputTokens, decodeS, totalS, firstTokenS }: Cost): number | undefined {
  if (!outputTokens || outputTokens < 2) return undefined;
  const time = decodeS || (totalS ?? 0) - (firstTokenS ?? 0);
  return time > 0 ? (outputTokens - 1) / time : undefined;
}
