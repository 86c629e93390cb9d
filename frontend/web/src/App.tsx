import { useEffect, useState } from "preact/hooks";
import { ChatView } from "./chat/ChatView";
import { currentId, loadHistory, select } from "./chat/history";
import { loadModels } from "./chat/models";
import { running, stop } from "./chat/answer";
import { EngineView } from "./engine/EngineView";
import { WhyDialog } from "./engine/WhyDialog";
import { KeyDialog } from "./KeyDialog";
import { Sidebar, type View } from "./Sidebar";
import { Shortcuts } from "./Shortcuts";
import { apiKey, describeError, needsKey } from "./shared/api";
import { useStore } from "./shared/store";

function viewOfUrl(): View {
  return location.hash === "#engine" ? "engine" : "chat";
}

export function App() {
  const [view, setView] = useState(viewOfUrl);
  const [isSidebarOpen, setSidebarOpen] = useState(false);
  const [showsShortcuts, setShowsShortcuts] = useState(false);
  const [asksForKey, setAsksForKey] = useState(false);
  const [problem, setProblem] = useState("");
  const isKeyNeeded = useStore(needsKey);
  const key = useStore(apiKey);

  useEffect(() => {
    const follow = () => {
      setView(viewOfUrl());
      setSidebarOpen(false);
    };
    addEventListener("hashchange", follow);
    void loadHistory();
    return () => removeEventListener("hashchange", follow);
  }, []);

  useEffect(() => {
    loadModels().then(
      () => setProblem(""),
      (error) => setProblem(describeError(error)),
    );
  }, [key]);

  useEffect(() => currentId.watch(() => setSidebarOpen(false)), []);

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if (document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey) return;
      if (event.key === "Escape") {
        if (isSidebarOpen) setSidebarOpen(false);
        else stop(currentId.get());
        return;
      }
      if (event.altKey || isEditable(event.target)) return;
      const action = {
        "/": () => document.querySelector<HTMLElement>(".composer textarea")?.focus(),
        n: () => startNew(),
        e: () => (location.hash = "engine"),
        c: () => (location.hash = "chat"),
        "?": () => setShowsShortcuts(true),
      }[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [isSidebarOpen]);

  useEffect(() => {
    const warn = (event: BeforeUnloadEvent) => {
      if (Object.keys(running.get()).length) event.preventDefault();
    };
    addEventListener("beforeunload", warn);
    return () => removeEventListener("beforeunload", warn);
  }, []);

  return (
    <div class={isSidebarOpen ? "shell open" : "shell"}>
      <Sidebar
        view={view}
        onNew={startNew}
        onKey={() => setAsksForKey(true)}
        onShortcuts={() => setShowsShortcuts(true)}
      />
      <div class="veil" onClick={() => setSidebarOpen(false)} />
      <main>
        <button class="plain menu" aria-label="Menu" aria-expanded={isSidebarOpen} onClick={() => setSidebarOpen(!isSidebarOpen)}>
          <span aria-hidden="true">☰</span>
        </button>
        {problem && !isKeyNeeded && (
          <p class="notice" role="alert">
            {problem}
          </p>
        )}
        {view === "chat" ? <ChatView /> : <EngineView />}
      </main>
      <WhyDialog />
      {(isKeyNeeded || asksForKey) && <KeyDialog onClose={() => setAsksForKey(false)} />}
      {showsShortcuts && <Shortcuts onClose={() => setShowsShortcuts(false)} />}
    </div>
  );
}

function startNew(): void {
  location.hash = "chat";
  select("");
  requestAnimationFrame(() => document.querySelector<HTMLElement>(".composer textarea")?.focus());
}

function isEditable(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.matches("input, textarea, select, [contenteditable]");
}
