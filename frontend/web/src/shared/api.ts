// Requests to the server that served this page, with the user's API key.
import { Store } from "./store";

const KEY = "engine.api-key";

/** The API key; "" for none. It is kept for this tab, or in this browser if the user asks for that. */
export const apiKey = new Store(sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "");

/** Set when the server has rejected a request because it had no valid key. */
export const needsKey = new Store(false);

let declinedKey: string | null = null;

/** Stop asking until the key changes: the user continues without a valid one. */
export function declineKey(): void {
  declinedKey = apiKey.get();
  needsKey.set(false);
}

export function setApiKey(key: string, remember: boolean): void {
  for (const storage of [sessionStorage, localStorage]) storage.removeItem(KEY);
  if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
  declinedKey = null;
  needsKey.set(false);
  apiKey.set(key);
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** Send a request and return its response. Throws an ApiError for every status but 2xx. */
export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (apiKey.get()) headers.set("Authorization", `Bearer ${apiKey.get()}`);
  if (options.body) headers.set("Content-Type", "application/json");
  const response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401 && apiKey.get() !== declinedKey) needsKey.set(true);
  throw new ApiError(response.status, await messageOf(response));
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await request(path, { signal: signal ?? null })).json();
}

export async function postJson<T>(path: string, body: unknown = {}): Promise<T> {
  return (await request(path, { method: "POST", body: JSON.stringify(body) })).json();
}

async function messageOf(response: Response): Promise<string> {
  const text = await response.text();
  try {
    const error = JSON.parse(text).error;
    return error.message ?? error;
  } catch {
    return text || `The server answered with status ${response.status}`;
  }
}

/** Return the message of an error for the user. */
export function describeError(error: unknown): string {
  if (error instanceof ApiError) return error.message;
  if (error instanceof TypeError) return "The server cannot be reached.";
  return error instanceof Error ? error.message : String(error);
}

/** Yield the data of each server-sent event of a response, until `[DONE]`. */
export async function* readEvents(response: Response): AsyncGenerator<string> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield data;
      }
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}
