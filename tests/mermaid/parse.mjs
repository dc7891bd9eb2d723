// Reads {name: text} as JSON from stdin; writes {name: "flowchart-v2" or "error: ..."}.
import { readFileSync } from "node:fs";
import { JSDOM } from "jsdom";

const { window } = new JSDOM("<!doctype html><body></body>");
globalThis.window = window; // before mermaid: its sanitizer binds to the window when it is imported
globalThis.document = window.document;
const { default: mermaid } = await import("mermaid");

const verdicts = {};
for (const [name, text] of Object.entries(JSON.parse(readFileSync(0, "utf8")))) {
  try {
    verdicts[name] = (await mermaid.parse(text)).diagramType;
  } catch (error) {
    verdicts[name] = `error: ${error.message ?? error}`;
  }
}
process.stdout.write(JSON.stringify(verdicts));
