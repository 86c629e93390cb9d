import { conversations, currentId, remove, select, storageProblem } from "./chat/history";
import { running, stop } from "./chat/answer";
import type { Conversation } from "./chat/tree";
import { useStore } from "./shared/store";
import { nextTheme, theme } from "./shared/theme";

export type View = "chat" | "engine";

interface Props {
  view: View;
  onNew: () => void;
  onKey: () => void;
  onShortcuts: () => void;
}

export function Sidebar({ view, onNew, onKey, onShortcuts }: Props) {
  const chosenTheme = useStore(theme);
  const problem = useStore(storageProblem);
  const go = (target: View) => (event: Event) => {
    event.preventDefault();
    location.hash = target;
  };
  return (
    <nav class="sidebar" aria-label="Main">
      <div class="brand">Engine</div>
      <div class="views">
        {(["chat", "engine"] as const).map((target) => (
          <a key={target} href={`#${target}`} onClick={go(target)} aria-current={view === target ? "page" : undefined}>
            {target === "chat" ? "Chat" : "Engine"}
          </a>
        ))}
      </div>
      <button class="new" onClick={onNew}>
        New conversation
      </button>
      <History isShown={view === "chat"} />
      {problem && <p class="notice">{problem}</p>}
      <div class="foot">
        <button class="quiet" onClick={nextTheme}>
          {{ auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[chosenTheme]}
        </button>
        <button class="quiet" onClick={onKey}>
          API key
        </button>
        <button class="quiet" onClick={onShortcuts}>
          Keyboard
        </button>
      </div>
    </nav>
  );
}

function History({ isShown }: { isShown: boolean }) {
  const all = useStore(conversations);
  const current = useStore(currentId);
  const active = useStore(running);
  const sorted = Object.values(all).sort((a, b) => b.updated - a.updated);
  const open = (id: string) => {
    location.hash = "chat";
    select(id);
  };
  return (
    <div class="history">
      {groupByAge(sorted).map(([age, group]) => (
        <section key={age} aria-label={age}>
          <h2>{age}</h2>
          <ul>
            {group.map(({ id, title }) => (
              <li key={id} class={id in active ? "busy" : undefined}>
                <button aria-current={isShown && id === current ? "true" : undefined} onClick={() => open(id)}>
                  {title}
                </button>
                <button class="plain delete" aria-label={`Delete ${title}`} onClick={() => confirmRemoval(id, title)}>
                  ✕
                </button>
              </li>
            ))}
          </ul>
        </section>
      ))}
    </div>
  );
}

function confirmRemoval(id: string, title: string): void {
  if (!confirm(`Delete the conversation “${title}”?`)) return;
  stop(id);
  remove(id);
}

function groupByAge(sorted: Conversation[]): [string, Conversation[]][] {
  const today = new Date().setHours(0, 0, 0, 0);
  const day = 24 * 60 * 60 * 1000;
  const groups = new Map<string, Conversation[]>();
  for (const conversation of sorted) {
    const { updated } = conversation;
    const age = updated >= today ? "Today" : updated >= today - 6 * day ? "This week" : "Earlier";
    groups.set(age, [...(groups.get(age) ?? []), conversation]);
  }
  return [...groups];
}
