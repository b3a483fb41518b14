// The graph as SVG: frames, boxes, strips and lines, painted by the gradient.

import type { Card, Cell } from "./cards.ts";
import { cardOf, linesOf, NAME, nameIn, stripName, WORDS } from "./cards.ts";
import { s, set } from "./dom.ts";
import type { Facts, Paint } from "./facts.ts";
import type { Line, Place, Point, Scene } from "./layout.ts";
import { MEASURED, NONFINITE, NOT_MEASURED, OUTSIDE, ZERO } from "./reading.ts";
import { colourPlace, decadesOf, short, words } from "./scale.ts";
import type { Item, Seen } from "./tree.ts";
import { walk } from "./tree.ts";

export interface Asked {
  select(seen: Seen): void;
  toggle(seen: Seen): void;
  open(item: Item): void;
  hover(seen: Seen | null): void;
}

interface Drawn {
  place: Place;
  group: SVGGElement;
  back: SVGRectElement;
  stripes: SVGRectElement | null;
  lines: SVGTextElement[];
  texts: SVGTextElement[];
  cells: { cell: Cell; rect: SVGRectElement }[];
}

const BADGES = 4; // numbers of findings at one box
const [LEAST, MOST] = [1, 8]; // widths of a line
const PLAIN = 1.5; // decades around the neutral size within which a line has no colour
const DARK = 2; // decades from which a colour is dark enough for a line

const SPECIAL: Record<number, string> = {
  [ZERO]: "zero",
  [NONFINITE]: "nonfinite",
  [OUTSIDE]: "outside",
  [NOT_MEASURED]: "blind",
  [MEASURED]: "blind",
};

export class Graph {
  readonly drawn = new Map<string, Drawn>();
  private lines: { line: Line; path: SVGPathElement; way: SVGPathElement }[] = [];
  private readonly cards = new Map<string, Card>();
  selected: string | null = null;

  constructor(
    readonly layer: SVGGElement,
    private readonly facts: Facts,
    private readonly asked: Asked,
  ) {}

  card(seen: Seen): Card {
    const known = this.cards.get(seen.id);
    const key = seen.kind === "node" ? seen.id : `${seen.id}~${seen.kind}${seen.blocks.length}`;
    const found = (seen.kind === "node" ? known : this.cards.get(key)) ?? cardOf(seen, this.facts);
    this.cards.set(key, found);
    return found;
  }

  draw(root: Seen, scene: Scene): void {
    const before = new Map(this.drawn);
    this.drawn.clear();
    const frames: SVGElement[] = [];
    const boxes: SVGElement[] = [];
    walk(root, (seen) => {
      const made = this.drawnAt(scene.places.get(seen.id)!, before.get(seen.id));
      this.drawn.set(seen.id, made);
      (seen.kind === "frame" ? frames : boxes).push(made.group);
    });
    this.lines = scene.lines.map((line) => this.line(line));
    const lower = s("g", { "aria-hidden": "true" }, ...this.lines.flatMap(({ way, path }) => [way, path]));
    this.layer.replaceChildren(...frames, lower, ...boxes);
    for (const { line, path } of this.lines) this.paintLine(line, path);
    this.mark(this.selected);
  }

  /** What was drawn before stays, at its new place, unless it looks different now. */
  private drawnAt(place: Place, old: Drawn | undefined): Drawn {
    const { seen, x, y, width, height } = place;
    const alike = old && old.place.width === width && old.place.height === height;
    if (alike && old.place.seen.kind === seen.kind && old.place.seen.nodes.length === seen.nodes.length) {
      old.group.setAttribute("transform", `translate(${x},${y})`);
      old.place = place;
      return old;
    }
    if (seen.kind === "frame") return this.frame(place);
    const made = this.box(place);
    this.paintBox(made);
    return made;
  }

  // ---- making ------------------------------------------------------------------------------------------------

