import assert from "node:assert/strict";
import { test } from "node:test";
import { Facts } from "../src/facts.ts";
import { filterOf, pairsOf, Search, wayBack } from "../src/lookup.ts";
import { NOT_MEASURED, readingOf, ZERO } from "../src/reading.ts";
import { flowOf, PALETTE } from "./flows.ts";

const flow = flowOf([1e-8, 0, null, 3, 4], [0, 1, 2, 3, 4, 5], [[1, 3]]);
const facts = new Facts(flow, readingOf(flow), PALETTE, []);

test("neutral is what only the output takes", () => {
  assert.equal(facts.reference, 4);
});

test("a box receives its gradient through what others take of it", () => {
  assert.deepEqual(facts.outputs([0, 1]), [1]);
  assert.equal(facts.reading.sites.joint([3, 4], "l2_norm"), 5);
  assert.equal(facts.reading.sites.joint([3, 4], "rms"), 5 / Math.sqrt(8));
  assert.equal(facts.reading.sites.joint([3, 4], "max_abs"), 4);
  assert.equal(facts.reading.sites.joint([2], "l2_norm"), null);
});

test("worst, middle and last inside", () => {
  assert.deepEqual(facts.inside([0, 1, 2, 3, 4]), { worst: 1, middle: 0, last: 4 });
  assert.equal(facts.inside([2]), null);
});

test("gains where they can be told", () => {
  assert.equal(facts.gain([4], [4]), 3 / 4);
  assert.equal(facts.gain([3], [3]), null); // value 1 has another user, and its part was not measured
  assert.equal(facts.gain([2], []), null);
});

test("looks and words of what is no ordinary number", () => {
  assert.equal(facts.paint([1]).look, ZERO);
  assert.equal(facts.paint([2]).look, NOT_MEASURED);
  assert.equal(facts.told([1]), "0 (all zero)");
  assert.equal(facts.told([2]), "not measured");
});

test("a line has the gradient of its value where that has one use, else its own part", () => {
  assert.equal(facts.flowing([0]).value, 1e-8);
  assert.equal(facts.flowing([1]).look, NOT_MEASURED);
});

test("search ranks whole names first and takes several words", () => {
  const search = new Search(flow);
  assert.deepEqual(search.find("op3"), [3]);
  assert.deepEqual(search.find("net.py:2"), [1]);
  assert.deepEqual(search.find("net OP4"), [4]);
  assert.deepEqual(search.find("  "), []);
});

test("filters and the way back from the loss", () => {
  const vanishing = filterOf("vanishing", facts)!;
  assert.ok(vanishing([0]) && !vanishing([3, 4]));
  assert.equal(filterOf("", facts), null);
  assert.deepEqual(wayBack(flow, 1), [1, 3, 4, 5]);
  assert.deepEqual(pairsOf([1, 3]), ["1>3", "3>1"]);
});
