// node query.mjs PROCESSOR TRACE SQL...: what Perfetto's trace processor answers, as JSON: a list of rows (objects by column) for each SQL.
//
// PROCESSOR is the folder that scripts/perfetto-processor prints: the processor of ui.perfetto.dev itself, as WebAssembly.

import { readFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const [processor, trace, ...queries] = process.argv.slice(2);

// The processor is there for 32-bit memory only: an engine that has 64-bit memory is not to be found.
const Module = WebAssembly.Module;
WebAssembly.Module = class extends Module {
  constructor(bytes) {
    if (bytes.byteLength === 19) throw new Error("no 64-bit memory");
    super(bytes);
  }
};

process.chdir(processor);
const { EngineBase } = await import(pathToFileURL(path.resolve(processor, "engine.mjs")));
// The bundle is a worker's: it talks to whoever sends it a port.
globalThis.self = globalThis;
self.location = { href: pathToFileURL(path.resolve(processor, "engine_bundle.node.js")).href };
globalThis.WorkerGlobalScope = class {};
const wasm = readFileSync("trace_processor.wasm");
globalThis.XMLHttpRequest = class {
  open() {}
  send() {
    this.status = 200;
    this.response = wasm.buffer.slice(wasm.byteOffset, wasm.byteOffset + wasm.byteLength);
  }
};
const quiet = console.warn;
console.warn = () => {};
vm.runInThisContext(readFileSync("engine_bundle.node.js", "utf8"), { filename: "engine_bundle.node.js" });

class Engine extends EngineBase {
  id = "test";
  mode = "WASM";
  constructor() {
    super();
    const port = { postMessage: (data) => this.onRpcResponseBytes(new Uint8Array(data)) };
    self.onmessage({ data: port });
    this.port = port;
  }
  rpcSendRequestBytes(data) {
    this.port.onmessage({ data });
  }
}

const engine = new Engine();
await new Promise((resolve) => setTimeout(resolve, 100));
const bytes = readFileSync(trace);
for (let at = 0; at < bytes.length; at += 1 << 24) await engine.parse(bytes.subarray(at, at + (1 << 24)));
await engine.notifyEof();
const answers = [];
for (const query of queries) {
  const result = await engine.query(query);
  const columns = result.columns();
  const rows = [];
  for (const it = result.iter({}); it.valid(); it.next()) {
    const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
    rows.push(Object.fromEntries(columns.map((column) => [column, plain(it.get(column))])));
  }
  answers.push(rows);
}
console.warn = quiet;
process.stdout.write(JSON.stringify(answers) + "\n");
process.exit(0);
