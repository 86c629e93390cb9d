// Numbers, durations and shares formatted for the user.

/** Return a number with at most three significant digits; "–" for an unknown one. */
export function number(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

/** Return a number of seconds as a duration with a suitable unit. */
export function seconds(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value < 1) return `${number(value * 1000)} ms`;
  if (value < 120) return `${number(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

/** Return a share between 0 and 1 as a percentage. */
export function percent(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  const shown = value * 100;
  return `${shown > 0 && shown < 10 ? Number(shown.toPrecision(2)) : Math.round(shown)} %`;
}

export function plural(count: number, noun: string): string {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
