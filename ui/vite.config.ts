import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";
import { stamp } from "./stamp.ts";

/** Built into the Python package, which serves it at /ui; `npm run dev` talks to a server on the default port. */
export default defineConfig({
  base: "./",
  plugins: [svelte(), stamp()],
  build: {
    outDir: "../src/groupwise/server/ui",
    emptyOutDir: true,
    target: "esnext",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8420" } },
});
