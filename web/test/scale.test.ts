import assert from "node:assert/strict";
import { test } from "node:test";
import { colourPlace, decadesOf, power, short, words } from "../src/scale.ts";
import { PALETTE } from "./flows.ts";

test("numbers are written as Python writes them with three digits", () => {
  const pairs: [number, string][] = [
    [0, "0"],
    [1, "1"],
    [0.5, "0.5"],
    [1234, "1.23e+03"],
    [999, "999"],
    [0.000123456, "0.000123"],
    [0.0000123456, "1.23e-05"],
    [1e-300, "1e-300"],
    [99.95, "100"],
    [999.9, "1e+03"],
    [0.1 + 0.2, "0.3"],
  ];
  for (const [value, expected] of pairs) assert.equal(words(value), expected);
  assert.equal(words(null), "–");
  assert.equal(words(Number.NaN), "NaN");
  assert.equal(words(Number.NEGATIVE_INFINITY), "-Inf");
});

test("a colour is that of the nearest decade, held at the ends, halves to even", () => {
  const place = (decades: number): number => colourPlace(decades, PALETTE) - PALETTE.decades;
  assert.deepEqual([-99, -6.4, -0.5, 0.49, 0.5, 1.5, 2.5, 99].map(place), [-6, -6, 0, 0, 0, 2, 2, 6]);
});

test("decades of what is no ordinary number", () => {
  assert.equal(decadesOf(100, 1), 2);
  assert.equal(decadesOf(0, 1), Number.NEGATIVE_INFINITY);
  assert.ok(Number.isNaN(decadesOf(Number.NaN, 1)));
});

test("powers and long names", () => {
  assert.equal(power(-12), "10⁻¹²");
  assert.equal(short("abcdefghij", 6), "ab…hij");
});
