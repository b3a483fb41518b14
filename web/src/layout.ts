// Where everything lies: each open frame is laid out by itself by dagre, and is one box to the frame around it.
//
// So a layout is always small, opening a box moves what is around it no more than its new size asks for, and a line
// that crosses borders does so at one point of each.

import dagre from "@dagrejs/dagre";
import type { Flow } from "./data.ts";
import type { Seen } from "./tree.ts";

export interface Point {
  x: number;
  y: number;
}

export interface Place {
  seen: Seen;
  x: number; // left
  y: number; // top
  width: number;
  height: number;
}

export interface Line {
  id: string;
  edges: number[];
  from: Seen;
  to: Seen;
  points: Point[];
}

export interface Scene {
  places: Map<string, Place>;
  lines: Line[];
  width: number;
  height: number;
}

export interface Sizes {
  of(seen: Seen): { width: number; height: number };
  column: number; // height from which a frame is broken into columns
  breaks: Map<string, Set<number>>; // by frame: the first nodes of what begins a column
  known: Map<string, { content: string; inner: Inner }>; // by frame: how it was laid out, for what was in it
}

const PAD = 14;
const HEAD = 24;
const GUTTER = 34;
const ROUND = 8; // of a box's corners
const LEAST = 0.3; // of the usual height of a column
// Names of what is no box begin with a character that no id has.
const TOP = "\u0001top";
const END = "\u0001end";
const IN = "\u0001in ";
const OUT = "\u0001out ";

interface Wire {
  id: string;
  edges: number[];
  from: Seen;
  to: Seen;
  hops: { frame: Seen; tail: string; head: string }[];
}

export interface Inner {
  width: number;
  height: number;
  boxes: Map<string, Place>; // of children and ports, relative to the frame
  paths: Map<string, Point[]>; // by tail and head
}

/** The layout of all that is seen. */
export function arrange(root: Seen, flow: Flow, sizes: Sizes): Scene {
  const wires = wiresOf(root, flow);
  const byFrame = new Map<string, Wire["hops"]>();
  for (const hop of wires.flatMap((wire) => wire.hops)) {
    const known = byFrame.get(hop.frame.id);
    if (known) known.push(hop);
    else byFrame.set(hop.frame.id, [hop]);
  }
  const inner = new Map<string, Inner>();
  const measure = (frame: Seen): Inner => {
    for (const child of frame.children) if (child.kind === "frame") measure(child);
    const hops = byFrame.get(frame.id) ?? [];
    const content = contentOf(frame, hops, inner, sizes);
    let found = sizes.known.get(frame.id);
    if (found?.content !== content) {
      found = { content, inner: inFrame(frame, hops, inner, sizes) };
      sizes.known.set(frame.id, found);
    }
    inner.set(frame.id, found.inner);
    return found.inner;
  };
  const whole = measure(root);
  const places = new Map<string, Place>();
  const settle = (frame: Seen, x: number, y: number): void => {
    const own = inner.get(frame.id)!;
    for (const child of frame.children) {
      const at = own.boxes.get(child.id)!;
      places.set(child.id, { ...at, x: at.x + x, y: at.y + y });
      if (child.kind === "frame") settle(child, at.x + x, at.y + y);
    }
  };
  settle(root, 0, 0);
  const lines = wires.map((wire) => lineOf(wire, inner, places));
  return { places, lines, width: whole.width, height: whole.height };
}

// ---- which line goes through which frames --------------------------------------------------------------------------

function wiresOf(root: Seen, flow: Flow): Wire[] {
  const home: Seen[] = [];
  const around = new Map<string, Seen[]>(); // frames around a thing, outermost first
  const visit = (frame: Seen, frames: Seen[]): void => {
    for (const child of frame.children) {
      around.set(child.id, frames);
      if (child.kind === "frame") visit(child, [...frames, child]);
      else for (const node of child.nodes) home[node] = child;
    }
  };
  visit(root, [root]);
  const wires = new Map<string, Wire>();
  flow.data.edges.producer.forEach((producer, edge) => {
    const from = home[producer];
    const to = home[flow.data.edges.consumer[edge]];
    if (!from || !to || from === to) return;
    const id = `${from.id}\n${to.id}`;
    const known = wires.get(id);
    if (known) known.edges.push(edge);
    else wires.set(id, { id, edges: [edge], from, to, hops: hopsOf(from, to, around) });
  });
  return [...wires.values()];
}

