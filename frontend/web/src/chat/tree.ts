// A conversation is a tree: an edited question or a repeated answer begins another branch.

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** The cost of an answer. Times are in seconds; values that the server did not report are absent. */
export interface Cost {
  requestId?: string;
  model: string;
  firstTokenS?: number;
  totalS?: number;
  decodeS?: number;
  queueS?: number;
  promptTokens?: number;
  cachedTokens?: number;
  outputTokens?: number;
  draftTokens?: number;
  prefixMatch?: string;
  finish?: string;
}

export interface Message {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  text: string;
  time: number;
  images?: string[];
  reasoning?: string;
  calls?: ToolCall[];
  /** The ID of the tool call that this message answers. */
  callId?: string;
  cost?: Cost;
  error?: string;
}

/** Text fields of the settings; with "" the server's default applies. */
export interface Settings {
  model: string;
  system: string;
  temperature: string;
  top_p: string;
  top_k: string;
  min_p: string;
  max_tokens: string;
  seed: string;
  presence_penalty: string;
  frequency_penalty: string;
  reasoning_effort: string;
  schema: string;
  tools: string;
}

export interface Conversation {
  id: string;
  title: string;
  updated: number;
  settings: Settings;
  messages: Record<string, Message>;
  /** The last message of the branch that is shown. */
  leaf: string | null;
}

export const NO_SETTINGS: Settings = {
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  presence_penalty: "",
  frequency_penalty: "",
  reasoning_effort: "",
  schema: "",
  tools: "",
};

/** Return a random identifier. Pages from plain http URLs have no crypto.randomUUID. */
export function newId(): string {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Return the messages from the first to `leaf`. */
export function branchTo({ messages }: Conversation, leaf: string | null): Message[] {
  const branch: Message[] = [];
  for (let id = leaf; id !== null; ) {
    const message: Message | undefined = messages[id];
    if (!message) break;
    branch.unshift(message);
    id = message.parent;
  }
  return branch;
}

/** Return the messages that follow `parent`, oldest first. */
export function childrenOf({ messages }: Conversation, parent: string | null): Message[] {
  return Object.values(messages)
    .filter((message) => message.parent === parent)
    .sort((a, b) => a.time - b.time || a.id.localeCompare(b.id));
}

/** Return the last message of the latest branch below a message. */
export function latestLeaf(conversation: Conversation, id: string): string {
  const last = childrenOf(conversation, id).at(-1);
  return last ? latestLeaf(conversation, last.id) : id;
}

/** Return a conversation as Markdown. */
export function exportMarkdown(conversation: Conversation): string {
  const parts = [`# ${conversation.title}`];
  const { system } = conversation.settings;
  if (system) parts.push(`## System\n\n${system}`);
  const names = { user: "User", assistant: "Assistant", tool: "Tool" };
  for (const message of branchTo(conversation, conversation.leaf)) {
    const calls = (message.calls ?? []).map((call) => `\`${call.name}(${call.arguments})\``);
    parts.push([`## ${names[message.role]}`, message.text, ...calls].filter(Boolean).join("\n\n"));
  }
  return `${parts.join("\n\n")}\n`;
}
