// Requests to the server that this page came from, with the API key of the user.
import { Store } from "./store";

const KEY = "engine.api-key";

/** The API key; "" for none. It is kept for this tab, or for this browser if the user wishes. */
export const apiKey = new Store(sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "");

/** Set when the server has refused a request for lack of a valid key. */
export const needsKey = new Store(false);

let declinedKey: string | null = null;

/** Ask no more as long as the key is the same, because the user wants to go on without a valid one. */
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

/** Return what an error says to a person. */
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