  private group(place: Place, name: string): SVGGElement {
    const { seen } = place;
    const opens = seen.kind === "box" || seen.kind === "strip";
    return s("g", {
      class: `seen ${seen.kind}`,
      transform: `translate(${place.x},${place.y})`,
      role: "treeitem",
      tabindex: -1,
      "data-id": seen.id,
      "aria-label": name,
      "aria-level": seen.level,
      "aria-expanded": seen.kind === "node" ? null : String(!opens),
      click: (event: MouseEvent) => {
        event.stopPropagation();
        this.asked.select(seen);
      },
      dblclick: (event: MouseEvent) => {
        event.stopPropagation();
        this.asked.toggle(seen);
      },
      mouseenter: () => this.asked.hover(seen),
      mouseleave: () => this.asked.hover(null),
    });
  }

  private frame(place: Place): Drawn {
    const { seen, width, height } = place;
    const back = s("rect", { width, height, rx: 10, class: "ground" });
    const parent = seen.item.parent;
    const name = short(nameIn(seen.item.name, parent), Math.max(8, Math.floor((width - 40) / 6.6)));
    const group = this.group(place, `${name}, ${seen.item.name}, ${seen.item.type}, open`);
    const text = s("text", { x: 26, y: 16, "font-size": 11, class: "faint" }, name);
    group.append(back, this.chevron(seen, true), text);
    this.badges(group, place);
    return { place, group, back, stripes: null, lines: [], texts: [], cells: [] };
  }

  private chevron(seen: Seen, opened: boolean): SVGGElement {
    const mark = s("path", { d: opened ? "M8 10l5 5 5-5" : "M10 8l5 5-5 5", class: "chevron" });
    return s(
      "g",
      {
        class: "toggle",
        click: (event: MouseEvent) => {
          event.stopPropagation();
          this.asked.toggle(seen);
        },
      },
      s("rect", { width: 25, height: 25, rx: 6, class: "catch" }),
      mark,
    );
  }

  private box(place: Place): Drawn {
    const { seen, width, height } = place;
    const card = this.card(seen);
    const group = this.group(place, "");
    if (card.plain || card.chip) return this.chip(place, card, group);
    const back = s("rect", { width, height, rx: 7, class: "back" });
    const stripes = s("rect", { width, height, rx: 7, class: "stripes", fill: "url(#stripes)" });
    const left = seen.kind === "node" ? 10 : 24;
    const name = s("text", { x: left, y: 16, "font-size": NAME, "font-weight": 600 }, card.name);
    const lines = [s("text", { x: 10, y: seen.kind === "node" ? 31 : 46, "font-size": WORDS })];
    const texts = [name, ...lines];
    group.append(back, stripes, name, " "); // spaces, so that words don't run together for those who listen
    if (card.type) {
      const [x, y, anchor] = seen.kind === "node" ? [width - 10, 16, "end"] : [10, 31, "start"];
      const type = s("text", { x, y, "font-size": WORDS, "text-anchor": anchor, opacity: 0.85 }, card.type);
      texts.push(type);
      group.append(type, " ");
    }
    if (seen.kind !== "node") group.append(this.chevron(seen, false));
    group.append(...lines, " ");
    const cells = card.cells.map((cell) => this.cell(cell, seen, group));
    this.badges(group, place);
    return { place, group, back, stripes, lines, texts, cells };
  }

  /** The model's output, and what needs no gradient. */
  private chip(place: Place, card: Card, group: SVGGElement): Drawn {
    const { width, height } = place;
    const back = s("rect", { width, height, rx: 10, class: card.plain ? "catch" : "back blind" });
    const type = card.plain ? null : s("tspan", { class: "faint", dx: 4 }, card.type);
    const look = card.plain ? "faint" : "ink";
    group.append(back, s("text", { x: 10, y: 14.5, "font-size": WORDS, class: look }, card.name, " ", type));
    group.setAttribute("aria-label", `${card.name} ${card.type}`.trim());
    return { place, group, back, stripes: null, lines: [], texts: [], cells: [] };
  }

