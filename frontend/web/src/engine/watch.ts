// The state of the engine, polled while the Engine view is open.
import { ApiError, apiKey, describeError, getJson, request } from "../shared/api";
import { Store } from "../shared/store";
import { Scrape, growth, quantile } from "./scrape";

const INTERVAL_MS = 2000;
/** Seconds over which percentiles are computed, because a single interval has few observations. */
const WINDOW_S = 15;
const MAX_POINTS = 450;

export interface Process {
  name: string;
  pid: number;
  stage: string;
  detail: string;
  epoch: number;
  num_restarts: number;
  silent_s: number;
  steps_per_s: number;
  num_running: number;
  num_waiting: number;
  kv_cache_usage: number;
  replica: number | null;
}

export interface Replica {
  replica: number;
  state: string;
  epoch: number;
  num_running: number;
  num_waiting: number;
  is_up: boolean;
}

/** Milliseconds since the arrival; null for events that have not occurred. */
export interface RecentRequest {
  id: string;
  lora: string | null;
  replica: number;
  age_ms: number;
  scheduled_ms: number | null;
  first_token_ms: number | null;
  last_token_ms: number | null;
  finished_ms: number | null;
  prompt_tokens: number;
  cached_tokens: number;
  generated_tokens: number;
  accepted_draft_tokens: number;
  preemptions: number;
  sequences: number;
  finish_reason: string | null;
}

export interface RecentRequests {
  can_explain: boolean;
  frontend: number;
  num_frontends: number;
  requests: RecentRequest[];
}

export interface KvCache {
  replica: string;
  usage: number;
  blocks: number;
  blockSize: number;
  /** A letter for every block, or every N-th of a large cache; empty if the server does not report it. */
  states: string;
}

/** One point in time. Rates are per second, shares since the server's start; null for values that were not observed. */
export interface Point {
  time: number;
  generated: number | null;
  prompted: number | null;
  firstToken: (number | null)[];
  nextToken: (number | null)[];
  running: number;
  waiting: number;
  hitRate: number | null;
  accepted: number | null;
}

export const SHARES = [0.5, 0.95, 0.99];

export interface Engine {
  points: Point[];
  caches: KvCache[];
  processes: Process[];
  trouble: string;
  replicas: Replica[];
  recent: RecentRequests | null;
  recentProblem: string;
  problem: string;
}

export const engine = new Store<Engine>({
  points: [],
  caches: [],
  processes: [],
  trouble: "",
  replicas: [],
  recent: null,
  recentProblem: "",
  problem: "",
});

let scrapes: Scrape[] = [];

/** Poll the engine's state until the returned function is called. */
export function watchEngine(): () => void {
  let timer = 0;
  let isOver = false;
  const turn = async () => {
    if (!document.hidden) await refresh();
    if (!isOver) timer = setTimeout(() => void turn(), INTERVAL_MS);
  };
  void turn();
  return () => {
    isOver = true;
    clearTimeout(timer);
  };
}

export async function refresh(): Promise<void> {
  const patch: Partial<Engine> = { problem: "" };
  const [metrics, status, replicas, recent, blocks] = await Promise.allSettled([
    request("metrics", { headers: { Accept: "text/plain" } }).then((response) => response.text()),
    getJson<{ processes: Process[]; trouble: string }>("engine/status"),
    getJson<{ replicas: Replica[] }>("replicas"),
    forOperators(() => getJson<RecentRequests>("debug/requests")),
    forOperators(() => getJson<{ replicas: { states: string }[] }>("debug/kv-cache")),
  ]);
  if (metrics.status === "fulfilled") {
    const scrape = new Scrape(metrics.value, Date.now() / 1000);
    patch.points = addPoint(engine.get().points, scrape);
    patch.caches = caches(scrape, blocks.status === "fulfilled" ? blocks.value.replicas : []);
  } else patch.problem = describeError(metrics.reason);
  if (status.status === "fulfilled") Object.assign(patch, { processes: status.value.processes, trouble: status.value.trouble });
  else if (!patch.problem) patch.problem = describeError(status.reason);
  if (replicas.status === "fulfilled") patch.replicas = replicas.value.replicas;
  if (recent.status === "fulfilled") Object.assign(patch, { recent: recent.value, recentProblem: "" });
  else Object.assign(patch, { recent: null, recentProblem: refusal?.error.message ?? "" });
  engine.update((before) => ({ ...before, ...patch }));
}

let refusal: { key: string; error: ApiError } | null = null;

/** Call an operator route. Do not call it again with a key that was rejected. */
async function forOperators<T>(call: () => Promise<T>): Promise<T> {
  const key = apiKey.get();
  if (refusal?.key === key) throw refusal.error;
  refusal = null;
  try {
    return await call();
  } catch (error) {
    if (error instanceof ApiError && error.status === 403) refusal = { key, error };
    throw error;
  }
}

function addPoint(points: Point[], scrape: Scrape): Point[] {
  const last = scrapes.at(-1);
  // After a pause, the rates of the first interval would be means over the whole pause.
  if (last && scrape.time - last.time > 5 * (INTERVAL_MS / 1000)) scrapes = [];
  const before = scrapes.at(-1) ?? scrape;
  const start = scrapes.find(({ time }) => scrape.time - time <= WINDOW_S) ?? scrape;
  const span = scrape.time - before.time;
  const rate = (name: string) => {
    const grown = growth(before, scrape, name);
    return span > 0 && grown !== null ? grown / span : null;
  };
  const share = (part: string, whole: string) => {
    const total = scrape.sum(whole);
    return total ? scrape.sum(part) / total : null;
  };
  const point: Point = {
    time: scrape.time,
    generated: rate("generation_tokens_total"),
    prompted: rate("prompt_tokens_total"),
    firstToken: SHARES.map((each) => quantile(start, scrape, "time_to_first_token_seconds", each)),
    nextToken: SHARES.map((each) => quantile(start, scrape, "inter_token_latency_seconds", each)),
    running: scrape.sum("num_requests_running"),
    waiting: scrape.sum("num_requests_waiting"),
    hitRate: share("prefix_cache_hits_total", "prefix_cache_queries_total"),
    accepted: share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
  };
  scrapes = [...scrapes.filter(({ time }) => scrape.time - time <= WINDOW_S), scrape];
  return [...points, point].slice(-MAX_POINTS);
}

function caches(scrape: Scrape, described: { states: string }[]): KvCache[] {
  const configs = new Map(scrape.all("cache_config_info").map(({ labels }) => [labels.engine, labels]));
  return scrape.all("kv_cache_usage_perc").map(({ labels, value }) => {
    const config = configs.get(labels.engine);
    return {
      replica: labels.engine ?? "",
      usage: value,
      blocks: Number(config?.num_gpu_blocks ?? 0),
      blockSize: Number(config?.block_size ?? 0),
      states: described[Number(labels.engine)]?.states ?? "",
    };
  });
}
