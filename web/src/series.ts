// A run: the norm of each value at each recorded backward pass.

import type { Flow, Norm, SeriesData } from "./data.ts";
import { Column, MEASURED, NONFINITE, type Reading, ZERO } from "./reading.ts";

const NAN = -32768;
const INF = 32767;
const NOTHING = -32767; // exactly zero
const MISSING = -32766;

export class Series {
  at: number;
  readonly count: number;
  private readonly row = new Map<number, number>(); // site -> row

  private constructor(
    readonly data: SeriesData,
    private readonly flow: Flow,
    private readonly full_: Reading,
    private readonly l2: Int16Array,
    private readonly most: Int16Array | null,
  ) {
    this.count = data.backward.length;
    this.at = data.shown;
    data.rows.forEach((site, row) => {
      this.row.set(site, row);
    });
  }

  static async make(data: SeriesData, flow: Flow, full: Reading): Promise<Series> {
    const l2 = await unpacked(data.l2_norm);
    const most = data.max_abs === null ? null : await unpacked(data.max_abs);
    return new Series(data, flow, full, l2, most);
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
      const code = from[row * this.count + event];
      if (code > MISSING && code < INF) found[event] = code / this.data.step - shift;
    }
    return found;
  }

  look(site: number, event: number): number | null {
    const row = this.row.get(site);
    if (row === undefined) return null;
    const code = this.l2[row * this.count + event];
    if (code === NAN || code === INF) return NONFINITE;
    return code === NOTHING ? ZERO : code === MISSING ? null : MEASURED;
  }

  /** The gradients at the event that is shown. */
  reading(): Reading {
    if (this.full) return this.full_;
    const { numel } = this.full_.sites;
    const sites = new Column(numel);
    for (const [site, row] of this.row) {
      const place = row * this.count + this.at;
      const look = this.look(site, this.at);
      if (look === null) continue;
      sites.look[site] = look;
      sites.l2[site] = decode(this.l2[place], this.data.step);
      if (this.most !== null) sites.max[site] = decode(this.most[place], this.data.step);
    }
    const edges = new Column(this.full_.edges.numel);
    return { sites, after: sites, edges, before: null };
  }

  nameAt(event: number): string {
    return `backward ${this.data.backward[event]}`;
  }

  get model(): Flow {
    return this.flow;
  }
}

function decode(code: number, step: number): number {
  if (code === NAN) return Number.NaN;
  if (code === INF) return Number.POSITIVE_INFINITY;
  return code === NOTHING ? 0 : code === MISSING ? Number.NaN : 10 ** (code / step);
}

async function unpacked(text: string): Promise<Int16Array> {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Int16Array(await new Response(stream).arrayBuffer());
}
