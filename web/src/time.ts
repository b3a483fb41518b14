// Time: a slider over the recorded events, play, what went wrong first, and a heat map of blocks by events.

import type { App } from "./app.ts";
import { clear, h } from "./dom.ts";
import { NONFINITE, ZERO } from "./reading.ts";
import { colourPlace, decadesOf, short, words } from "./scale.ts";
import type { Series } from "./series.ts";

const PLAYED = 240; // moments of one play, at most
const EVERY = 80; // milliseconds between two
const LINE = 11; // height of a line of the heat map

export function time(app: App): void {
  const { series } = app;
  if (series === null || series.count < 2) return;
  app.parts.time.hidden = false;
  const slider = h("input", {
    type: "range",
    min: 0,
    max: series.count - 1,
    value: series.at,
    "aria-label": "Recorded backward pass",
  });
  let waiting = 0;
  slider.addEventListener("input", () => {
    if (waiting !== 0) return;
    waiting = requestAnimationFrame(() => {
      waiting = 0;
      app.step(Number(slider.value));
    });
  });
  const label = h("output", { class: "moment" });
  const map = new HeatMap(app, series);
  const bad = series.data.bad[0];
  const first =
    bad === undefined
      ? null
      : h(
          "button",
          { type: "button", class: "first-bad", click: () => app.step(bad) },
          `First bad: ${series.nameAt(bad)}`,
        );
  const fold = h(
    "button",
    {
      type: "button",
      "aria-expanded": "true",
      click: () => {
        map.element.hidden = !map.element.hidden;
        fold.setAttribute("aria-expanded", String(!map.element.hidden));
        map.draw();
      },
    },
    "Heat map",
  );
  clear(app.parts.time, h("div", { class: "bar" }, player(app, series), slider, label, first, fold), map.element);
  app.on((change) => {
    slider.value = String(series.at);
    const all = series.data.left_out > 0 ? ` (${series.data.left_out} left out)` : "";
    label.textContent = `${series.nameAt(series.at)}, ${series.at + 1} of ${series.count}${all}`;
    slider.setAttribute("aria-valuetext", series.nameAt(series.at));
    if (change === "paint") map.draw();
  });
  window.addEventListener("resize", () => map.draw());
  map.draw();
}

function player(app: App, series: Series): HTMLElement {
  let timer = 0;
  const stop = (): void => {
    window.clearInterval(timer);
    timer = 0;
    button.textContent = "▶ Play";
  };
  const button = h(
    "button",
    {
      type: "button",
      click: () => {
        if (timer !== 0) return stop();
        if (series.at >= series.count - 1) app.step(0);
        const stride = Math.max(1, Math.ceil(series.count / PLAYED));
        button.textContent = "❚❚ Pause";
        timer = window.setInterval(() => {
          app.step(series.at + stride);
          if (series.at >= series.count - 1) stop();
        }, EVERY);
        return undefined;
      },
    },
    "▶ Play",
  );
  return button;
}

/** A line for each block, inputs at the top; a column for each event, or for several, of which the worst is shown. */
class HeatMap {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private painted = ""; // what the picture was made for
  private picture: HTMLCanvasElement | null = null;

  constructor(
    private readonly app: App,
    private readonly series: Series,
  ) {
    const { blocks } = series.data;
    const label = `Heat map of ${blocks.length} blocks by ${series.count} backward passes`;
    this.canvas = h("canvas", { role: "img", "aria-label": label, height: blocks.length * LINE });
    this.canvas.style.height = `${blocks.length * LINE}px`;
    const names = h("ol", { class: "names" }, ...blocks.map(({ name }) => h("li", { title: name }, short(name, 26))));
    this.element = h("div", { class: "heat" }, names, this.canvas);
    this.canvas.addEventListener("click", (event) => this.pick(event));
    this.canvas.addEventListener("mousemove", (event) => {
      const [line, at] = this.place(event);
      this.canvas.title = `${blocks[line].name}, ${series.nameAt(at)}: ${this.told(line, at)}`;
    });
  }

  draw(): void {
    const width = this.canvas.clientWidth;
    const pen = this.canvas.getContext("2d");
    if (this.element.hidden || width === 0 || pen === null) return;
    this.canvas.width = width;
    const wanted = `${this.app.facts.norm} ${width} ${getComputedStyle(document.body).backgroundColor}`;
    if (this.painted !== wanted) this.picture = this.paint(width);
    this.painted = wanted;
    pen.drawImage(this.picture!, 0, 0);
    pen.fillStyle = getComputedStyle(this.canvas).getPropertyValue("--accent");
    const { bad } = this.series.data;
    if (bad.length > 0) pen.fillRect((bad[0] / this.series.count) * width, 0, 1.5, this.canvas.height);
    pen.fillStyle = getComputedStyle(this.canvas).getPropertyValue("--ink");
    pen.fillRect(((this.series.at + 0.5) / this.series.count) * width - 1, 0, 2, this.canvas.height);
  }

  private paint(width: number): HTMLCanvasElement {
    const picture = h("canvas", { width, height: this.canvas.height });
    const pen = picture.getContext("2d")!;
    const style = getComputedStyle(this.canvas);
    const special = { bad: style.getPropertyValue("--bad"), zero: style.getPropertyValue("--ink") };
    const columns = Math.min(width, this.series.count);
    const { norm, palette } = this.app.facts;
    const references = this.series.references(norm);
    this.series.data.blocks.forEach(({ sites }, line) => {
      const values = this.series.joint(sites, norm);
      for (let column = 0; column < columns; column++) {
        const from = Math.floor((column * this.series.count) / columns);
        const to = Math.max(from + 1, Math.floor(((column + 1) * this.series.count) / columns));
        let worst = { far: -1, colour: "" };
        for (let event = from; event < to; event++) {
          const decades = decadesOf(values.norms[event], references[event]);
          const look = values.looks[event];
          if (look === NONFINITE) worst = { far: Number.POSITIVE_INFINITY, colour: special.bad };
          else if (look === ZERO && worst.far < 1e6) worst = { far: 1e6, colour: special.zero };
          else if (Number.isFinite(decades) && Math.abs(decades) > worst.far)
            worst = { far: Math.abs(decades), colour: palette.colours[colourPlace(decades, palette)] };
        }
        if (worst.far < 0) continue;
        pen.fillStyle = worst.colour;
        pen.fillRect((column * width) / columns, line * LINE, Math.ceil(width / columns), LINE - 1);
      }
    });
    return picture;
  }

  private place(event: MouseEvent): [number, number] {
    const box = this.canvas.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top) / LINE);
    const at = Math.floor(((event.clientX - box.left) / box.width) * this.series.count);
    const { blocks } = this.series.data;
    return [Math.min(blocks.length - 1, Math.max(0, line)), Math.min(this.series.count - 1, Math.max(0, at))];
  }

  private told(line: number, event: number): string {
    const values = this.series.joint(this.series.data.blocks[line].sites, this.app.facts.norm);
    return values.looks[event] === NONFINITE ? "NaN or Inf" : words(values.norms[event]);
  }

  private pick(event: MouseEvent): void {
    const [line, at] = this.place(event);
    this.app.step(at);
    const { name, sites } = this.series.data.blocks[line];
    const item = [...this.app.tree.byId.values()].find((one) => one.kind === "module" && one.name === name);
    const node = this.app.flow.data.sites.node[sites[sites.length - 1]];
    if (item) this.app.showItem(item);
    else this.app.go(node);
  }
}
