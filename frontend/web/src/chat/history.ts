// The conversations, which are stored only in this browser's database (IndexedDB).
import { createStore, del, entries, set } from "idb-keyval";
import { Store } from "../shared/store";
import { type Conversation, type Message, NO_SETTINGS, type Settings, newId } from "./tree";

const CURRENT = "engine.conversation";
const DRAFT_SETTINGS = "engine.settings";

const database = createStore("engine", "conversations");

export const conversations = new Store<Record<string, Conversation>>({});

/** The conversation that is shown; "" for a new one. */
export const currentId = new Store(sessionStorage.getItem(CURRENT) ?? "");

/** Set when the browser refuses to store conversations, as in some private windows. */
export const storageProblem = new Store("");

/** The settings of the next new conversation. */
export const draftSettings = new Store<Settings>({
  ...NO_SETTINGS,
  ...JSON.parse(localStorage.getItem(DRAFT_SETTINGS) ?? "{}"),
});

export async function loadHistory(): Promise<void> {
  try {
    const found = await entries<string, Conversation>(database);
    conversations.update((present) => ({ ...Object.fromEntries(found), ...present }));
  } catch (error) {
    reportProblem(error);
  }
}

export function select(id: string): void {
  sessionStorage.setItem(CURRENT, id);
  currentId.set(id);
}

export function startConversation(title: string): Conversation {
  const conversation: Conversation = {
    id: newId(),
    title: title.trim().replace(/\s+/g, " ").slice(0, 80) || "Image",
    updated: Date.now(),
    settings: draftSettings.get(),
    messages: {},
    leaf: null,
  };
  conversations.update((all) => ({ ...all, [conversation.id]: conversation }));
  select(conversation.id);
  return conversation;
}

/** Change a conversation. Unless `isTransient`, store it. */
export function change(
  id: string,
  apply: (conversation: Conversation) => Conversation,
  isTransient = false,
): void {
  const before = conversations.get()[id];
  // The conversation may have been deleted meanwhile.
  if (!before) return;
  const after = apply(before);
  conversations.update((all) => ({ ...all, [id]: after }));
  if (!isTransient) set(id, after, database).catch(reportProblem);
}

/** Add a message and show its branch. */
export function addMessage(id: string, message: Message): void {
  change(id, (conversation) => ({
    ...conversation,
    updated: Date.now(),
    leaf: message.id,
    messages: { ...conversation.messages, [message.id]: message },
  }));
}

export function changeMessage(id: string, messageId: string, patch: Partial<Message>, isTransient = false): void {
  change(
    id,
    (conversation) => {
      const message = conversation.messages[messageId];
      if (!message) return conversation;
      return { ...conversation, messages: { ...conversation.messages, [messageId]: { ...message, ...patch } } };
    },
    isTransient,
  );
}

export function changeSettings(id: string, patch: Partial<Settings>): void {
  draftSettings.update((settings) => ({ ...settings, ...patch }));
  localStorage.setItem(DRAFT_SETTINGS, JSON.stringify(draftSettings.get()));
  change(id, (conversation) => ({ ...conversation, settings: { ...conversation.settings, ...patch } }));
}

export function remove(id: string): void {
  conversations.update((all) => Object.fromEntries(Object.entries(all).filter(([key]) => key !== id)));
  del(id, database).catch(reportProblem);
  if (currentId.get() === id) select("");
}

function reportProblem(error: unknown): void {
  storageProblem.set(`This browser does not store conversations: ${String(error)}`);
}
