// Search and filters over the nodes, and ways through the graph.

import type { Flow } from "./data.ts";
import type { Facts } from "./facts.ts";
import { NONFINITE, NOT_MEASURED, ZERO } from "./reading.ts";
import { decadesOf } from "./scale.ts";

/** Nodes by name, module path, operation, class or file; the nearest to what was written come first. */
export class Search {
  private readonly texts: string[];

  constructor(private readonly flow: Flow) {
    const { key, target, path, type } = flow.data.nodes;
    this.texts = key.map((one, n) => {
      const words = [
        one,
        flow.op(n),
        flow.word(target[n]),
        flow.word(path[n]),
        flow.word(type[n]),
        flow.source(n) ?? "",
      ];
      return words.join("\n").toLowerCase();
    });
  }

  find(query: string, most = 50): number[] {
    const parts = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (parts.length === 0) return [];
    const found: { node: number; rank: number }[] = [];
    this.texts.forEach((text, node) => {
      if (parts.every((part) => text.includes(part))) found.push({ node, rank: this.rank(node, parts[0]) });
    });
    return found
      .sort((a, b) => a.rank - b.rank || a.node - b.node)
      .slice(0, most)
      .map((one) => one.node);
  }

  private rank(node: number, part: string): number {
    const key = this.flow.data.nodes.key[node].toLowerCase();
    if (key === part) return 0;
    const last = key.slice(Math.max(key.lastIndexOf("."), key.lastIndexOf("/")) + 1);
    return last.startsWith(part) ? 1 : key.includes(part) ? 2 : 3;
  }
}

export const FILTERS: [string, string][] = [
  ["", "everything"],
  ["vanishing", "2 decades below the loss side"],
  ["exploding", "2 decades above the loss side"],
  ["bad", "NaN or Inf"],
  ["zero", "exactly zero"],
  ["blind", "not measured"],
  ["culprit", "blamed by a finding"],
  ["rewritten", "rewritten by a rule"],
];

const FAR = 2;

/** Whether a box holds what a filter asks for; null: everything. */
export function filterOf(name: string, facts: Facts): ((nodes: readonly number[]) => boolean) | null {
  const { look } = facts.reading.sites;
  const value = (site: number): number => decadesOf(facts.value([site]) ?? Number.NaN, facts.reference);
  const any = (test: (site: number) => boolean) => (nodes: readonly number[]) =>
    nodes.some((node) => facts.flow.sitesOf[node].some(test));
  const tests: Record<string, (nodes: readonly number[]) => boolean> = {
    vanishing: any((site) => value(site) < -FAR),
    exploding: any((site) => value(site) > FAR),
    bad: any((site) => look[site] === NONFINITE),
    zero: any((site) => look[site] === ZERO),
    blind: any((site) => look[site] === NOT_MEASURED),
    culprit: (nodes) => facts.guilty(nodes).length > 0,
    rewritten: any((site) => facts.flow.data.sites.rewritten[site] !== null),
  };
  return tests[name] ?? null;
}

/** The shortest way of the gradient from the model's outputs back to a node, as nodes from the node on. */
export function wayBack(flow: Flow, from: number): number[] {
  const before = new Map<number, number>([[from, -1]]);
  const queue = [from];
  for (const node of queue) {
    if (flow.op(node) === "output" || flow.outOf[node].length === 0) return traced(before, node);
    for (const edge of flow.outOf[node]) {
      const next = flow.data.edges.consumer[edge];
      if (before.has(next)) continue;
      before.set(next, node);
      queue.push(next);
    }
  }
  return [from];
}

function traced(before: Map<number, number>, end: number): number[] {
  const found: number[] = [];
  for (let node = end; node !== -1; node = before.get(node) ?? -1) found.push(node);
  return found.reverse();
}

/** `producer>consumer` of neighbours on a way, whichever of the two comes first. */
export function pairsOf(way: readonly number[]): string[] {
  return way.slice(1).flatMap((node, n) => [`${way[n]}>${node}`, `${node}>${way[n]}`]);
}