  private cell(cell: Cell, seen: Seen, group: SVGGElement): { cell: Cell; rect: SVGRectElement } {
    const { x, y, width, height, item } = cell;
    const rect = s("rect", { x: x + 10, y: y + 53, width, height, rx: item ? 2 : 0, class: item ? "cell" : "mini" });
    if (item) {
      rect.append(s("title", {}, ""));
      rect.addEventListener("click", (event) => {
        event.stopPropagation();
        this.asked.open(item);
      });
      if (this.facts.guilty(item.nodes).some((n) => this.facts.findings[n].severity !== "info"))
        rect.classList.add("guilty");
    } else if (seen.kind === "box") rect.setAttribute("pointer-events", "none");
    group.append(rect);
    return { cell, rect };
  }

  /** The numbers of the findings whose culprit is inside; of an open frame none, as the boxes in it have them. */
  private badges(group: SVGGElement, place: Place): void {
    if (place.seen.kind === "frame") return;
    const guilty = this.culprits(place.seen);
    guilty.slice(0, BADGES).forEach((n, at) => {
      const severity = this.facts.findings[n].severity;
      const [x, label] = [place.width - 6 - at * 19, String(n + 1)];
      const shape = s("circle", { cx: x, cy: -1, r: 9, class: `badge ${severity}` });
      const text = s("text", { x, y: 3, "text-anchor": "middle", "font-size": 10.5, class: "badge-words" }, label);
      group.append(shape, " ", text);
    });
    if (guilty.length > 0) group.classList.add("culprit");
  }

  /** Places of the errors and warnings that blame something inside. */
  private culprits(seen: Seen): number[] {
    return this.facts.guilty(seen.nodes).filter((n) => this.facts.findings[n].severity !== "info");
  }

  private line(line: Line): { line: Line; path: SVGPathElement; way: SVGPathElement } {
    const d = curve(line.points);
    const way = s("path", { d, class: "way" });
    const path = s("path", { d, class: "line", "marker-end": "url(#tip)" }, s("title", {}, ""));
    return { line, path, way };
  }

  // ---- painting: what changes with the step, the norm and the filter -----------------------------------------------

  paint(): void {
    for (const drawn of this.drawn.values()) if (drawn.place.seen.kind !== "frame") this.paintBox(drawn);
    for (const { line, path } of this.lines) this.paintLine(line, path);
  }

  private paintBox({ place, group, back, stripes, lines, texts, cells }: Drawn): void {
    const { seen } = place;
    if (lines.length === 0) return;
    const paint = this.facts.paint(seen.nodes);
    dress(back, paint);
    group.classList.toggle("nonfinite", paint.look === NONFINITE);
    stripes?.setAttribute("visibility", paint.striped ? "visible" : "hidden");
    for (const text of texts) set(text, { fill: paint.ink, class: paint.ink ? null : "ink" });
    const chevron = group.querySelector(".chevron");
    if (chevron) set(chevron, { stroke: paint.ink });
    const told = linesOf(seen, this.facts);
    lines.forEach((line, n) => {
      line.textContent = told[n] ?? "";
    });
    for (const { cell, rect } of cells) {
      const one = this.facts.paint(cell.nodes);
      dress(rect, one);
      if (cell.item)
        rect.firstChild!.textContent = `${cell.item.name}: ${this.facts.told(this.facts.outputs(cell.nodes))}`;
    }
    group.setAttribute("aria-label", this.spoken(seen, told));
  }

  /** What is read out: the words of the box as they are seen, then the whole name and what is wrong. */
  private spoken(seen: Seen, told: string[]): string {
    const card = this.card(seen);
    const guilty = this.culprits(seen);
    const bad = guilty.map((n) => `${this.facts.findings[n].severity} ${this.facts.findings[n].rule}`);
    const badges = guilty.slice(0, BADGES).map((n) => String(n + 1));
    const name = seen.kind === "strip" ? stripName(seen) : seen.item.name;
    const shown = [card.name, card.type, ...told, ...badges].filter(Boolean).join(" ");
    return [shown, name === card.name ? "" : name, ...bad].filter(Boolean).join(", ");
  }

