// What the Python side writes into the page, and the flow that is made of it.

export type Spelled = number | "NaN" | "Infinity" | "-Infinity" | null;
export type Norm = "l2_norm" | "rms" | "max_abs";
export type RawItem = number | number[] | { m: string; t: string; c: RawItem[] } | { r: RawItem[] } | { g: RawItem[] };

export interface Rewritten {
  rules: string;
  way: string;
  audit: string[];
}

export interface Finding {
  rule: string;
  severity: "error" | "warning" | "info";
  message: string;
  suggestion: string;
  at: string;
  source: string | null;
  nodes: number[];
  path: number[];
  evidence: Record<string, Spelled>;
  confidence: string;
  affected: string[];
  units: number[];
  explains: string[];
  backward: number | null;
}

export interface FlowData {
  about: {
    model: string;
    verdict: string;
    counts: string;
    loss: string;
    level: "norm" | "full" | "histogram";
    sites: "node" | "edge";
    backward: number;
    training: boolean;
    front_end: string;
    torch: string;
    fxgrad: string | null;
    loss_scale: Spelled;
    failed: string | null;
    reasons: Record<string, string>;
  };
  nodes: {
    key: string[];
    op: number[];
    target: number[];
    path: number[];
    type: number[];
    source: ([number, number] | null)[];
    constants: (Record<string, string> | null)[];
    parameters: (number[] | null)[];
  };
  sites: {
    node: number[];
    position: number[];
    shape: number[];
    dtype: number[];
    device: number[];
    statistics: number[];
    value: number[];
    derived: number[];
    rewritten: (Rewritten | null)[];
    after: number[];
  };
  edges: {
    producer: number[];
    site: number[];
    consumer: number[];
    argument: number[];
    statistics: number[];
    reason: number[];
    rewritten: (Rewritten | null)[];
  };
  parameters: {
    name: string[];
    shape: number[];
    dtype: number[];
    statistics: number[];
    value: number[];
    reason: number[];
    update: Spelled[];
  };
  spots: [number, string, number, number][];
  modules: [string, number, Spelled, Spelled, Spelled][];
  tree: RawItem[];
  findings: Finding[];
  not_checked: [string, string, string | null][];
  histogram: { lowest: number; ranges: Record<string, [number, number]> };
  statistics: Record<string, (Spelled | string | number[])[]>;
  words: string[];
}

export interface Palette {
  colours: string[];
  inks: string[];
  decades: number;
  striped: number;
}

export interface SeriesData {
  backward: number[];
  events: number; // codes of a row
  rows: number[]; // the sites whose course is told, by number
  step: number; // parts of a decade
  l2_norm: string; // gzip and base64 of int16, a row for each of `rows`
  max_abs: string | null;
  bad: number[]; // events with NaN or Inf, or whose backward pass raised
  shown: number; // the event whose flow is told in full
  left_out: number;
  blocks: { name: string; sites: number[] }[];
}

export interface BeforeData {
  numel: number[];
  l2_norm: Spelled[];
  max_abs: Spelled[];
  look: number[];
  gone: string[];
  new: number[];
  removed: string[];
  added: string[];
}

export interface Payload {
  format: number;
  verdict: string | null;
  theme: "auto" | "light" | "dark";
  norm: Norm;
  scale: "relative" | "absolute";
  palette: Palette;
  flow: FlowData;
  code: Record<string, Record<string, string>> | null;
  series?: SeriesData | null;
  before?: BeforeData | null;
  before_series?: SeriesData | null;
}

export function numberOf(spelled: Spelled | undefined): number | null {
  if (spelled === null || spelled === undefined) return null;
  return typeof spelled === "number" ? spelled : Number(spelled);
}

export interface Statistics {
  level: string;
  numel: number;
  l2: number;
  maxAbs: number | null;
  nan: number | null;
  inf: number | null;
  zero: number | null;
  all: [string, number][];
  histogram: number[] | null; // first bin that counts, then the counts
}

/** A flow with what is looked up often. */
export class Flow {
  readonly count: number;
  readonly sitesOf: number[][];
  readonly usesOf: number[][]; // by site: its edges
  readonly into: number[][]; // by node: edges that end there
  readonly outOf: number[][]; // by node: edges that begin there
  readonly spotsOf = new Map<number, [number, string, number, number][]>();

  constructor(readonly data: FlowData) {
    this.count = data.nodes.key.length;
    const lists = (length: number): number[][] => Array.from({ length }, () => []);
    this.sitesOf = lists(this.count);
    this.into = lists(this.count);
    this.outOf = lists(this.count);
    this.usesOf = lists(data.sites.node.length);
    data.sites.node.forEach((node, site) => {
      this.sitesOf[node].push(site);
    });
    data.edges.producer.forEach((producer, edge) => {
      this.outOf[producer].push(edge);
      this.into[data.edges.consumer[edge]].push(edge);
      const site = data.edges.site[edge];
      if (site >= 0) this.usesOf[site].push(edge);
    });
    for (const spot of data.spots) this.spotsOf.set(spot[0], [...(this.spotsOf.get(spot[0]) ?? []), spot]);
  }

  word(place: number): string {
    return this.data.words[place] ?? "";
  }

  op(node: number): string {
    return this.word(this.data.nodes.op[node]);
  }

  /** A module's class, or the name of what was called. */
  kind(node: number): string {
    if (this.op(node) === "call_module") return this.word(this.data.nodes.type[node]);
    const key = this.data.nodes.key[node];
    return key.slice(key.lastIndexOf("/") + 1).split("#")[0];
  }

  siteName(site: number): string {
    return this.data.nodes.key[this.data.sites.node[site]] + this.word(this.data.sites.position[site]);
  }

  source(node: number): string | null {
    const source = this.data.nodes.source[node];
    return source === null ? null : `${this.word(source[0])}:${source[1]}`;
  }

  row(place: number): Statistics | null {
    if (place < 0) return null;
    const table = this.data.statistics;
    const get = (name: string): number | null => numberOf(table[name]?.[place] as Spelled | undefined);
    const all: [string, number][] = [];
    for (const name of Object.keys(table)) {
      const value = name === "level" || name === "histogram" ? null : get(name);
      if (value !== null) all.push([name, value]);
    }
    return {
      level: String(table.level[place]),
      numel: get("numel") ?? 0,
      l2: get("l2_norm") ?? 0,
      maxAbs: get("max_abs"),
      nan: get("nan_count"),
      inf: get("inf_count"),
      zero: get("zero_count"),
      all,
      histogram: (table.histogram?.[place] as number[] | null | undefined) ?? null,
    };
  }
}
