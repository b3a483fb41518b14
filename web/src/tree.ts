// What can be opened: modules, parts and runs of equal blocks, as a tree over the nodes; and what of it is seen.

import type { Flow, RawItem } from "./data.ts";

export type Kind = "root" | "node" | "module" | "run" | "part";

export interface Item {
  id: string;
  kind: Kind;
  name: string;
  type: string;
  nodes: number[];
  children: Item[];
  parent: Item | null;
}

/** One thing that is drawn: a node, a closed box, a strip of closed blocks, or an open frame. */
export interface Seen {
  id: string;
  kind: "node" | "box" | "strip" | "frame";
  item: Item;
  nodes: number[];
  blocks: Item[];
  children: Seen[];
  level: number;
}

export class Tree {
  readonly root: Item;
  readonly byId = new Map<string, Item>();
  readonly leaf: Item[] = []; // by node
  private readonly own: Item[]; // what the model's own forward does

  constructor(private readonly flow: Flow) {
    this.root = { id: "", kind: "root", name: flow.data.about.model, type: "", nodes: [], children: [], parent: null };
    this.root.children = flow.data.tree.map((raw) => this.make(raw, this.root));
    this.root.nodes = this.root.children.flatMap((child) => child.nodes);
    this.own = this.root.children;
  }

  /** Puts what the model's own forward does into parts of so many items; 1: into none. Inputs and outputs stay out. */
  partition(size: number): void {
    for (const part of this.root.children) if (!this.own.includes(part)) this.byId.delete(part.id);
    this.root.children = [];
    let gathered: Item[] = [];
    const flush = (): void => {
      if (gathered.length > 0) this.root.children.push(gathered.length > 1 ? this.part(gathered) : gathered[0]);
      gathered = [];
    };
    for (const item of this.own) {
      item.parent = this.root;
      const end = item.kind === "node" && ["placeholder", "output"].includes(this.flow.op(item.nodes[0]));
      if (end || gathered.length >= size) flush();
      gathered.push(item);
      if (end) flush();
    }
    flush();
  }

  private part(children: Item[]): Item {
    const nodes = children.flatMap((child) => child.nodes);
    const type = [...new Set(children.map(kindOf))].slice(0, 3).join(", ");
    const item: Item = { id: "", kind: "part", name: span(children), type, nodes, children, parent: this.root };
    for (const child of children) child.parent = item;
    this.name(item);
    return item;
  }

  private make(raw: RawItem, parent: Item): Item {
    const item: Item = { id: "", kind: "node", name: "", type: "", nodes: [], children: [], parent };
    const inside = (raws: RawItem[]): void => {
      item.children = raws.map((one) => this.make(one, item));
      item.nodes = item.children.flatMap((child) => child.nodes);
    };
    if (typeof raw === "number" || Array.isArray(raw)) {
      item.nodes = typeof raw === "number" ? [raw] : raw;
      item.name = this.flow.data.nodes.key[item.nodes[0]];
      item.type = this.flow.kind(item.nodes[0]);
      for (const node of item.nodes) this.leaf[node] = item;
    } else if ("m" in raw) {
      inside(raw.c);
      Object.assign(item, { kind: "module", name: raw.m, type: raw.t });
    } else if ("r" in raw) {
      inside(raw.r);
      Object.assign(item, { kind: "run", name: span(item.children), type: kindOf(item.children[0]) });
    } else {
      inside(raw.g);
      const types = [...new Set(item.children.map(kindOf))];
      const type = types.length <= 3 ? types.join(", ") : `${item.nodes.length} values`;
      Object.assign(item, { kind: "part", name: span(item.children), type });
    }
    this.name(item);
    return item;
  }

  private name(item: Item): void {
    // Ids are parts of addresses and of keys whose parts a line end separates.
    const plain = (item.kind === "node" ? item.name : `${item.kind[0]}:${item.name}`).replace(/\p{Cc}/gu, "·");
    let id = plain;
    for (let n = 2; this.byId.has(id); n++) id = `${plain}#${n}`;
    item.id = id;
    this.byId.set(id, item);
  }

  /** All that has to be open for a node to be seen on its own. */
  above(item: Item): Item[] {
    const found: Item[] = [];
    for (let at = item.parent; at !== null && at.kind !== "root"; at = at.parent) if (at.kind !== "run") found.push(at);
    if (item.parent?.kind === "run") found.push(item);
    return found;
  }

  seen(open: ReadonlySet<string>): Seen {
    return this.frame(this.root, open, 0);
  }

  private frame(item: Item, open: ReadonlySet<string>, level: number): Seen {
    const children = item.children.flatMap((child) => this.shown(child, open, level + 1));
    return { id: item.id, kind: "frame", item, nodes: item.nodes, blocks: [], children, level };
  }

  private shown(item: Item, open: ReadonlySet<string>, level: number): Seen[] {
    if (item.kind === "node") return [simple(item, "node", level)];
    if (item.kind !== "run") return open.has(item.id) ? [this.frame(item, open, level)] : [simple(item, "box", level)];
    const found: Seen[] = [];
    let closed: Item[] = [];
    const flush = (): void => {
      if (closed.length === 1) found.push(...this.shown(closed[0], open, level));
      else if (closed.length > 1) found.push(strip(item, closed, level));
      closed = [];
    };
    for (const block of item.children) {
      if (!open.has(block.id)) {
        closed.push(block);
        continue;
      }
      flush();
      found.push(...this.shown(block, open, level));
    }
    flush();
    return found;
  }
}

function simple(item: Item, kind: "node" | "box", level: number): Seen {
  return { id: item.id, kind, item, nodes: item.nodes, blocks: [], children: [], level };
}

function strip(run: Item, blocks: Item[], level: number): Seen {
  const nodes = blocks.flatMap((block) => block.nodes);
  return { id: `${run.id}|${blocks[0].id}`, kind: "strip", item: run, nodes, blocks, children: [], level };
}

function kindOf(item: Item): string {
  return item.kind === "run" ? `${item.children.length} × ${item.type}` : item.type || item.name;
}

/** `layers.0 … layers.11`, the second without what both begin with. */
export function span(items: Item[]): string {
  const first = items[0].name.split(" … ")[0];
  const last = items[items.length - 1].name.split(" … ").pop() ?? "";
  if (first === last) return first;
  const cut = Math.max(first.lastIndexOf("."), first.lastIndexOf("/")) + 1;
  return `${first} … ${cut > 0 && last.startsWith(first.slice(0, cut)) ? last.slice(cut) : last}`;
}

/** Every drawn thing below `frame`, open frames included, in forward order. */
export function walk(frame: Seen, visit: (seen: Seen) => void): void {
  for (const child of frame.children) {
    visit(child);
    if (child.kind === "frame") walk(child, visit);
  }
}
