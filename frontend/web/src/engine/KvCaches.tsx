import { percent } from "../shared/format";
import type { KvCache } from "./watch";

const CELLS = 120;

/** How full the KV cache of each replica is. The server reports the share of blocks in use, not which ones. */
export function KvCaches({ caches }: { caches: KvCache[] }) {
  return (
    <section aria-label="KV cache">
      <h2>KV cache</h2>
      {caches.map(({ replica, usage, blocks, blockSize }) => {
        const cells = Math.min(CELLS, Math.max(blocks, 1));
        const used = Math.round(usage * blocks);
        const filled = usage > 0 ? Math.max(1, Math.round(usage * cells)) : 0;
        return (
          <div key={replica} class="kv">
            <p>
              Replica {replica}: {used.toLocaleString("en")} of {blocks.toLocaleString("en")} blocks in use (
              {percent(usage)}), of {blockSize} tokens each
            </p>
            <div class="cells" role="img" aria-label={`${percent(usage)} of the KV cache is in use`}>
              {Array.from({ length: cells }, (_, index) => (
                <i key={index} class={index < filled ? "used" : undefined} />
              ))}
            </div>
          </div>
        );
      })}
      <p class="muted">
        A cell stands for an equal share of the blocks; the filled ones show how many are in use, not where. Cached
        prefixes that no request uses count as free.
      </p>
    </section>
  );
}
