// A run: the norm of each value at each recorded backward pass.

import type { Flow, Norm, SeriesData } from "./data.ts";
import { Column, MEASURED, NONFINITE, NOT_MEASURED, OUTSIDE, type Reading, ZERO } from "./reading.ts";

const NAN = -32768;
const INF = 32767;
const NOTHING = -32767; // exactly zero
const MISSING = -32766;
const BELOW = -32765; // 0 or Inf in float32
const ABOVE = -32764;
const RANKED = [2, 3, 0, 1, 4]; // looks: what of several is told

export class Series {
  at: number;
  readonly count: number;
  private readonly stride: number;
  private readonly row = new Map<number, number>(); // site -> row

  private constructor(
    readonly data: SeriesData,
    private readonly flow: Flow,
    private readonly full_: Reading,
    private readonly l2: Int16Array,
    private readonly most: Int16Array | null,
    private readonly before: Series | null,
  ) {
    this.count = data.backward.length;
    this.stride = data.events;
    this.at = data.shown;
    data.rows.forEach((site, row) => {
      this.row.set(site, row);
    });
  }

  static async make(data: SeriesData, flow: Flow, full: Reading, before: Series | null): Promise<Series> {
    const l2 = await unpacked(data.l2_norm);
    const most = data.max_abs === null ? null : await unpacked(data.max_abs);
    return new Series(data, flow, full, l2, most, before);
  }

  /** Whether what is shown is the flow that was kept with all its statistics. */
  get full(): boolean {
    return this.at === this.data.shown;
  }

  has(site: number): boolean {
    return this.row.has(site) && this.count > 1;
  }

  /** log10 of a norm at every event. */
  logs(site: number, norm: Norm): Float64Array {
    const found = new Float64Array(this.count).fill(Number.NaN);
    const row = this.row.get(site);
    const from = norm === "max_abs" ? this.most : this.l2;
    if (row === undefined || from === null) return found;
    const shift = norm === "rms" ? Math.log10(this.full_.sites.numel[site] || 1) / 2 : 0;
    for (let event = 0; event < this.count; event++) {
      const code = from[row * this.stride + event];
      if (code > ABOVE && code < INF) found[event] = code / this.data.step - shift;
    }
    return found;
  }

  look(site: number, event: number): number | null {
    const row = this.row.get(site);
    if (row === undefined) return null;
    const code = this.l2[row * this.stride + event];
    if (code === NAN || code === INF) return NONFINITE;
    if (code === BELOW || code === ABOVE) return OUTSIDE;
    return code === NOTHING ? ZERO : code === MISSING ? null : MEASURED;
  }

  /** The gradients at the event that is shown. */
  reading(): Reading {
    if (this.full) return this.full_;
    const sites = this.column(this.at);
    const edges = new Column(this.full_.edges.numel);
    return { sites, after: sites, edges, before: this.before?.column(this.at) ?? null };
  }

  private column(event: number): Column {
    const { numel } = this.full_.sites;
    const sites = new Column(numel);
    for (const [site, row] of this.row) {
      const place = row * this.stride + event;
      const look = this.look(site, event);
      if (look === null) continue;
      sites.look[site] = look;
      sites.l2[site] = decode(this.l2[place], this.data.step);
      if (this.most !== null) sites.max[site] = decode(this.most[place], this.data.step);
    }
    return sites;
  }

  /** The joint norm and the look of several values at every event. */
  joint(sites: readonly number[], norm: Norm): { norms: Float64Array; looks: Uint8Array } {
    const norms = new Float64Array(this.count);
    const looks = new Uint8Array(this.count).fill(NOT_MEASURED);
    let entries = 0;
    for (const site of sites) {
      const row = this.row.get(site);
      if (row === undefined) continue;
      entries += this.numel[site];
      for (let event = 0; event < this.count; event++) {
        const look = this.look(site, event);
        if (look === null) continue;
        looks[event] = Math.min(RANKED[look], RANKED[looks[event]]) === RANKED[look] ? look : looks[event];
        const value = decode(
          (norm === "max_abs" && this.most ? this.most : this.l2)[row * this.stride + event],
          this.data.step,
        );
        norms[event] = norm === "max_abs" ? Math.max(norms[event], value) : Math.hypot(norms[event], value);
      }
    }
    if (this.before !== null) this.divide(norms, looks, this.before.joint(sites, norm));
    if (norm === "rms" && this.before === null && entries > 0)
      for (let event = 0; event < this.count; event++) norms[event] /= Math.sqrt(entries);
    return { norms, looks };
  }

  private divide(norms: Float64Array, looks: Uint8Array, by: { norms: Float64Array; looks: Uint8Array }): void {
    for (let event = 0; event < this.count; event++) {
      norms[event] /= by.norms[event];
      if (by.looks[event] !== MEASURED && looks[event] === MEASURED) looks[event] = NOT_MEASURED;
    }
  }

  /** What is neutral at every event: the norm of what the loss sent into the model, or 1. */
  references(norm: Norm): Float64Array {
    if (this.before !== null) return new Float64Array(this.count).fill(1);
    const { consumer } = this.flow.data.edges;
    const last = this.data.rows.filter((site) => {
      const uses = this.flow.usesOf[site];
      return uses.length > 0 && uses.every((edge) => this.flow.op(consumer[edge]) === "output");
    });
    return this.joint(last.length > 0 ? last : this.data.rows.slice(-1), norm).norms.map((one) =>
      one > 0 && Number.isFinite(one) ? one : 1,
    );
  }

  nameAt(event: number): string {
    return `backward ${this.data.backward[event]}`;
  }

  private get numel(): Float64Array {
    return this.full_.sites.numel;
  }
}

function decode(code: number, step: number): number {
  if (code === NAN) return Number.NaN;
  if (code === INF) return Number.POSITIVE_INFINITY;
  if (code === ABOVE) return Number.POSITIVE_INFINITY;
  return code === NOTHING || code === BELOW ? 0 : code === MISSING ? Number.NaN : 10 ** (code / step);
}

async function unpacked(text: string): Promise<Int16Array> {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = bytes.length / 2;
  const found = new Int16Array(count);
  for (let n = 0; n < count; n++) found[n] = bytes[n] | (bytes[count + n] << 8); // the lower bytes come first
  return found;
}
