// The color theme: light or dark, from the system's setting or the user's choice.
import { Store } from "./store";

const KEY = "engine.theme";
export type Theme = "auto" | "light" | "dark";
const NEXT: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };

const stored = localStorage.getItem(KEY);
export const theme = new Store<Theme>(stored === "light" || stored === "dark" ? stored : "auto");

function apply(): void {
  const chosen = theme.get();
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
}

theme.watch(apply);
apply();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme.set(theme.get()));

export function nextTheme(): void {
  const chosen = NEXT[theme.get()];
  localStorage.setItem(KEY, chosen);
  theme.set(chosen);
}
