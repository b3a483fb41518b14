import assert from "node:assert/strict";
import { test } from "node:test";
import { type Address, read, write } from "../src/address.ts";

const NOTHING: Address = { open: null, at: null, norm: null, finding: null, filter: null, step: null, view: null };

test("what is written is what is read", () => {
  const address: Address = {
    open: ["m:a,b", "p:ü&=#"],
    at: "x=1&y",
    norm: "rms",
    finding: 2,
    filter: "zero",
    step: 9999,
    view: [1.5, -2, 0.75],
  };
  assert.deepEqual(read(`#${write(address)}`), address);
  assert.deepEqual(read(write({ ...NOTHING, open: [] })), { ...NOTHING, open: [] });
});

test("an address that makes no sense says nothing", () => {
  assert.deepEqual(read("#norm=l3&finding=0&step=-1&view=1,2&x"), NOTHING);
  assert.equal(read("#at=%E0%A4%A").at, "%E0%A4%A");
});
