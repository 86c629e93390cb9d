// Parse Prometheus metrics in the text format.

interface Sample {
  labels: Record<string, string>;
  value: number;
}

/** Cumulative counts by upper bound, in the order of the bounds. */
export type Buckets = [bound: number, count: number][];

export class Scrape {
  private readonly samples = new Map<string, Sample[]>();

  constructor(
    text: string,
    /** Seconds since 1970. */
    readonly time: number,
  ) {
    for (const line of text.split("\n")) {
      const match = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
      if (!match) continue;
      const labels: Record<string, string> = {};
      for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
        labels[name!] = value!.replace(/\\(.)/g, (_, character: string) => (character === "n" ? "\n" : character));
      }
      const sample = { labels, value: Number(match[3]) };
      const known = this.samples.get(match[1]!);
      if (known) known.push(sample);
      else this.samples.set(match[1]!, [sample]);
    }
  }

  all(name: string): Sample[] {
    return this.samples.get(`engine:${name}`) ?? [];
  }

  /** Return the sum of a metric over all replicas. */
  sum(name: string): number {
    return this.all(name).reduce((sum, { value }) => sum + value, 0);
  }

  /** Return the buckets of a histogram, summed over all replicas. */
  buckets(name: string): Buckets {
    const counts = new Map<number, number>();
    for (const { labels, value } of this.all(`${name}_bucket`)) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return [...counts].sort(([a], [b]) => a - b);
  }
}

/** Return the increase of a counter; null if it was reset because the server restarted. */
export function growth(before: Scrape, after: Scrape, name: string): number | null {
  const grown = after.sum(name) - before.sum(name);
  return grown < 0 ? null : grown;
}

/** Return a quantile of the values observed between two scrapes, as Prometheus estimates it; null if there are none. */
export function quantile(before: Scrape, after: Scrape, name: string, share: number): number | null {
  const earlier = new Map(before.buckets(name));
  const buckets: Buckets = after.buckets(name).map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = share * total;
  let low = 0;
  let below = 0;
  for (const [bound, count] of buckets) {
    if (count >= rank) {
      if (bound === Infinity) return low;
      return count === below ? bound : low + ((bound - low) * (rank - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return low;
}
