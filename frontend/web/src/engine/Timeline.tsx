import { useState } from "preact/hooks";
import { percent, plural, seconds } from "../shared/format";
import { explainRequest } from "./explained";
import type { RecentRequest, RecentRequests } from "./watch";

const SPANS_S = [30, 120, 600];
const MAX_ROWS = 40;

/** The phases of a request: each ends where the next one begins. */
export function phasesOf(request: RecentRequest): { name: string; label: string; start: number; end: number }[] {
  const end = request.finished_ms ?? request.age_ms;
  const scheduled = request.scheduled_ms ?? end;
  const first = request.first_token_ms ?? end;
  const last = request.first_token_ms === null ? end : request.finished_ms === null ? end : request.last_token_ms ?? end;
  return [
    { name: "queue", label: "waited", start: 0, end: scheduled },
    { name: "prefill", label: "prompt", start: scheduled, end: first },
    { name: "decode", label: "tokens", start: first, end: last },
  ];
}

/** The latest requests as bars on one time axis, which ends now. */
export function Timeline({ recent, problem }: { recent: RecentRequests | null; problem: string }) {
  const [span, setSpan] = useState(SPANS_S[1]!);
  const shown = (recent?.requests ?? [])
    .filter(({ age_ms, finished_ms }) => finished_ms === null || (age_ms - finished_ms) / 1000 < span)
    .sort((a, b) => a.age_ms - b.age_ms)
    .slice(0, MAX_ROWS);
  return (
    <section aria-label="Recent requests">
      <div class="heading">
        <h2>Recent requests</h2>
        <ul class="phases" aria-label="Colors">
          <li class="queue">waiting</li>
          <li class="prefill">computing the prompt</li>
          <li class="decode">generating</li>
        </ul>
        <label>
          <span class="hidden">Time span</span>
          <select value={span} onChange={(event) => setSpan(Number(event.currentTarget.value))}>
            {SPANS_S.map((each) => (
              <option key={each} value={each}>
                last {seconds(each)}
              </option>
            ))}
          </select>
        </label>
      </div>
      {problem && <p class="notice">{problem}</p>}
      {!problem && !shown.length && <p class="muted">No request ran in this time.</p>}
      <ol class="timeline">
        {shown.map((request) => (
          <Row key={request.id} request={request} spanMs={span * 1000} />
        ))}
      </ol>
      {recent && recent.num_frontends > 1 && (
        <p class="muted">
          These are the requests of frontend {recent.frontend}, one of {recent.num_frontends}.
        </p>
      )}
    </section>
  );
}

function Row({ request, spanMs }: { request: RecentRequest; spanMs: number }) {
  const place = (ms: number) => 100 * Math.min(1, Math.max(0, 1 - (request.age_ms - ms) / spanMs));
  const total = (request.finished_ms ?? request.age_ms) / 1000;
  const summary =
    `${plural(request.prompt_tokens, "prompt token")}, ` +
    `${percent(request.prompt_tokens ? request.cached_tokens / request.prompt_tokens : 0)} cached; ` +
    `${request.generated_tokens.toLocaleString("en")} generated`;
  return (
    <li>
      <button onClick={() => explainRequest(request.id)}>
        <span class="hidden">Why: </span>
        <code>{request.id.replace(/^(chat)?cmpl-/, "").slice(0, 8)}</code>
        <span class="bar">
          {phasesOf(request).map(({ name, start, end }) => {
            const left = place(start);
            return end > start && <i key={name} class={name} style={{ left: `${left}%`, width: `${place(end) - left}%` }} />;
          })}
        </span>
        <span class="summary">{summary}</span>
        <span class="total">
          {seconds(total)}
          {request.finish_reason === null && " …"}
        </span>
      </button>
    </li>
  );
}
