// Flows made by hand: a chain of functions inside of nested modules.

import { Flow, type FlowData, type RawItem } from "../src/data.ts";

export const PALETTE = {
  colours: Array.from({ length: 13 }, (_, n) => `#0000${(n + 16).toString(16)}`),
  inks: Array.from({ length: 13 }, () => "#ffffff"),
  decades: 6,
  striped: 0.5,
};

/** Nodes 0 … n-1 in a row, the last of them the output; `norms` of their values; more edges as pairs. */
export function flowOf(norms: (number | null)[], tree: RawItem[], more: [number, number][] = []): Flow {
  const count = norms.length + 1;
  const range = Array.from({ length: count }, (_, n) => n);
  const pairs = [...range.slice(1).map((n): [number, number] => [n - 1, n]), ...more];
  const zero = (length: number): number[] => new Array<number>(length).fill(0);
  const none = (length: number): null[] => new Array<null>(length).fill(null);
  const measured = norms.map((norm, n) =>
    norm === null ? -1 : norms.slice(0, n).filter((one) => one !== null).length,
  );
  const fine = norms.filter((norm) => norm !== null);
  const data: FlowData = {
    about: {
      model: "Net",
      verdict: "",
      counts: "",
      loss: "",
      level: "full",
      sites: "node",
      backward: 0,
      training: true,
      front_end: "eager",
      torch: "2",
      fxgrad: null,
      loss_scale: null,
      failed: null,
      reasons: {},
    },
    nodes: {
      key: range.map((n) => (n === count - 1 ? "output" : `net.op${n}`)),
      op: range.map((n) => (n === count - 1 ? 2 : 1)),
      target: zero(count),
      path: zero(count),
      type: zero(count),
      source: range.map((n) => [3, n + 1]),
      constants: none(count),
      parameters: none(count),
    },
    sites: {
      node: norms.map((_, n) => n),
      position: zero(norms.length),
      shape: zero(norms.length),
      dtype: zero(norms.length),
      device: zero(norms.length),
      statistics: measured,
      value: zero(norms.length).map(() => -1),
      derived: zero(norms.length).map(() => -1),
      rewritten: none(norms.length),
      after: zero(norms.length).map(() => -1),
    },
    edges: {
      producer: pairs.map(([one]) => one),
      site: pairs.map(([one]) => one),
      consumer: pairs.map(([, two]) => two),
      argument: zero(pairs.length),
      statistics: pairs.map(() => -1),
      reason: pairs.map(() => -1),
      rewritten: none(pairs.length),
    },
    parameters: { name: [], shape: [], dtype: [], statistics: [], value: [], reason: [], update: [] },
    spots: [],
    modules: [],
    tree,
    findings: [],
    not_checked: [],
    histogram: { lowest: -46, ranges: {} },
    statistics: {
      level: fine.map(() => "full"),
      numel: fine.map(() => 4),
      l2_norm: fine,
      max_abs: fine,
      nan_count: fine.map(() => 0),
      inf_count: fine.map(() => 0),
      zero_count: fine.map((one) => (one === 0 ? 4 : 0)),
    },
    words: ["", "call_function", "output", "net.py"],
  };
  return new Flow(data);
}

export const sizes = () => ({
  of: () => ({ width: 100, height: 40 }),
  column: 1e9,
  breaks: new Map<string, Set<number>>(),
  known: new Map(),
});
