import type { Model } from "./models";
import type { Settings } from "./tree";

interface Props {
  settings: Settings;
  model: Model | undefined;
  onChange: (patch: Partial<Settings>) => void;
  onClose: () => void;
}

const NUMBERS: [keyof Settings, string, string][] = [
  ["temperature", "Temperature", "0 to 2"],
  ["top_p", "Top p", "0 to 1"],
  ["top_k", "Top k", "-1 for all"],
  ["min_p", "Min p", "0 to 1"],
  ["max_tokens", "Most tokens", "no limit"],
  ["seed", "Seed", "random"],
  ["presence_penalty", "Presence penalty", "-2 to 2"],
  ["frequency_penalty", "Frequency penalty", "-2 to 2"],
];

/** The settings of a conversation. For an empty field, the server's default applies. */
export function SettingsPanel({ settings, model, onChange, onClose }: Props) {
  const area = (name: "system" | "schema" | "tools", label: string, placeholder: string, rows: number) => (
    <label class="field">
      {label}
      <textarea
        rows={rows}
        class={name === "system" ? undefined : "code"}
        spellcheck={name === "system"}
        value={settings[name]}
        placeholder={placeholder}
        onInput={(event) => onChange({ [name]: event.currentTarget.value })}
      />
      {name !== "system" && <JsonProblem text={settings[name]} />}
    </label>
  );
  return (
    <aside class="settings" aria-label="Settings">
      <header>
        <h2>Settings</h2>
        <button class="plain" aria-label="Close settings" onClick={onClose}>
          ✕
        </button>
      </header>
      {area("system", "System prompt", "None", 4)}
      <div class="grid">
        {NUMBERS.map(([name, label, hint]) => (
          <label key={name} class="field">
            {label}
            <input
              inputmode="decimal"
              value={settings[name]}
              placeholder={hint}
              onInput={(event) => onChange({ [name]: event.currentTarget.value })}
            />
          </label>
        ))}
      </div>
      {model?.capabilities.includes("thinking") && (
        <label class="field">
          Reasoning
          <select
            value={settings.reasoning_effort}
            onChange={(event) => onChange({ reasoning_effort: event.currentTarget.value })}
          >
            <option value="">as the model does</option>
            {["none", "low", "medium", "high"].map((effort) => (
              <option key={effort}>{effort}</option>
            ))}
          </select>
        </label>
      )}
      {area("schema", "JSON schema of the answer", '{"type": "object", "properties": {…}}', 5)}
      {area("tools", "Tools", '[{"name": "weather", "parameters": {…}}]', 5)}
      <p class="muted">An empty field leaves the choice to the server. New conversations begin with these settings.</p>
    </aside>
  );
}

function JsonProblem({ text }: { text: string }) {
  if (!text.trim()) return null;
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return <span class="problem">{(error as Error).message}</span>;
  }
}
