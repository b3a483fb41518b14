// Small charts: the histogram of exponents with the ranges of dtypes, and the course of a norm over steps.

import type { Flow, Statistics } from "./data.ts";
import { s } from "./dom.ts";
import { power, words } from "./scale.ts";

const WIDTH = 300;
const RANGES: [string, string][] = [
  ["float16", "fp16"],
  ["bfloat16", "bf16"],
  ["float8_e4m3fn", "fp8 e4m3"],
  ["float8_e5m2", "fp8 e5m2"],
];

/** Entries by exponent, and below it where each dtype would lose them; null without a histogram. */
export function histogram(statistics: Statistics, flow: Flow): SVGSVGElement | null {
  const counts = statistics.histogram;
  if (counts === null || counts.length < 2) return null;
  const { lowest, ranges } = flow.data.histogram;
  const [first, ...bars] = counts;
  const bins = 64;
  const x = (bin: number): number => 4 + (bin * (WIDTH - 8)) / bins;
  const place = (modulus: number): number => Math.min(bins, Math.max(0, Math.log2(modulus) - lowest + 1));
  const most = Math.max(...bars);
  const height = 70;
  const total = bars.reduce((sum, one) => sum + one, 0);
  const label = `Histogram of exponents, ${total} finite non-zero entries, most at 2^${lowest + first + bars.indexOf(most) - 1}`;
  const chart = s("svg", {
    viewBox: `0 0 ${WIDTH} ${height + 22 + RANGES.length * 13}`,
    class: "chart",
    role: "img",
    "aria-label": label,
  });
  bars.forEach((count, n) => {
    if (count === 0) return;
    const tall = Math.max(1.5, (count / most) * (height - 6));
    const bin = first + n;
    const from = bin === 0 ? "below" : `2^${lowest + bin - 1} and up`;
    chart.append(
      s(
        "rect",
        { x: x(bin), y: height - tall, width: (WIDTH - 8) / bins - 0.8, height: tall, class: "bar" },
        s("title", {}, `${from}: ${count}`),
      ),
    );
  });
  chart.append(s("path", { d: `M4 ${height}H${WIDTH - 4}`, class: "axis" }));
  for (let exponent = -40; exponent <= 10; exponent += 10) {
    chart.append(
      s(
        "text",
        { x: x(exponent - lowest + 1), y: height + 11, "font-size": 9, "text-anchor": "middle", class: "faint" },
        `2${power(exponent).slice(2) || "⁰"}`,
      ),
    );
  }
  RANGES.forEach(([name, shown], n) => {
    const [low, high] = ranges[name];
    const y = height + 22 + n * 13;
    const [left, right] = [x(place(low)), x(place(high))];
    chart.append(s("rect", { x: left, y: y - 4, width: Math.max(2, right - left), height: 4, rx: 2, class: "range" }));
    chart.append(
      s(
        "text",
        { x: Math.min(left + 3, WIDTH - 60), y: y + 7, "font-size": 8.5, class: "faint" },
        `${shown}: ${lost(counts, [place(low), place(high)])}`,
      ),
    );
  });
  return chart;
}

/** The share of entries in bins that are wholly outside of a range. */
function lost(counts: number[], [low, high]: [number, number]): string {
  const [first, ...bars] = counts;
  const total = bars.reduce((sum, one) => sum + one, 0);
  const share = (test: (bin: number) => boolean): number =>
    bars.reduce((sum, one, n) => sum + (test(first + n) ? one : 0), 0) / total;
  const under = share((bin) => bin + 1 <= low);
  const over = share((bin) => bin >= high);
  const told = [under > 0 ? `${words(under * 100)} % become 0` : "", over > 0 ? `${words(over * 100)} % overflow` : ""];
  return told.filter(Boolean).join(", ") || "all fit";
}

export interface Course {
  values: Float64Array; // log10 of the norm; NaN where it is no ordinary number
  at: number;
  label: string;
  pick(event: number): void;
}

/** A norm over the recorded events; a click goes to the event. */
export function course({ values, at, label, pick }: Course): SVGSVGElement {
  const height = 80;
  const fine = values.filter(Number.isFinite);
  const low = Math.floor(fine.length > 0 ? Math.min(...thin(fine)) : -1);
  const high = Math.max(low + 1, Math.ceil(fine.length > 0 ? Math.max(...thin(fine)) : 0));
  const x = (n: number): number => 30 + (n * (WIDTH - 36)) / Math.max(1, values.length - 1);
  const y = (value: number): number => 6 + ((high - value) * (height - 20)) / (high - low);
  const chart = s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "chart", role: "img", "aria-label": label });
  for (const tick of [low, high]) {
    chart.append(s("path", { d: `M30 ${y(tick)}H${WIDTH - 6}`, class: "grid" }));
    chart.append(
      s("text", { x: 27, y: y(tick) + 3, "font-size": 9, "text-anchor": "end", class: "faint" }, power(tick)),
    );
  }
  let d = "";
  let drawn = false;
  const stride = Math.max(1, Math.floor(values.length / 1200));
  for (let n = 0; n < values.length; n += stride) {
    const good = Number.isFinite(values[n]);
    if (good) d += `${drawn ? "L" : "M"}${x(n).toFixed(1)} ${y(values[n]).toFixed(1)}`;
    drawn = good;
  }
  chart.append(s("path", { d, class: "course" }), s("path", { d: `M${x(at)} 4V${height - 12}`, class: "now" }));
  chart.addEventListener("click", (event) => {
    const box = chart.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width) * WIDTH;
    pick(Math.round(Math.min(1, Math.max(0, (share - 30) / (WIDTH - 36))) * (values.length - 1)));
  });
  return chart;
}

function thin(values: Float64Array): number[] {
  return Array.from(values.length > 50000 ? values.filter((_, n) => n % 8 === 0) : values);
}
