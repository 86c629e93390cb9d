import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { useStore } from "../shared/store";
import { theme } from "../shared/theme";

const HEIGHT = 150;

interface Series {
  label: string;
  values: (number | null)[];
}

interface Props {
  title: string;
  times: number[];
  series: Series[];
  format: (value: number | null) => string;
}

/** A chart of values over time. Its legend shows the values under the pointer, or the last ones. */
export function Chart({ title, times, series, format }: Props) {
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [hovered, setHovered] = useState<number | null>(null);
  const chosenTheme = useStore(theme);
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;

  useEffect(() => {
    const element = holder.current!;
    const style = getComputedStyle(element);
    const color = (name: string) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: color("--muted"),
      font: `11px ${style.fontFamily}`,
      grid: { stroke: color("--line"), width: 1 },
      ticks: { show: false },
    };
    plot.current = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { y: false, points: { size: 6 } },
        scales: { y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] } },
        axes: [
          { ...axis, grid: { show: false }, size: 26, space: 80, values: (_, splits) => splits.map(clock) },
          { ...axis, size: 58, values: (_, splits) => splits.map(format) },
        ],
        series: [
          {},
          ...series.map(({ label }, index) => ({
            label,
            stroke: color(`--series-${index + 1}`),
            width: 1.5,
            points: { show: false },
          })),
        ],
        hooks: { setCursor: [({ cursor }) => setHovered(cursor.idx ?? null)] },
      },
      data(times, series),
      element,
    );
    const resize = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: HEIGHT }));
    resize.observe(element);
    return () => {
      resize.disconnect();
      plot.current?.destroy();
    };
  }, [chosenTheme, isDark]);

  useEffect(() => plot.current?.setData(data(times, series)), [times]);

  const shown = hovered ?? times.length - 1;
  return (
    <figure class="chart">
      <figcaption>
        <h2>{title}</h2>
        <dl>
          {series.map(({ label, values }, index) => (
            <div key={label} class={`key-${index + 1}`}>
              <dt>{label}</dt>
              <dd>{format(values[shown] ?? null)}</dd>
            </div>
          ))}
        </dl>
      </figcaption>
      <div ref={holder} class="plot" role="img" aria-label={`${title} over time`} />
    </figure>
  );
}

function data(times: number[], series: Series[]): uPlot.AlignedData {
  return [times, ...series.map(({ values }) => values)];
}

function clock(time: number): string {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}
