import { useEffect, useState } from "preact/hooks";
import { describeError, getJson } from "../shared/api";
import { Dialog } from "../shared/Dialog";
import { percent, seconds } from "../shared/format";
import { useStore } from "../shared/store";
import { explainRequest, explainedId } from "./explained";
import { phasesOf } from "./Timeline";
import type { RecentRequest, RecentRequests } from "./watch";

/** Shows why a request waited, how much of its prompt was cached, and where its time went. */
export function WhyDialog() {
  const id = useStore(explainedId);
  return id ? <Explanation key={id} id={id} /> : null;
}

function Explanation({ id }: { id: string }) {
  const [request, setRequest] = useState<RecentRequest | null>(null);
  const [timeline, setTimeline] = useState("");
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const load = async () => {
      const recent = await getJson<RecentRequests>("debug/requests");
      setRequest(recent.requests.find((each) => each.id === id) ?? null);
      if (!recent.can_explain) {
        setProblem("A server that was started with --dump-dir DIR also says what the request waited for, step by step.");
        return;
      }
      const { timelines } = await getJson<{ timelines: string[] }>(`debug/requests/${encodeURIComponent(id)}`);
      setTimeline(timelines.join("\n").trim());
    };
    load().catch((error) => setProblem(describeError(error)));
  }, [id]);
  return (
    <Dialog title="Why?" wide onClose={() => explainRequest("")}>
      <p class="muted">
        Request <code>{id}</code>
      </p>
      {request && <Facts request={request} />}
      {timeline && (
        <pre class="why" tabIndex={0}>
          {timeline}
        </pre>
      )}
      {!timeline && !problem && <p role="status">Reading the event logs of the cores …</p>}
      {problem && <p class="notice">{problem}</p>}
    </Dialog>
  );
}

function Facts({ request }: { request: RecentRequest }) {
  const { prompt_tokens, cached_tokens, generated_tokens, accepted_draft_tokens, preemptions } = request;
  const [queue, prefill, decode] = phasesOf(request).map(({ start, end }) => (end - start) / 1000);
  const facts: [string, string][] = [
    ["Waited", seconds(queue)],
    ["Computed the prompt", seconds(prefill)],
    ["Generated", seconds(decode)],
    ["Cached", `${cached_tokens} of ${prompt_tokens} (${percent(prompt_tokens ? cached_tokens / prompt_tokens : 0)})`],
    ["Tokens", String(generated_tokens)],
    ["From drafts", String(accepted_draft_tokens)],
    ["Preemptions", String(preemptions)],
    ["Replica", String(request.replica)],
    ["End", request.finish_reason ?? "still running"],
  ];
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
