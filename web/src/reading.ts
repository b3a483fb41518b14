// The gradients at one moment: a norm and a look for each value and each use, and what is neutral among them.

import { type BeforeData, type Flow, type Norm, numberOf, type Statistics } from "./data.ts";

export const MEASURED = 0;
export const ZERO = 1;
export const NONFINITE = 2;
export const OUTSIDE = 3;
export const NOT_MEASURED = 4;
export const LOOKS = ["measured", "zero", "nonfinite", "outside_range", "not_measured"] as const;

/** l2 norm, max_abs and look of many things. */
export class Column {
  readonly l2: Float64Array;
  readonly max: Float64Array;
  readonly look: Uint8Array;
  constructor(readonly numel: Float64Array) {
    this.l2 = new Float64Array(numel.length).fill(Number.NaN);
    this.max = new Float64Array(numel.length).fill(Number.NaN);
    this.look = new Uint8Array(numel.length).fill(NOT_MEASURED);
  }

  set(place: number, statistics: Statistics | null): void {
    this.look[place] = lookOf(statistics);
    if (statistics === null) return;
    this.l2[place] = statistics.l2;
    this.max[place] = statistics.maxAbs ?? Number.NaN;
  }

  value(place: number, norm: Norm): number {
    if (norm === "max_abs") return this.max[place];
    return norm === "rms" ? this.l2[place] / Math.sqrt(this.numel[place] || 1) : this.l2[place];
  }

  /** One number for several: l2 norm and rms over all entries, the largest of the `max_abs`; null where none is. */
  joint(places: readonly number[], norm: Norm): number | null {
    let squares = 0;
    let entries = 0;
    let most = 0;
    let known = false;
    for (const place of places) {
      if (this.look[place] === NOT_MEASURED) continue;
      known = true;
      squares = Math.hypot(squares, this.l2[place]);
      entries += this.numel[place];
      if (this.max[place] > most) most = this.max[place];
    }
    if (!known) return null;
    if (norm === "max_abs") return most;
    return norm === "rms" ? (entries > 0 ? squares / Math.sqrt(entries) : 0) : squares;
  }
}

export interface Reading {
  sites: Column;
  after: Column; // what went on from a value, where rewrite rules made something else of it
  edges: Column;
  before: Column | null; // the values of the flow that this one is compared with
}

/** The flow that this one is compared with, site by site. */
export function columnOf(before: BeforeData): Column {
  const made = new Column(Float64Array.from(before.numel));
  before.look.forEach((look, site) => {
    made.look[site] = look;
    made.l2[site] = numberOf(before.l2_norm[site]) ?? Number.NaN;
    made.max[site] = numberOf(before.max_abs[site]) ?? Number.NaN;
  });
  return made;
}

function lookOf(statistics: Statistics | null): number {
  if (statistics === null) return NOT_MEASURED;
  const { l2, nan, inf, zero, numel, level } = statistics;
  const counted = nan !== null && inf !== null;
  if (counted ? nan + inf > 0 : Number.isNaN(l2)) return NONFINITE;
  if (level === "norm" && numel > 0 && (l2 === 0 || !Number.isFinite(l2))) return OUTSIDE;
  return zero !== null && numel > 0 && zero === numel ? ZERO : MEASURED;
}

/** The flow as it was measured in full. */
export function readingOf(flow: Flow): Reading {
  const { sites, edges } = flow.data;
  const rows = new Map<number, Statistics | null>();
  const row = (place: number): Statistics | null => {
    if (!rows.has(place)) rows.set(place, flow.row(place));
    return rows.get(place) ?? null;
  };
  const column = (places: number[]): Column => {
    const made = new Column(Float64Array.from(places, (place) => row(place)?.numel ?? 0));
    places.forEach((place, at) => {
      made.set(at, row(place));
    });
    return made;
  };
  const after = sites.after.map((place, at) => (place >= 0 ? place : sites.statistics[at]));
  return { sites: column(sites.statistics), after: column(after), edges: column(edges.statistics), before: null };
}

/**
 * What is neutral: the norm of the values that nothing but the model's output takes, together; where none of them has
 * an ordinary one, that of the last value that has; 1 without any. The same as `scale_of` on the Python side.
 */
export function referenceOf(flow: Flow, sites: Column, norm: Norm): number {
  const fine = (site: number): boolean => {
    const value = sites.value(site, norm);
    return sites.look[site] !== NONFINITE && value > 0 && value < Number.POSITIVE_INFINITY;
  };
  const ordinary = [...sites.l2.keys()].filter(fine);
  const last = ordinary.filter((site) => {
    const uses = flow.usesOf[site];
    return uses.length > 0 && uses.every((edge) => flow.op(flow.data.edges.consumer[edge]) === "output");
  });
  const reference = sites.joint(last.length > 0 ? last : ordinary.slice(-1), norm);
  return reference !== null && reference > 0 && Number.isFinite(reference) ? reference : 1;
}
