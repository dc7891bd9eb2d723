// For each line of stdin, {name: text} as JSON, writes a line, {name: "flowchart-v2" or "error: ..."}.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { runInThisContext } from "node:vm";
import { JSDOM } from "jsdom";

const { window } = new JSDOM("<!doctype html><body></body>");
globalThis.window = window; // before mermaid: its sanitizer binds to the window when it is loaded
globalThis.document = window.document;
// Mermaid in one file, without the 130 packages of other kinds of diagrams.
runInThisContext(readFileSync("node_modules/@mermaid-js/tiny/dist/mermaid.tiny.js", "utf8"));
const { mermaid } = globalThis;

for await (const line of createInterface({ input: process.stdin })) {
  const verdicts = {};
  for (const [name, text] of Object.entries(JSON.parse(line))) {
    try {
      verdicts[name] = (await mermaid.parse(text)).diagramType;
    } catch (error) {
      verdicts[name] = `error: ${error.message ?? error}`;
    }
  }
  process.stdout.write(`${JSON.stringify(verdicts)}\n`);
}