/** Out of the frames around the tail, over the frame that both are in, into those around the head. */
function hopsOf(from: Seen, to: Seen, around: Map<string, Seen[]>): Wire["hops"] {
  const one = around.get(from.id)!;
  const two = around.get(to.id)!;
  let shared = 0;
  while (shared + 1 < one.length && shared + 1 < two.length && one[shared + 1] === two[shared + 1]) shared++;
  const out = one.slice(shared + 1).reverse();
  const into = two.slice(shared + 1);
  const hops = out.map((frame, n) => ({ frame, tail: (out[n - 1] ?? from).id, head: OUT + from.id }));
  hops.push({ frame: one[shared], tail: (out.at(-1) ?? from).id, head: (into[0] ?? to).id });
  return hops.concat(into.map((frame, n) => ({ frame, tail: IN + from.id, head: (into[n + 1] ?? to).id })));
}

/** All that the layout of a frame depends on. */
function contentOf(frame: Seen, hops: Wire["hops"], inner: Map<string, Inner>, sizes: Sizes): string {
  const boxes = frame.children.map((child) => {
    const { width, height } = inner.get(child.id) ?? sizes.of(child);
    return `${child.id}\n${width}\n${height}`;
  });
  return [...boxes, ...hops.map((hop) => pair(hop.tail, hop.head))].join("\n");
}

// ---- one frame -----------------------------------------------------------------------------------------------------

function inFrame(frame: Seen, hops: Wire["hops"], inner: Map<string, Inner>, sizes: Sizes): Inner {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 22, ranksep: 24, marginx: 0, marginy: 0 });
  for (const child of frame.children) {
    const size = inner.get(child.id) ?? sizes.of(child);
    graph.setNode(child.id, { width: size.width, height: size.height });
  }
  for (const name of new Set(hops.flatMap((hop) => [hop.tail, hop.head]))) {
    if (graph.hasNode(name)) continue;
    graph.setNode(name, { width: 2, height: 0 });
    if (name.startsWith(IN)) hold(graph, TOP, name);
    else hold(graph, name, END);
  }
  for (const hop of hops) graph.setEdge(hop.tail, hop.head, {});
  dagre.layout(graph);
  const boxes = new Map<string, Place>();
  for (const name of graph.nodes()) {
    if (name === TOP || name === END) continue;
    const { x, y, width, height } = graph.node(name);
    const seen = frame.children.find((child) => child.id === name) ?? frame;
    boxes.set(name, { seen, x: x - width / 2, y: y - height / 2, width, height });
  }
  const paths = new Map<string, Point[]>();
  for (const edge of graph.edges()) {
    if (edge.v === TOP || edge.w === END) continue;
    const points = graph.edge(edge).points!.map(({ x, y }: Point) => ({ x, y }));
    const [tail, head] = [boxes.get(edge.v)!, boxes.get(edge.w)!];
    // Out of the lower border and into the upper one, never through a side.
    points[0] = { x: held(points[0].x, tail), y: tail.y + tail.height };
    points[points.length - 1] = { x: held(points[points.length - 1].x, head), y: head.y };
    paths.set(pair(edge.v, edge.w), points);
  }
  columns(frame, boxes, paths, sizes);
  return framed(frame, boxes, paths);
}

const held = (x: number, place: Place): number =>
  place.width < 2 * ROUND
    ? place.x + place.width / 2
    : Math.min(place.x + place.width - ROUND, Math.max(place.x + ROUND, x));

/** Values from outside come in at the top, and those for outside leave at the bottom. */
function hold(graph: InstanceType<typeof dagre.graphlib.Graph>, tail: string, head: string): void {
  graph.setNode(TOP, { width: 0, height: 0 });
  graph.setNode(END, { width: 0, height: 0 });
  graph.setEdge(tail, head, { weight: 4 });
}

