import assert from "node:assert/strict";
import { test } from "node:test";
import { arrange, type Place } from "../src/layout.ts";
import { Tree } from "../src/tree.ts";
import { flowOf, sizes } from "./flows.ts";

const nested = flowOf(
  [1, 1, 1, 1, 1, 1],
  [0, { m: "a", t: "A", c: [1, { m: "a.b", t: "B", c: [2, 3] }] }, { m: "c", t: "C", c: [4, 5] }, 6],
  [
    [0, 3],
    [1, 5],
    [2, 5],
  ],
);
const open = new Set(["m:a", "m:a.b", "m:c"]);

function inside(inner: Place, outer: Place): boolean {
  return (
    inner.x >= outer.x &&
    inner.y >= outer.y &&
    inner.x + inner.width <= outer.x + outer.width + 0.5 &&
    inner.y + inner.height <= outer.y + outer.height + 0.5
  );
}

test("boxes lie in their frames and do not overlap", () => {
  const scene = arrange(new Tree(nested).seen(open), nested, sizes());
  for (const [name, frame] of [
    ["net.op2", "m:a.b"],
    ["m:a.b", "m:a"],
    ["net.op4", "m:c"],
  ]) {
    assert.ok(inside(scene.places.get(name)!, scene.places.get(frame)!), `${name} in ${frame}`);
  }
  const leaves = [...scene.places.values()].filter((place) => place.seen.kind !== "frame");
  for (const one of leaves) {
    for (const two of leaves) {
      const apart =
        one === two ||
        one.x + one.width <= two.x ||
        two.x + two.width <= one.x ||
        one.y + one.height <= two.y ||
        two.y + two.height <= one.y;
      assert.ok(apart, `${one.seen.id} and ${two.seen.id}`);
    }
  }
});

test("each line begins at its tail and ends at its head, also across frames", () => {
  const scene = arrange(new Tree(nested).seen(open), nested, sizes());
  assert.equal(scene.lines.length, 9);
  for (const { from, to, points } of scene.lines) {
    const [tail, head] = [scene.places.get(from.id)!, scene.places.get(to.id)!];
    const [first, last] = [points[0], points[points.length - 1]];
    assert.ok(first.x >= tail.x && first.x <= tail.x + tail.width, `${from.id} → ${to.id}`);
    assert.ok(Math.abs(first.y - tail.y - tail.height) < 1);
    assert.ok(Math.abs(last.y - head.y) < 1 && last.x >= head.x && last.x <= head.x + head.width);
    assert.ok(points.every((point) => Number.isFinite(point.x) && Number.isFinite(point.y)));
  }
});

test("a long chain is broken into columns, and stays broken there when something opens", () => {
  const norms = Array.from({ length: 30 }, () => 1);
  const chain = flowOf(
    norms,
    [...norms.keys()].map((n) => (n === 4 ? { m: "m", t: "M", c: [4] } : n)).concat([30] as never),
  );
  const kept = { ...sizes(), column: 500 };
  const tree = new Tree(chain);
  const column = (id: string, of: ReturnType<typeof arrange>): number => of.places.get(id)!.x;
  const closed = arrange(tree.seen(new Set()), chain, kept);
  const lefts = new Set([...closed.places.values()].map((place) => Math.round(place.x)));
  assert.ok(lefts.size >= 4 && closed.height < 700);
  const opened = arrange(tree.seen(new Set(["m:m"])), chain, kept);
  for (let n = 6; n < 29; n++) {
    const together = Math.round(column(`net.op${n}`, closed)) === Math.round(column(`net.op${n + 1}`, closed));
    const still = Math.round(column(`net.op${n}`, opened)) === Math.round(column(`net.op${n + 1}`, opened));
    assert.equal(still, together);
  }
});
