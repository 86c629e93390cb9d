import { useEffect, useRef } from "preact/hooks";
import { percent } from "../shared/format";
import type { KvCache } from "./watch";

/** Letter of a block state -> the CSS custom property of its color. */
const STATES = [
  { letter: "s", label: "shared by several requests", color: "--series-3" },
  { letter: "u", label: "in use", color: "--decode" },
  { letter: "c", label: "cached", color: "--prefill" },
  { letter: ".", label: "empty", color: "--line" },
];
const GAP = 1;

/** The blocks of each replica's KV cache. Only operators may see which are used; others see how many. */
export function KvCaches({ caches }: { caches: KvCache[] }) {
  return (
    <section aria-label="KV cache">
      <div class="heading">
        <h2>KV cache</h2>
        <ul class="phases">
          {STATES.map(({ letter, label, color }) => (
            <li key={letter} style={{ "--phase": `var(${color})` }}>
              {label}
            </li>
          ))}
        </ul>
      </div>
      {caches.map(({ replica, usage, blocks, blockSize, states }) => (
        <div key={replica} class="kv">
          <p>
            Replica {replica}: {Math.round(usage * blocks).toLocaleString("en")} of {blocks.toLocaleString("en")} blocks
            in use ({percent(usage)}), of {blockSize} tokens each
          </p>
          {states && <BlockMap states={states} step={Math.ceil((blocks - 1) / states.length)} />}
        </div>
      ))}
      <p class="muted">Cached blocks belong to no request. A prompt that begins with their text takes them over; otherwise they make room.</p>
    </section>
  );
}

function BlockMap({ states, step }: { states: string; step: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => draw(canvas.current!, states), [states]);
  const counts = STATES.map(({ letter, label }) => `${states.split(letter).length - 1} ${label}`).join(", ");
  return (
    <>
      <canvas ref={canvas} class="blocks" role="img" aria-label={`Map of ${states.length} blocks: ${counts}`} />
      {step > 1 && <p class="muted">Each cell is one of {step} blocks.</p>}
    </>
  );
}

function draw(canvas: HTMLCanvasElement, states: string) {
  const size = states.length > 1024 ? 7 : 11;
  const width = canvas.clientWidth;
  const columns = Math.max(1, Math.floor((width + GAP) / size));
  const height = Math.ceil(states.length / columns) * size;
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d")!;
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  for (const { letter, color } of STATES) {
    context.fillStyle = style.getPropertyValue(color).trim();
    for (let index = states.indexOf(letter); index >= 0; index = states.indexOf(letter, index + 1)) {
      const row = Math.floor(index / columns);
      context.fillRect((index % columns) * size, row * size, size - GAP, size - GAP);
    }
  }
}
