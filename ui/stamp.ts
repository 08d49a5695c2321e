/** Writes `sources.sha256` beside the build: what it was built from, so that a test can tell a stale build. */
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";
import type { Plugin } from "vite";

const SOURCES = ["index.html", "package.json", "package-lock.json", "stamp.ts", "svelte.config.js", "tsconfig.json", "vite.config.ts"];
const FOLDERS = ["public", "src"];

/** SHA-256 over "path NUL sha256(content) LF" of each source, sorted by path; `tests/server/test_web.py` does the same. */
export function digest(root: string): string {
  const inside = FOLDERS.flatMap((folder) =>
    readdirSync(join(root, folder), { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile())
      .map((entry) => relative(root, join(entry.parentPath, entry.name)).replaceAll("\\", "/")),
  );
  const whole = createHash("sha256");
  for (const path of [...SOURCES, ...inside].sort()) {
    const content = createHash("sha256").update(readFileSync(join(root, path))).digest("hex");
    whole.update(`${path}\0${content}\n`);
  }
  return whole.digest("hex");
}

export function stamp(): Plugin {
  let root = ".";
  return {
    name: "stamp",
    apply: "build",
    configResolved: (config) => void (root = config.root),
    generateBundle() {
      this.emitFile({ type: "asset", fileName: "sources.sha256", source: digest(root) + "\n" });
    },
  };
}
