// What is said of a box: the gradient that it receives, its gain, the worst, middle and last inside, its findings.

import type { Finding, Flow, Norm, Palette } from "./data.ts";
import { type Column, MEASURED, NONFINITE, NOT_MEASURED, OUTSIDE, type Reading, referenceOf, ZERO } from "./reading.ts";
import { colourPlace, decadesOf, words } from "./scale.ts";

export interface Paint {
  look: number;
  fill: string | null; // null: the look says it all
  ink: string | null;
  striped: boolean;
  decades: number | null;
}

export interface Inside {
  worst: number;
  middle: number;
  last: number;
}

export class Facts {
  norm: Norm = "l2_norm";
  relative = true;
  reference = 1;
  readonly blamed = new Map<number, number[]>(); // node -> places of the findings that blame it

  constructor(
    readonly flow: Flow,
    public reading: Reading,
    readonly palette: Palette,
    readonly findings: readonly Finding[],
  ) {
    findings.forEach((finding, place) => {
      for (const node of finding.nodes) this.blamed.set(node, [...(this.blamed.get(node) ?? []), place]);
    });
    this.renew();
  }

  get comparing(): boolean {
    return this.reading.before !== null;
  }

  renew(): void {
    this.reference = this.relative && !this.comparing ? referenceOf(this.flow, this.reading.sites, this.norm) : 1;
  }

  // ---- values -------------------------------------------------------------------------------------------------

  /** The values that somebody outside takes: what the nodes receive their gradient through. */
  outputs(nodes: readonly number[]): number[] {
    const own = new Set(nodes);
    const { consumer } = this.flow.data.edges;
    const all = nodes.flatMap((node) => this.flow.sitesOf[node]);
    const used = all.filter((site) => this.flow.usesOf[site].some((edge) => !own.has(consumer[edge])));
    return used.length > 0 || nodes.length > 1 ? used : all;
  }

  /** The number behind a colour: a norm, or in a comparison how many times as large it became. */
  value(sites: readonly number[]): number | null {
    const now = this.reading.sites.joint(sites, this.norm);
    if (this.reading.before === null || now === null) return now;
    const was = this.reading.before.joint(sites, this.norm);
    const both = was !== null && was > 0 && now > 0 && Number.isFinite(was) && Number.isFinite(now);
    return both ? now / was : null;
  }

  look(nodes: readonly number[], outputs: readonly number[]): number {
    const { look } = this.reading.sites;
    const inner = nodes.flatMap((node) => this.flow.sitesOf[node]);
    if (inner.some((site) => look[site] === NONFINITE)) return NONFINITE;
    const outer = outputs.length > 0 ? outputs : inner;
    return [MEASURED, OUTSIDE, ZERO].find((one) => outer.some((site) => look[site] === one)) ?? NOT_MEASURED;
  }

  paint(nodes: readonly number[]): Paint {
    const outputs = this.outputs(nodes);
    const look = this.look(nodes, outputs);
    const value = this.value(outputs);
    return this.painted(look, value);
  }

  painted(look: number, value: number | null): Paint {
    if (look !== MEASURED || value === null) return { look, fill: null, ink: null, striped: false, decades: null };
    const decades = decadesOf(value, this.reference);
    const place = colourPlace(decades, this.palette);
    const { colours, inks, striped } = this.palette;
    return { look, fill: colours[place], ink: inks[place], striped: decades > striped, decades };
  }

  site(site: number): Paint {
    return this.painted(this.reading.sites.look[site], this.value([site]));
  }

  /** The joint norm in words, and what is special about it. */
  told(sites: readonly number[]): string {
    const { look, l2 } = this.reading.sites;
    const measured = sites.filter((site) => look[site] !== NOT_MEASURED);
    if (measured.length === 0) return "not measured";
    const was = this.reading.before?.joint(sites, this.norm);
    const before = was === undefined ? "" : `${words(was)} → `;
    if (measured.some((site) => look[site] === NONFINITE)) return `${before}NaN or Inf`;
    if (measured.every((site) => look[site] === ZERO)) return `${before}0 (all zero)`;
    if (measured.every((site) => look[site] === OUTSIDE))
      return `${words(l2[measured[0]])} (${l2[measured[0]] === 0 ? "below" : "above"} float32's range)`;
    const now = words(this.reading.sites.joint(sites, this.norm));
    if (was === undefined) return now;
    const ratio = this.value(sites);
    return `${before}${now}${ratio === null ? "" : `, ×${words(ratio)}`}`;
  }

  // ---- what is inside -----------------------------------------------------------------------------------------

  /** The measured values inside, in forward order. */
  measured(nodes: readonly number[]): number[] {
    const { look } = this.reading.sites;
    return nodes.flatMap((node) => this.flow.sitesOf[node]).filter((site) => look[site] !== NOT_MEASURED);
  }