  private paintLine(line: Line, path: SVGPathElement): void {
    const { look, value } = this.facts.flowing(line.edges);
    const first = line.edges[0];
    const words_ = value === null ? "" : `: ${this.facts.norm} ${words(value)}`;
    path.firstChild!.textContent = `${line.from.item.name} → ${line.to.item.name}${words_}${line.edges.length > 1 ? ` (${line.edges.length} uses)` : ""}`;
    path.classList.remove("zero", "nonfinite", "unknown", "plain");
    set(path, { stroke: null, "stroke-width": null });
    const rewritten = this.facts.flow.data.edges.rewritten[first] !== null;
    path.classList.toggle("rewritten", rewritten);
    if (look === NONFINITE || look === ZERO) path.classList.add(look === ZERO ? "zero" : "nonfinite");
    else if (look !== MEASURED || value === null || this.facts.comparing) {
      path.classList.add(this.facts.comparing || this.facts.flow.data.about.sites === "node" ? "plain" : "unknown");
    } else {
      const decades = decadesOf(value, this.facts.reference);
      path.setAttribute("stroke-width", String(Math.min(MOST, Math.max(LEAST, 3 + decades * 0.5)).toFixed(2)));
      // Near the neutral size a colour would be too bright for a line.
      if (Math.abs(decades) < PLAIN) return;
      const dark = Math.sign(decades) * Math.max(Math.abs(decades), DARK);
      path.setAttribute("stroke", this.facts.palette.colours[colourPlace(dark, this.facts.palette)]);
    }
  }

  // ---- marks ---------------------------------------------------------------------------------------------------

  mark(id: string | null): void {
    this.selected = id;
    for (const [name, drawn] of this.drawn) {
      drawn.group.classList.toggle("selected", name === id);
      drawn.group.setAttribute("aria-selected", String(name === id));
    }
  }

  hovered(id: string | null): void {
    for (const [name, drawn] of this.drawn) drawn.group.classList.toggle("hovered", name === id);
  }

  dim(kept: ((nodes: readonly number[]) => boolean) | null): void {
    for (const drawn of this.drawn.values()) {
      const out = kept !== null && drawn.place.seen.kind !== "frame" && !kept(drawn.place.seen.nodes);
      drawn.group.classList.toggle("dimmed", out);
    }
  }

  /** Marks the lines over which a way through the nodes goes. */
  way(pairs: ReadonlySet<string>): void {
    const { producer, consumer } = this.facts.flow.data.edges;
    for (const { line, way } of this.lines) {
      const on = line.edges.some((edge) => pairs.has(`${producer[edge]}>${consumer[edge]}`));
      way.classList.toggle("on", on);
    }
  }
}

function dress(rect: SVGRectElement, paint: Paint): void {
  const special = paint.fill === null;
  for (const name of Object.values(SPECIAL)) rect.classList.toggle(name, special && name === SPECIAL[paint.look]);
  set(rect, { fill: paint.fill });
}

/** A line through points with round corners. */
export function curve(points: Point[], round = 9): string {
  if (points.length < 2) return "";
  const p = (point: Point): string => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`;
  let d = `M${p(points[0])}`;
  for (let n = 1; n < points.length - 1; n++) {
    const [before, corner, after] = [points[n - 1], points[n], points[n + 1]];
    d += `L${p(towards(corner, before, round))}Q${p(corner)} ${p(towards(corner, after, round))}`;
  }
  return `${d}L${p(points[points.length - 1])}`;
}

/** A point on the way to another, at most half of it. */
function towards(from: Point, to: Point, most: number): Point {
  const length = Math.hypot(to.x - from.x, to.y - from.y);
  const share = length === 0 ? 0 : Math.min(most, length / 2) / length;
  return { x: from.x + (to.x - from.x) * share, y: from.y + (to.y - from.y) * share };
}
