// What is open at first: as many levels as let the whole model be read on the screen.

import type { Flow } from "./data.ts";
import { arrange, type Sizes } from "./layout.ts";
import type { Item, Seen, Tree } from "./tree.ts";

export interface Room {
  width: number;
  height: number;
}

const READABLE = 0.78; // scale below which words can't be read
const PARTS = [1, 2, 3, 4, 6, 9, 14, 20]; // items of a part
const BOXES = 60;
const FEW = 4; // blocks that are shown one by one rather than as a strip
const LARGEST = 1.2; // scale of what would fit anyway
const MOST = 800; // boxes that "open all" stops at

export function fitScale(scene: { width: number; height: number }, room: Room): number {
  return Math.min(LARGEST, room.width / Math.max(1, scene.width), room.height / Math.max(1, scene.height));
}

/** Puts a long forward into parts, until these can be read on one screen. */
export function partition(tree: Tree, flow: Flow, sizes: () => Sizes, room: Room): void {
  for (const size of PARTS) {
    tree.partition(size);
    if (fitScale(arrange(tree.seen(new Set()), flow, sizes()), room) >= READABLE) return;
  }
}

/** The ids of what is open at first. */
export function opening(tree: Tree, flow: Flow, sizes: () => Sizes, room: Room): Set<string> {
  let open = new Set<string>();
  for (;;) {
    const wider = new Set(open);
    for (const item of closed(tree.seen(open))) wider.add(item.id);
    if (wider.size === open.size) return open;
    const seen = tree.seen(wider);
    if (count(seen) > BOXES || fitScale(arrange(seen, flow, sizes()), room) < READABLE) return open;
    open = wider;
  }
}

/** Opens level by level until all is open, or there is as much as one can draw. */
export function openAll(tree: Tree): Set<string> {
  let open = new Set<string>();
  for (;;) {
    const wider = new Set(open);
    for (const item of closed(tree.seen(open), true)) wider.add(item.id);
    if (wider.size === open.size || count(tree.seen(wider)) > MOST) return open;
    open = wider;
  }
}

/** What is closed and could be opened; the blocks of a long strip only on demand. */
function closed(frame: Seen, blocks = false): Item[] {
  return frame.children.flatMap((child) => {
    if (child.kind === "frame") return closed(child, blocks);
    if (child.kind === "box") return [child.item];
    return child.kind === "strip" && (blocks || child.blocks.length <= FEW) ? child.blocks : [];
  });
}

export function count(frame: Seen): number {
  return frame.children.reduce((sum, child) => sum + (child.kind === "frame" ? count(child) : 1), 0);
}