  /** How far a value is from what is neutral; more for zeros, most for NaN and Inf. */
  far(site: number): number {
    const look = this.reading.sites.look[site];
    if (look === NONFINITE) return Number.POSITIVE_INFINITY;
    if (look === ZERO) return 1e6;
    const value = this.value([site]);
    return value === null || look !== MEASURED ? -1 : Math.abs(decadesOf(value, this.reference));
  }

  /** In a comparison, how many decades a value moved; what began or ceased to be an ordinary number comes first. */
  moved(site: number): number {
    const { sites, before } = this.reading;
    if (before === null) return 0;
    const value = this.value([site]);
    if (sites.look[site] === MEASURED && before.look[site] === MEASURED && value !== null)
      return Math.abs(Math.log10(value));
    return sites.look[site] === before.look[site] ? 0 : Number.POSITIVE_INFINITY;
  }

  /** The worst value inside, the one in the middle by size, and the last, which lies nearest to the loss. */
  inside(nodes: readonly number[]): Inside | null {
    const sites = this.measured(nodes);
    if (sites.length === 0) return null;
    const worst = sites.reduce((one, two) => (this.far(two) > this.far(one) ? two : one));
    const sized = sites.map((site) => ({ site, size: this.reading.sites.value(site, this.norm) }));
    const sorted = sized.filter((one) => one.size >= 0).sort((a, b) => a.size - b.size);
    const middle = sorted[Math.floor((sorted.length - 1) / 2)]?.site ?? worst;
    return { worst, middle, last: sites[sites.length - 1] };
  }

  /** Places of the findings whose culprit is among the nodes, the worst first. */
  guilty(nodes: readonly number[]): number[] {
    const found = new Set<number>();
    for (const node of nodes) for (const place of this.blamed.get(node) ?? []) found.add(place);
    return [...found].sort((a, b) => a - b);
  }

  // ---- gains and lines ----------------------------------------------------------------------------------------

  /** What the nodes pass back to their inputs over what they received; null where that cannot be told. */
  gain(nodes: readonly number[], outputs: readonly number[]): number | null {
    const own = new Set(nodes);
    const { site: of, producer, consumer } = this.flow.data.edges;
    const { sites, edges, after } = this.reading;
    const passed: number[] = [];
    const done = new Set<number>();
    for (const edge of nodes.flatMap((node) => this.flow.into[node])) {
      const site = of[edge];
      if (own.has(producer[edge]) || site < 0 || done.has(site) || sites.look[site] === NOT_MEASURED) continue;
      done.add(site);
      const uses = this.flow.usesOf[site].filter((one) => own.has(consumer[one]));
      if (uses.length === this.flow.usesOf[site].length) passed.push(norm(sites, site));
      else if (uses.length === 1 && edges.look[uses[0]] !== NOT_MEASURED) passed.push(norm(edges, uses[0]));
      else return null;
    }
    const received = outputs.filter((site) => after.look[site] !== NOT_MEASURED).map((site) => norm(after, site));
    if (passed.length === 0 || received.length === 0) return null;
    const above = Math.hypot(...passed);
    const below = Math.hypot(...received);
    return Number.isFinite(above) && Number.isFinite(below) && below > 0 ? above / below : null;
  }

  /** What flows back over some uses: the parts where they were measured, the whole where a value has one use. */
  flowing(edges: readonly number[]): { look: number; value: number | null } {
    const { sites, edges: parts } = this.reading;
    let squares = 0;
    let entries = 0;
    let most = 0;
    let look = NOT_MEASURED;
    for (const edge of edges) {
      const site = this.flow.data.edges.site[edge];
      const alone = site >= 0 && this.flow.usesOf[site].length === 1;
      const [column, place] = parts.look[edge] !== NOT_MEASURED ? [parts, edge] : alone ? [sites, site] : [null, -1];
      if (column === null || column.look[place] === NOT_MEASURED) continue;
      if (column.look[place] === NONFINITE) return { look: NONFINITE, value: null };
      look = look === NOT_MEASURED || column.look[place] === MEASURED ? column.look[place] : look;
      squares = Math.hypot(squares, column.l2[place]);
      entries += column.numel[place];
      most = Math.max(most, column.max[place] || 0);
    }
    if (look === NOT_MEASURED) return { look, value: null };
    const rms = entries > 0 ? squares / Math.sqrt(entries) : 0;
    return { look, value: this.norm === "max_abs" ? most : this.norm === "rms" ? rms : squares };
  }
}

/** The l2 norm where it can be divided, else NaN. */
function norm(column: Column, place: number): number {
  return column.look[place] === NONFINITE || column.look[place] === OUTSIDE ? Number.NaN : column.l2[place];
}
