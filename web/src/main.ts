// Where the page begins.

import { App } from "./app.ts";
import { controls } from "./controls.ts";
import { Flow, type Payload } from "./data.ts";
import { columnOf, readingOf } from "./reading.ts";
import { Series } from "./series.ts";
import { skeleton } from "./skeleton.ts";
import { time } from "./time.ts";

async function main(): Promise<void> {
  const payload = JSON.parse(document.getElementById("data")!.textContent!) as Payload;
  const flow = new Flow(payload.flow);
  const parts = skeleton(document.getElementById("app")!, payload.flow, payload.flow.about.model);
  const reading = readingOf(flow);
  if (payload.before) reading.before = columnOf(payload.before);
  const before = payload.before_series ? await Series.make(payload.before_series, flow, reading, null) : null;
  const series = payload.series ? await Series.make(payload.series, flow, reading, before) : null;
  const app = new App(payload, flow, parts, reading, series);
  parts.empty.hidden = flow.count > 0;
  controls(app);
  time(app);
  app.start();
  new ResizeObserver(() => app.resize()).observe(parts.svg);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.repaint());
  document.documentElement.dataset.ready = "true";
}

void main();
