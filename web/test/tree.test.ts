import assert from "node:assert/strict";
import { test } from "node:test";
import { count, opening, partition } from "../src/opening.ts";
import { type Seen, Tree, walk } from "../src/tree.ts";
import { flowOf, sizes } from "./flows.ts";

const flow = flowOf(
  [1, 1, 1, 1, 1, 1, 1],
  [0, { m: "body", t: "Body", c: [{ r: [1, { g: [2, 3] }, { m: "body.last", t: "Block", c: [4, 5] }] }] }, [6], 7],
);

function shown(seen: Seen): string[] {
  const found: string[] = [];
  walk(seen, (one) => found.push(`${one.kind} ${one.id}`));
  return found;
}

test("closed, a module is a box; open, a frame with its run as a strip", () => {
  const tree = new Tree(flow);
  assert.deepEqual(shown(tree.seen(new Set())), ["node net.op0", "box m:body", "node net.op6", "node output"]);
  const open = shown(tree.seen(new Set(["m:body"])));
  assert.equal(open[1], "frame m:body");
  assert.ok(open[2].startsWith("strip r:net.op1"));
});

test("one block of a strip opens alone, and a single block that is left over is no strip", () => {
  const tree = new Tree(flow);
  const found = shown(tree.seen(new Set(["m:body", "p:net.op2 … op3"])));
  assert.deepEqual(found.slice(2, 6), ["node net.op1", "frame p:net.op2 … op3", "node net.op2", "node net.op3"]);
  assert.equal(found[6], "box m:body.last");
});

test("what hides a node is what has to be opened", () => {
  const tree = new Tree(flow);
  const open = new Set(tree.above(tree.leaf[3]).map((item) => item.id));
  assert.ok(shown(tree.seen(open)).includes("node net.op3"));
});

test("every node is in the tree once, and ids are unique whatever names say", () => {
  const odd = flowOf([1, 1], [{ m: "a\nb", t: "", c: [0] }, { m: "a\nb", t: "", c: [1] }, 2]);
  const tree = new Tree(odd);
  assert.deepEqual([...tree.root.nodes].sort(), [0, 1, 2]);
  assert.ok(tree.byId.has("m:a·b") && tree.byId.has("m:a·b#2"));
});

test("a forward that is too long for the screen comes in parts, its inputs and outputs beside them", () => {
  const long = flowOf(
    Array.from({ length: 20 }, () => 1),
    Array.from({ length: 21 }, (_, n) => n),
  );
  const tree = new Tree(long);
  partition(tree, long, sizes, { width: 300, height: 500 });
  const parts = tree.root.children.filter((item) => item.kind === "part");
  assert.ok(parts.length > 1 && tree.root.children.length < 9);
  assert.deepEqual(
    tree.root.children.flatMap((item) => item.nodes),
    [...Array(21).keys()],
  );
  assert.equal(tree.root.children[tree.root.children.length - 1].name, "output");
  assert.equal(tree.above(tree.leaf[1])[0].kind, "part");
  tree.partition(1);
  assert.equal(tree.root.children.length, 21);
  assert.equal(tree.byId.has(parts[0].id), false);
});

test("at first as much is open as can be read", () => {
  const tree = new Tree(flow);
  assert.ok(opening(tree, flow, sizes, { width: 1000, height: 2000 }).has("m:body"));
  assert.equal(opening(tree, flow, sizes, { width: 1000, height: 150 }).size, 0);
  assert.equal(count(tree.seen(new Set())), 4);
});
