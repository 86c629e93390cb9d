import { useState } from "preact/hooks";
import { describeError, postJson } from "../shared/api";
import { Dialog } from "../shared/Dialog";
import { percent, number, plural, seconds } from "../shared/format";
import { type Process, type Replica, refresh } from "./watch";

type Action = "drain" | "undrain" | "restart";

const CONSEQUENCES: Record<Action, string> = {
  drain: "It gets no new requests. Those that it has continue to their end.",
  undrain: "It gets new requests again.",
  restart: "It gets no new requests. When those that it has have ended, its processes are started anew.",
};

export function Replicas({ replicas }: { replicas: Replica[] }) {
  const [asked, setAsked] = useState<{ replica: number; action: Action } | null>(null);
  const canAct = replicas.length > 1;
  return (
    <section aria-label="Replicas">
      <h2>Replicas</h2>
      <div class="table" tabIndex={0}>
        <table>
          <thead>
            <tr>
              <th>Replica</th>
              <th>State</th>
              <th class="figure">Running</th>
              <th class="figure">Waiting</th>
              <th class="figure">Epoch</th>
              {canAct && <th>Change</th>}
            </tr>
          </thead>
          <tbody>
            {replicas.map(({ replica, state, is_up, num_running, num_waiting, epoch }) => (
              <tr key={replica}>
                <td>{replica}</td>
                <td>
                  <State good={is_up && state === "serving"}>{is_up ? state : "not up"}</State>
                </td>
                <td class="figure">{num_running}</td>
                <td class="figure">{num_waiting}</td>
                <td class="figure">{epoch}</td>
                {canAct && (
                  <td>
                    {(state === "serving" ? ["drain", "restart"] : ["undrain"]).map((action) => (
                      <button
                        key={action}
                        class="quiet"
                        onClick={() => setAsked({ replica, action: action as Action })}
                      >
                        {capitalize(action)} …
                      </button>
                    ))}
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {asked && <Confirmation {...asked} onClose={() => setAsked(null)} />}
    </section>
  );
}

function Confirmation({ replica, action, onClose }: { replica: number; action: Action; onClose: () => void }) {
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const act = async () => {
    setBusy(true);
    try {
      await postJson(`replicas/${replica}/${action}`);
      await refresh();
      onClose();
    } catch (error) {
      setProblem(describeError(error));
      setBusy(false);
    }
  };
  return (
    <Dialog title={`${capitalize(action)} replica ${replica}?`} onClose={onClose}>
      <p>{CONSEQUENCES[action]}</p>
      {problem && (
        <p class="notice" role="alert">
          {problem}
        </p>
      )}
      <div class="actions">
        <button class="quiet" onClick={onClose}>
          Cancel
        </button>
        <button class="primary" disabled={isBusy} onClick={() => void act()}>
          {capitalize(action)}
        </button>
      </div>
    </Dialog>
  );
}

export function Processes({ processes }: { processes: Process[] }) {
  return (
    <section aria-label="Processes">
      <h2>Processes</h2>
      <div class="table" tabIndex={0}>
        <table>
          <thead>
            <tr>
              <th>Process</th>
              <th>Stage</th>
              <th class="figure">Restarts</th>
              <th class="figure">PID</th>
              <th class="figure">Last sign</th>
              <th class="figure">Steps a second</th>
              <th class="figure">Running</th>
              <th class="figure">Waiting</th>
              <th class="figure">KV cache</th>
            </tr>
          </thead>
          <tbody>
            {processes.map((process) => {
              const isCore = process.name.startsWith("core");
              return (
                <tr key={process.name}>
                  <td>{process.name}</td>
                  <td title={process.detail}>
                    <State good={process.stage === "ready"}>{process.stage}</State>
                  </td>
                  <td class="figure">{process.num_restarts}</td>
                  <td class="figure">{process.pid}</td>
                  <td class="figure">{seconds(process.silent_s)}</td>
                  <td class="figure">{isCore ? number(process.steps_per_s) : ""}</td>
                  <td class="figure">{isCore ? process.num_running : ""}</td>
                  <td class="figure">{isCore ? process.num_waiting : ""}</td>
                  <td class="figure">{isCore ? percent(process.kv_cache_usage) : ""}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <p class="muted">{plural(processes.reduce((sum, each) => sum + each.num_restarts, 0), "restart")} since the start.</p>
    </section>
  );
}

function State({ good, children }: { good: boolean; children: string }) {
  return <span class={good ? "state good" : "state bad"}>{children}</span>;
}

function capitalize(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
