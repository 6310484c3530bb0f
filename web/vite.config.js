import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { defineConfig } from "vite";

/** Writes the hash of all sources beside what was built of them, so that a test can tell whether they belong together. */
const sourcesHash = {
  name: "sources-hash",
  generateBundle() {
    const names = [...readdirSync("src").map((name) => `src/${name}`), "index.html", "package-lock.json"].sort();
    const hash = createHash("sha256");
    for (const name of names) hash.update(name).update(readFileSync(name));
    this.emitFile({ type: "asset", fileName: "sources.sha256", source: hash.digest("hex") + "\n" });
  },
};

export default defineConfig({
  base: "/page/",
  plugins: [sourcesHash],
  build: {
    outDir: process.env.PAGE_OUT ?? "../src/tilework/server/page/built",
    emptyOutDir: true,
    modulePreload: false,
    target: "es2022",
    rollupOptions: {
      output: { entryFileNames: "page.js", assetFileNames: "page[extname]" },
    },
  },
});
