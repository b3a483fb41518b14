// The profile: norm against depth, beside the graph, inputs at the top. Linked with the graph both ways.

import type { Facts } from "./facts.ts";
import { MEASURED, NONFINITE, ZERO } from "./reading.ts";
import { decadesOf, power, words } from "./scale.ts";

export interface Linked {
  pick(node: number): void;
  hover(node: number | null): void;
}

const PAD = { left: 10, right: 10, top: 26, bottom: 8 };

interface Dot {
  site: number;
  node: number;
  decades: number; // of the norm itself
  look: number;
}

export class Profile {
  private dots: Dot[] = [];
  private low = -1;
  private high = 1;
  private range: readonly number[] = [];
  private chosen: readonly number[] = [];
  private size = { width: 0, height: 0 };

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly tip: HTMLElement,
    private readonly facts: Facts,
    private readonly linked: Linked,
  ) {
    canvas.addEventListener("mousemove", (event) => this.over(event));
    canvas.addEventListener("mouseleave", () => this.leave());
    canvas.addEventListener("click", (event) => {
      const dot = this.near(event);
      if (dot) this.linked.pick(dot.node);
    });
  }

  /** Takes the size that it has now. */
  resize(): void {
    this.size = { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
    this.draw();
  }

  /** Reads the gradients again. */
  renew(): void {
    const { sites } = this.facts.reading;
    const { node } = this.facts.flow.data.sites;
    this.dots = [];
    for (let site = 0; site < node.length; site++) {
      const look = sites.look[site];
      if (look !== MEASURED && look !== NONFINITE && look !== ZERO) continue;
      const value = this.facts.value([site]);
      const decades = value === null || look !== MEASURED ? Number.NaN : decadesOf(value, 1);
      this.dots.push({ site, node: node[site], decades, look });
    }
    const fine = this.dots.map((dot) => dot.decades).filter(Number.isFinite);
    const reference = Math.log10(this.facts.reference);
    this.low = Math.floor(fine.reduce((a, b) => Math.min(a, b), reference) - 0.2);
    this.high = Math.ceil(fine.reduce((a, b) => Math.max(a, b), reference) + 0.2);
    this.draw();
  }

  /** Shows where something lies: what the mouse is on, or what is selected. */
  mark(nodes: readonly number[], selected: boolean): void {
    if (selected) this.chosen = nodes;
    else this.range = nodes;
    this.draw();
  }

  // ---- drawing -----------------------------------------------------------------------------------------------

  private x(decades: number): number {
    const held = Math.min(this.high, Math.max(this.low, decades));
    return PAD.left + ((held - this.low) / (this.high - this.low)) * (this.size.width - PAD.left - PAD.right);
  }

  private y(place: number): number {
    const room = this.size.height - PAD.top - PAD.bottom;
    return PAD.top + ((place + 0.5) / Math.max(1, this.dots.length)) * room;
  }

  draw(): void {
    const pen = this.canvas.getContext("2d");
    const { width, height } = this.size;
    if (pen === null || width === 0) return;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio)) this.canvas.width = Math.round(width * ratio);
    if (this.canvas.height !== Math.round(height * ratio)) this.canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.canvas);
    const colour = (name: string): string => style.getPropertyValue(name).trim();
    this.band(pen, this.range, colour("--hover"));
    this.band(pen, this.chosen, colour("--chosen"));
    this.grid(pen, colour);
    this.points(pen, colour);
  }

  private band(pen: CanvasRenderingContext2D, nodes: readonly number[], fill: string): void {
    if (nodes.length === 0) return;
    const own = new Set(nodes);
    let [first, last] = [-1, -1];
    this.dots.forEach((dot, n) => {
      if (!own.has(dot.node)) return;
      if (first < 0) first = n;
      last = n;
    });
    if (first < 0) return;
    pen.fillStyle = fill;
    const top = this.y(first - 0.5) - 1;
    pen.fillRect(0, top, this.size.width, Math.max(3, this.y(last + 0.5) + 1 - top));
  }

  private grid(pen: CanvasRenderingContext2D, colour: (name: string) => string): void {
    const { height, width } = this.size;
    const step = Math.max(1, Math.ceil((this.high - this.low) / (width / 34)));
    pen.font = "10px system-ui, sans-serif";
    pen.textAlign = "center";
    for (let tick = Math.ceil(this.low / step) * step; tick <= this.high; tick += step) {
      pen.fillStyle = colour("--grid");
      pen.fillRect(this.x(tick), PAD.top - 6, 1, height - PAD.top);
      pen.fillStyle = colour("--faint");
      if (this.x(tick) > 12 && this.x(tick) < width - 10) pen.fillText(power(tick), this.x(tick), PAD.top - 11);
    }
    pen.fillStyle = colour("--accent");
    pen.fillRect(this.x(Math.log10(this.facts.reference)), PAD.top - 6, 1, height - PAD.top);
  }

  private points(pen: CanvasRenderingContext2D, colour: (name: string) => string): void {
    pen.strokeStyle = colour("--line");
    pen.lineWidth = 1;
    pen.beginPath();
    let drawn = false;
    this.dots.forEach((dot, n) => {
      const fine = Number.isFinite(dot.decades);
      if (fine) pen[drawn ? "lineTo" : "moveTo"](this.x(dot.decades), this.y(n));
      drawn = fine;
    });
    pen.stroke();
    const radius = this.dots.length > 400 ? 1.6 : this.dots.length > 120 ? 2.4 : 3.4;
    this.dots.forEach((dot, n) => {
      const bad = dot.look !== MEASURED;
      const paint = this.facts.site(dot.site);
      pen.fillStyle = bad ? colour(dot.look === NONFINITE ? "--bad" : "--ink") : (paint.fill ?? colour("--faint"));
      pen.strokeStyle = colour("--edge");
      pen.lineWidth = 0.6;
      pen.beginPath();
      if (bad) pen.rect(PAD.left - 6, this.y(n) - 2, 6, 4);
      else pen.arc(this.x(dot.decades), this.y(n), radius, 0, 2 * Math.PI);
      pen.fill();
      if (this.dots.length <= 1500) pen.stroke();
    });
  }

  // ---- the mouse -----------------------------------------------------------------------------------------------

  private near(event: MouseEvent): Dot | null {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientY - box.top - PAD.top) / (this.size.height - PAD.top - PAD.bottom);
    return this.dots[Math.min(this.dots.length - 1, Math.max(0, Math.floor(share * this.dots.length)))] ?? null;
  }

  private over(event: MouseEvent): void {
    const dot = this.near(event);
    if (dot === null) return;
    this.linked.hover(dot.node);
    this.tip.textContent = `${this.facts.flow.siteName(dot.site)}: ${this.facts.told([dot.site])}`;
    this.tip.hidden = false;
    this.tip.style.top = `${event.clientY - this.canvas.getBoundingClientRect().top + 12}px`;
  }

  private leave(): void {
    this.tip.hidden = true;
    this.linked.hover(null);
  }

  /** In words, for those who don't see it. */
  get spoken(): string {
    const fine = this.dots.filter((dot) => Number.isFinite(dot.decades));
    if (fine.length === 0) return "Profile: no gradient was measured";
    const [first, last] = [fine[0], fine[fine.length - 1]];
    return `Profile of ${fine.length} values, norm against depth: ${words(10 ** last.decades)} near the loss, ${words(10 ** first.decades)} near the inputs`;
  }
}
