import { useEffect } from "preact/hooks";
import { number, percent, seconds } from "../shared/format";
import { useStore } from "../shared/store";
import { Chart } from "./Chart";
import { KvCaches } from "./KvCaches";
import { Processes, Replicas } from "./Processes";
import { Timeline } from "./Timeline";
import { type Engine, type Point, SHARES, engine, watchEngine } from "./watch";

export function EngineView() {
  useEffect(watchEngine, []);
  const state = useStore(engine);
  const { points } = state;
  const times = points.map(({ time }) => time);
  const line = (label: string, value: (point: Point) => number | null) => ({ label, values: points.map(value) });
  const percentiles = (of: (point: Point) => (number | null)[]) =>
    SHARES.map((share, index) => line(`p${share * 100}`, (point) => of(point)[index]!));
  return (
    <div class="engine">
      <header class="top">
        <h1 class="title">Engine</h1>
      </header>
      <div class="page" tabIndex={0} role="region" aria-label="State of the engine">
        {(state.problem || state.trouble) && (
          <p class="notice" role="alert">
            {state.problem || state.trouble}
          </p>
        )}
        <Figures state={state} />
        <section class="charts" aria-label="Over time">
          <Chart
            title="Tokens a second"
            times={times}
            format={number}
            series={[line("generated", (p) => p.generated), line("of prompts", (p) => p.prompted)]}
          />
          <Chart
            title="Requests"
            times={times}
            format={number}
            series={[line("running", (p) => p.running), line("waiting", (p) => p.waiting)]}
          />
          <Chart title="Time to first token" times={times} format={seconds} series={percentiles((p) => p.firstToken)} />
          <Chart title="Time between tokens" times={times} format={seconds} series={percentiles((p) => p.nextToken)} />
        </section>
        <Timeline recent={state.recent} problem={state.recentProblem} />
        <KvCaches caches={state.caches} />
        <Replicas replicas={state.replicas} />
        <Processes processes={state.processes} />
      </div>
    </div>
  );
}

function Figures({ state }: { state: Engine }) {
  const last = state.points.at(-1);
  const total = state.caches.reduce((sum, { blocks }) => sum + blocks, 0);
  const used = state.caches.reduce((sum, { usage, blocks }) => sum + usage * blocks, 0);
  const figures: [string, string, string][] = [
    ["Tokens a second", number(last?.generated), "generated"],
    ["Running", number(last?.running), "requests"],
    ["Waiting", number(last?.waiting), "in the queue"],
    ["KV cache", percent(total ? used / total : null), "in use"],
    ["Prefix hits", percent(last?.hitRate), "of prompts"],
    ["Drafts", percent(last?.accepted), "accepted"],
  ];
  return (
    <dl class="figures">
      {figures.map(([name, value, unit]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            {value} <small>{unit}</small>
          </dd>
        </div>
      ))}
    </dl>
  );
}