const pair = (tail: string, head: string): string => `${tail}\n${head}`;

/**
 * Breaks what is too high into columns side by side, between two rows. Where a frame was broken once it stays broken, so
 * that opening something in it moves nothing to another column.
 */
function columns(frame: Seen, boxes: Map<string, Place>, paths: Map<string, Point[]>, sizes: Sizes): void {
  const rows = rowsOf([...boxes.values()]);
  const heads = sizes.breaks.get(frame.id) ?? breaksOf(rows, sizes.column);
  sizes.breaks.set(frame.id, heads);
  const begins = rows.map(
    (row, n) => n > 0 && row.places.some((place) => heads.has(place.seen.nodes[0]) && place.seen !== frame),
  );
  if (!begins.includes(true)) return;
  const moved = new Map<Place, Move>();
  let shift = 0;
  for (let start = 0, column = 0; start < rows.length; column++) {
    const next = begins.indexOf(true, start + 1);
    const end = next < 0 ? rows.length : next;
    const inside = rows.slice(start, end).flatMap((row) => row.places);
    const left = Math.min(...inside.map((place) => place.x));
    const right = Math.max(...inside.map((place) => place.x + place.width));
    for (const place of inside) moved.set(place, { dx: shift - left, dy: rows[0].top - rows[start].top, column });
    shift += right - left + GUTTER;
    start = end;
  }
  for (const [key, points] of paths) {
    const [tail, head] = key.split("\n").map((name) => boxes.get(name)!);
    const [one, two] = [moved.get(tail)!, moved.get(head)!];
    if (one.column === two.column) for (const point of points) Object.assign(point, at(point, one));
    else paths.set(key, around(at(points[0], one), at(points[points.length - 1], two), two, rows[0].top, boxes, moved));
  }
  for (const [place, by] of moved) Object.assign(place, at(place, by));
}

interface Move {
  dx: number;
  dy: number;
  column: number;
}

/** The first nodes of what begins a column: columns of about one height, none of them with next to nothing in it. */
function breaksOf(rows: Row[], most: number): Set<number> {
  const found = new Set<number>();
  const whole = rows.length > 0 ? rows[rows.length - 1].bottom - rows[0].top : 0;
  if (rows.length < 4 || whole <= most) return found;
  const aim = whole / Math.ceil(whole / most);
  let top = rows[0].top;
  rows.forEach((row, n) => {
    const above = n === 0 ? 0 : rows[n - 1].bottom - top;
    const left = rows[rows.length - 1].bottom - row.top;
    if (row.bottom - top <= aim * 1.12 || above < aim * LEAST || left < aim * LEAST) return;
    found.add(row.places[0].seen.nodes[0]);
    top = row.top;
  });
  return found;
}

const at = (point: Point, by: { dx: number; dy: number }): Point => ({ x: point.x + by.dx, y: point.y + by.dy });

/** Down out of one column, up the gutter to its right or left, and into another from above. */
function around(
  tail: Point,
  head: Point,
  into: { dx: number; column: number },
  top: number,
  boxes: Map<string, Place>,
  moved: Map<Place, Move>,
): Point[] {
  const inside = [...boxes.values()].filter((place) => moved.get(place)!.column === into.column);
  const gutter = Math.min(...inside.map((place) => place.x + into.dx)) - GUTTER / 2;
  const above = Math.min(top, head.y - 12) - (head.y - top > 30 ? 0 : 8);
  if (head.y - top > 30)
    return [
      tail,
      { x: tail.x, y: tail.y + 12 },
      { x: gutter, y: tail.y + 12 },
      { x: gutter, y: head.y - 12 },
      { x: head.x, y: head.y - 12 },
      head,
    ];
  return [
    tail,
    { x: tail.x, y: tail.y + 12 },
    { x: gutter, y: tail.y + 12 },
    { x: gutter, y: above },
    { x: head.x, y: above },
    head,
  ];
}

interface Row {
  top: number;
  bottom: number;
  places: Place[];
}

