import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useStore } from "../shared/store";
import { ask, running } from "./answer";
import { Composer } from "./Composer";
import { changeSettings, conversations, currentId, draftSettings, startConversation } from "./history";
import { MessageView } from "./MessageView";
import { findModel, models } from "./models";
import { SettingsPanel } from "./SettingsPanel";
import { branchTo, exportMarkdown } from "./tree";

export function ChatView() {
  const all = useStore(conversations);
  const id = useStore(currentId);
  const draft = useStore(draftSettings);
  const served = useStore(models);
  const isRunning = id in useStore(running);
  const [showsSettings, setShowsSettings] = useState(false);
  const [editedId, setEditedId] = useState("");
  const conversation = all[id];
  const settings = conversation?.settings ?? draft;
  const model = findModel(served, settings.model);
  const branch = conversation ? branchTo(conversation, conversation.leaf) : [];
  const scroller = useFollowing(id, branch.at(-1)?.text.length);

  const send = (text: string, images: string[]) => {
    const target = conversation ?? startConversation(text);
    ask(target.id, target.leaf, text, images);
  };
  const editLast = () => setEditedId(branch.findLast((message) => message.role === "user")?.id ?? "");

  return (
    <div class="chat">
      <header class="top">
        <h1 class="title">{conversation?.title ?? "New conversation"}</h1>
        <label class="model">
          <span class="hidden">Model</span>
          <select
            value={model?.id ?? ""}
            onChange={(event) => changeSettings(id, { model: event.currentTarget.value })}
          >
            {served.map((each) => (
              <option key={each.id}>{each.id}</option>
            ))}
          </select>
        </label>
        {conversation && <ExportMenu id={id} />}
        <button class="quiet" aria-expanded={showsSettings} onClick={() => setShowsSettings(!showsSettings)}>
          Settings
        </button>
      </header>
      <div class="columns">
        <div class="talk">
          <div class="scroll" ref={scroller} tabIndex={0} role="region" aria-label="Conversation">
            <div class="transcript" aria-live="polite" aria-busy={isRunning}>
              {branch.map((message) => (
                <MessageView
                  key={message.id}
                  message={message}
                  conversation={conversation!}
                  isRunning={isRunning}
                  isLast={message.id === conversation!.leaf}
                  isEdited={message.id === editedId}
                  onEdit={setEditedId}
                />
              ))}
              {!branch.length && <Welcome model={model?.id} length={model?.maxLength} />}
            </div>
          </div>
          <Composer
            key={id}
            conversationId={id}
            takesImages={model?.capabilities.includes("vision") ?? false}
            onSend={send}
            onEditLast={editLast}
          />
        </div>
        {showsSettings && (
          <SettingsPanel
            settings={settings}
            model={model}
            onChange={(patch) => changeSettings(id, patch)}
            onClose={() => setShowsSettings(false)}
          />
        )}
      </div>
    </div>
  );
}

function Welcome({ model, length }: { model: string | undefined; length: number | undefined }) {
  return (
    <div class="welcome">
      <p class="large">What would you like to know?</p>
      {model && (
        <p class="muted">
          {model} answers, with a context of {length?.toLocaleString("en")} tokens. Conversations stay in this browser.
        </p>
      )}
    </div>
  );
}

function ExportMenu({ id }: { id: string }) {
  const menu = useRef<HTMLDetailsElement>(null);
  const save = (kind: "md" | "json") => {
    menu.current!.open = false;
    const conversation = conversations.get()[id]!;
    const text = kind === "md" ? exportMarkdown(conversation) : JSON.stringify(conversation, null, 2);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind === "md" ? "text/markdown" : "application/json" }));
    link.download = `${conversation.title.replace(/[^\p{L}\p{N} -]/gu, "").slice(0, 40).trim() || "conversation"}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };
  return (
    <details class="export" ref={menu}>
      <summary>Export</summary>
      <div class="popup">
        <button class="quiet" onClick={() => save("md")}>
          This branch as Markdown
        </button>
        <button class="quiet" onClick={() => save("json")}>
          All branches as JSON
        </button>
      </div>
    </details>
  );
}

/** Return a reference to an element that stays at its end while its content grows, unless the user scrolls up. */
function useFollowing(id: string, length: number | undefined) {
  const element = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  useEffect(() => {
    const scroller = element.current!;
    const watch = () => {
      follows.current = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
    };
    scroller.addEventListener("scroll", watch, { passive: true });
    return () => scroller.removeEventListener("scroll", watch);
  }, []);
  useLayoutEffect(() => {
    follows.current = true;
  }, [id]);
  useLayoutEffect(() => {
    if (follows.current) element.current!.scrollTop = element.current!.scrollHeight;
  }, [id, length]);
  return element;
}
