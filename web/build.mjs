// Bundles the page's script into the package, and records what of others is in it, in which version, under which
// licence. `node build.mjs --check` only says whether the package has what would be built; `--tests` bundles the tests.

import { mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "..", "fxgrad", "render", "page", "assets");
const axe = join(here, "..", "tests", "render", "page", "vendor");

async function tests() {
  const out = join(here, ".test");
  await rm(out, { recursive: true, force: true });
  const entryPoints = (await readdir(join(here, "test"))).filter((name) => name.endsWith(".test.ts"));
  await build({
    entryPoints: entryPoints.map((name) => join(here, "test", name)),
    bundle: true,
    platform: "node",
    format: "esm",
    outdir: out,
    outExtension: { ".js": ".mjs" },
    logLevel: "warning",
  });
}

async function page() {
  const made = await build({
    entryPoints: [join(here, "src", "main.ts")],
    bundle: true,
    minify: true,
    format: "iife",
    target: ["chrome110", "firefox115", "safari16"],
    charset: "ascii",
    legalComments: "none",
    write: false,
    metafile: true,
    absWorkingDir: here,
    logLevel: "warning",
  });
  const script = made.outputFiles[0].text;
  const style = await readFile(join(here, "src", "page.css"), "utf-8");
  const files = new Map([
    [join(assets, "page.js"), script],
    [join(assets, "page.css"), style],
  ]);
  const bytes = new Map();
  const [output] = Object.values(made.metafile.outputs);
  for (const [name, { bytesInOutput }] of Object.entries(output.inputs)) {
    const library = /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(name)?.[1];
    if (library && bytesInOutput) bytes.set(library, (bytes.get(library) ?? 0) + bytesInOutput);
  }
  const vendored = [];
  for (const name of [...bytes.keys()].sort()) {
    const { about, licence } = await library(name);
    vendored.push({ ...about, bytes: bytes.get(name) });
    files.set(join(assets, "LICENSES", `${name.replace("/", "__")}.txt`), licence);
  }
  files.set(join(assets, "vendored.json"), `${JSON.stringify({ libraries: vendored }, null, 2)}\n`);
  const checker = await library("axe-core");
  files.set(join(axe, "axe.min.js"), await readFile(join(here, "node_modules", "axe-core", "axe.min.js"), "utf-8"));
  files.set(join(axe, "LICENSE"), checker.licence);
  files.set(join(axe, "vendored.json"), `${JSON.stringify({ libraries: [checker.about] }, null, 2)}\n`);
  return files;
}

async function library(name) {
  const folder = join(here, "node_modules", name);
  const { version, license, homepage, repository } = JSON.parse(await readFile(join(folder, "package.json"), "utf-8"));
  const file = (await readdir(folder)).find((one) => /^licen[cs]e/i.test(one));
  const source = repository?.url ?? repository ?? homepage ?? "";
  return { about: { name, version, license, source }, licence: await readFile(join(folder, file), "utf-8") };
}

if (process.argv.includes("--tests")) await tests();
else {
  const files = await page();
  const stale = [];
  for (const [path, text] of files) {
    const known = await readFile(path, "utf-8").catch(() => null);
    if (known === text) continue;
    stale.push(path);
    if (process.argv.includes("--check")) continue;
    await mkdir(dirname(path), { recursive: true });
    await writeFile(path, text);
  }
  if (process.argv.includes("--check") && stale.length > 0) {
    console.error(`not what would be built now: ${stale.join(", ")}\nrun: npm run build`);
    process.exit(1);
  }
  console.log(stale.length > 0 ? `wrote ${stale.length} files` : "all as built");
}
