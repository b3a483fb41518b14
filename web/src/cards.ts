// What a box says, and how large it is for that.

import { widthOf } from "./dom.ts";
import type { Facts } from "./facts.ts";
import { NOT_MEASURED } from "./reading.ts";
import { short, words } from "./scale.ts";
import type { Item, Seen } from "./tree.ts";

const NONE = new Set(["integer", "no_grad_required", "no_grad_region"]);
export const NAME = 12.5;
export const WORDS = 11;
const ROOM = 34; // characters of a name
const CELL = { width: 13, height: 22, gap: 1.5, row: 24 };
const MINI = 36; // cells of the little profile in a closed box

export interface Cell {
  item: Item | null; // what a click opens
  nodes: number[];
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Card {
  chip: boolean; // one line, for what needs no gradient
  name: string;
  type: string;
  width: number;
  height: number;
  cells: Cell[];
  plain: boolean;
}

export function isPlain(seen: Seen, facts: Facts): boolean {
  return seen.kind === "node" && facts.flow.op(seen.nodes[0]) === "output";
}

/** Whether it has no gradient since it needs none: a mask, an index, a shape. */
function needsNone(seen: Seen, facts: Facts): boolean {
  if (
    seen.kind !== "node" ||
    facts.flow.sitesOf[seen.nodes[0]].some((site) => facts.reading.sites.look[site] !== NOT_MEASURED)
  )
    return false;
  const spots = facts.flow.spotsOf.get(seen.nodes[0]) ?? [];
  return spots.length > 0 && spots.every((spot) => NONE.has(facts.flow.word(spot[2])));
}

/** The name as seen from the frame around it. */
export function nameIn(name: string, frame: Item | null): string {
  let at = frame;
  while (at !== null && at.kind !== "module" && at.kind !== "root") at = at.parent;
  if (at === null || at.kind === "root" || !name.startsWith(at.name)) return name;
  const rest = name.slice(at.name.length);
  return rest.startsWith(".") || rest.startsWith("/") ? rest.slice(1) : name;
}

export function cardOf(seen: Seen, facts: Facts): Card {
  const frame = seen.kind === "strip" ? seen.item.parent : (seen.item.parent ?? null);
  const full = seen.kind === "strip" ? stripName(seen) : seen.item.name;
  const name = short(nameIn(full, frame), ROOM);
  if (isPlain(seen, facts))
    return { name: "output", type: "", width: 64, height: 22, cells: [], plain: true, chip: false };
  if (needsNone(seen, facts)) {
    const why = linesOf(seen, facts)[0];
    return {
      name,
      type: why,
      width: widthOf(`${name}  ${why}`, WORDS) + 22,
      height: 21,
      cells: [],
      plain: false,
      chip: true,
    };
  }
  const type = short(typeOf(seen, facts, name), ROOM);
  const cells = seen.kind === "strip" ? stripCells(seen) : seen.kind === "box" ? miniCells(seen) : [];
  const head = widthOf(name, NAME, true) + (seen.kind === "node" ? 0 : 14);
  const lines = [
    head + (seen.kind === "node" && type ? 8 + widthOf(type, WORDS) : 0),
    widthOf("0.000123 · gain 0.123", WORDS),
  ];
  if (seen.kind !== "node") lines.push(widthOf(type, WORDS), widthOf(WORST, WORDS));
  const strip = Math.max(0, ...cells.map((cell) => cell.x + cell.width));
  const rows = Math.max(0, ...cells.map((cell) => cell.y + cell.height));
  const height = seen.kind === "node" ? 38 : 60 + rows;
  return { name, type, width: Math.max(...lines, strip) + 20, height, cells, plain: false, chip: false };
}

const WORST = "worst 1.23e-12 · mid 1.23e-05 · last 0.0123";

function typeOf(seen: Seen, facts: Facts, name: string): string {
  if (seen.kind === "node") {
    const passing = seen.nodes.length > 1 ? ` +${seen.nodes.length - 1}` : "";
    const kind = facts.flow.op(seen.nodes[0]) === "call_module" ? facts.flow.kind(seen.nodes[0]) : "";
    return `${kind === name ? "" : kind}${passing}`.trim();
  }
  if (seen.kind === "strip") {
    const type = seen.blocks[0].type || seen.blocks[0].name;
    return `${seen.blocks.length} × ${type}`;
  }
  return `${seen.item.type} · ${seen.nodes.length} values`;
}

export function stripName(seen: Seen): string {
  const first = seen.blocks[0].name.split(" … ")[0];
  const last = seen.blocks[seen.blocks.length - 1].name.split(" … ")[0];
  const cut = Math.max(first.lastIndexOf("."), first.lastIndexOf("/")) + 1;
  return `${first} … ${cut > 0 && last.startsWith(first.slice(0, cut)) ? last.slice(cut) : last}`;
}

function stripCells(seen: Seen): Cell[] {
  return seen.blocks.map((item, n) => ({
    item,
    nodes: item.nodes,
    x: (n % CELL.row) * (CELL.width + CELL.gap),
    y: Math.floor(n / CELL.row) * (CELL.height + CELL.gap),
    width: CELL.width,
    height: CELL.height,
  }));
}

/** A little profile of what is inside, in forward order; several nodes share a cell where there are many. */
function miniCells(seen: Seen): Cell[] {
  const count = Math.min(MINI, seen.nodes.length);
  const width = Math.min(10, 220 / count);
  return Array.from({ length: count }, (_, n) => ({
    item: null,
    nodes: seen.nodes.slice(
      Math.round((n * seen.nodes.length) / count),
      Math.round(((n + 1) * seen.nodes.length) / count),
    ),
    x: n * width,
    y: 0,
    width,
    height: 7,
  }));
}

/** The lines below the name, which change with the step and the norm. */
export function linesOf(seen: Seen, facts: Facts): string[] {
  const outputs = facts.outputs(seen.nodes);
  if (seen.kind === "node") {
    const gain = facts.comparing ? null : facts.gain(seen.nodes, outputs);
    const told = facts.told(outputs);
    if (told === "not measured") return [reasonOf(seen, facts)];
    return [gain === null ? told : `${told} · gain ${words(gain)}`];
  }
  const inside = facts.inside(seen.nodes);
  if (inside === null) return ["not measured"];
  const one = (site: number): string => facts.told([site]).split(" (")[0].split(" or ")[0];
  if (facts.comparing) {
    const ratio = facts.value([inside.worst]);
    return [ratio === null ? facts.told([inside.worst]) : `most changed ×${words(ratio)}`];
  }
  return [`worst ${one(inside.worst)} · mid ${one(inside.middle)} · last ${one(inside.last)}`];
}

function reasonOf(seen: Seen, facts: Facts): string {
  const spot = facts.flow.spotsOf.get(seen.nodes[0])?.[0];
  return spot ? facts.flow.word(spot[2]).replaceAll("_", " ") : "not measured";
}