function rowsOf(places: Place[]): Row[] {
  const rows: Row[] = [];
  for (const place of [...places].sort((a, b) => a.y - b.y)) {
    const last = rows[rows.length - 1];
    if (last && place.y < last.bottom) {
      last.places.push(place);
      last.bottom = Math.max(last.bottom, place.y + place.height);
    } else rows.push({ top: place.y, bottom: place.y + place.height, places: [place] });
  }
  return rows;
}

/** Moves everything so that it begins behind the frame's name and border; ports lie on the borders. */
function framed(frame: Seen, boxes: Map<string, Place>, paths: Map<string, Point[]>): Inner {
  const root = frame.item.kind === "root";
  const points = [...paths.values()].flat();
  const all = [...boxes.values()];
  const inside = all.filter((place) => place.seen !== frame);
  const [pad, head] = root ? [0, 0] : [PAD, HEAD + 4];
  const low = (values: number[]): number => values.reduce((a, b) => Math.min(a, b), Number.POSITIVE_INFINITY);
  const high = (values: number[]): number => values.reduce((a, b) => Math.max(a, b), 0);
  const left = low([...all.map((place) => place.x), ...points.map((point) => point.x)]);
  const by = { dx: pad - left, dy: head - low(inside.map((place) => place.y)) };
  for (const one of [...all, ...points]) Object.assign(one, at(one, by));
  const name = root ? 0 : Math.min(260, 44 + frame.item.name.length * 6.5);
  const right = high([...all.map((place) => place.x + place.width), ...points.map((point) => point.x)]);
  const height = high(inside.map((place) => place.y + place.height)) + pad;
  if (!root) toBorders(boxes, paths, height);
  return { width: Math.max(name, right + pad), height, boxes, paths };
}

function toBorders(boxes: Map<string, Place>, paths: Map<string, Point[]>, height: number): void {
  for (const [name, place] of boxes) {
    if (name.startsWith(IN)) place.y = 0;
    else if (name.startsWith(OUT)) place.y = height;
  }
  for (const [key, points] of paths) {
    const [tail, head] = key.split("\n");
    // What dagre put above the first or below the last box has no room there any more.
    for (const point of points) point.y = Math.min(height - 4, Math.max(HEAD - 8, point.y));
    if (tail.startsWith(IN)) points.splice(0, 1, { x: boxes.get(tail)!.x + 1, y: 0 });
    if (head.startsWith(OUT)) points.splice(-1, 1, { x: boxes.get(head)!.x + 1, y: height });
  }
}

// ---- lines ---------------------------------------------------------------------------------------------------------

/** A path without its first point, which another one takes the place of: what went straight from there still does. */
function joined(path: Point[], port: Point): Point[] {
  const [first, ...rest] = path;
  return rest.length > 1 && rest[0].x === first.x ? [{ x: port.x, y: rest[0].y }, ...rest.slice(1)] : rest;
}

function lineOf(wire: Wire, inner: Map<string, Inner>, places: Map<string, Place>): Line {
  const points: Point[] = [];
  wire.hops.forEach(({ frame, tail, head }, n) => {
    const own = inner.get(frame.id)!;
    const origin = places.get(frame.id) ?? { x: 0, y: 0 };
    let path = (own.paths.get(pair(tail, head)) ?? []).map((point) => at(point, { dx: origin.x, dy: origin.y }));
    // Where a hop ends at an open frame, the next one begins at that frame's border, where its port is.
    if (n > 0 && !tail.startsWith(IN)) path = joined(path, points[points.length - 1]);
    if (n + 1 < wire.hops.length && !head.startsWith(OUT)) {
      const next = wire.hops[n + 1];
      const port = inner.get(next.frame.id)!.boxes.get(next.tail)!;
      const corner = places.get(next.frame.id)!;
      path = joined(path.reverse(), { x: corner.x + port.x + 1, y: corner.y }).reverse();
    }
    points.push(...path);
  });
  return { id: wire.id, edges: wire.edges, from: wire.from, to: wire.to, points };
}
