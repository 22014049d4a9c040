// node query.mjs PROCESSOR TRACE SQL...: prints the results of Perfetto's trace processor as JSON: for each SQL a list
// of rows (objects by column).
//
// PROCESSOR is the folder that scripts/perfetto-processor prints: the trace processor of ui.perfetto.dev, as
// WebAssembly.

import { readFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const [processor, trace, ...queries] = process.argv.slice(2);

// Only the 32-bit build of the processor is available, so the probe for 64-bit memory must fail.
const Module = WebAssembly.Module;
WebAssembly.Module = class extends Module {
  constructor(bytes) {
    if (bytes.byteLength === 19) throw new Error("no 64-bit memory");
    super(bytes);
  }
};

process.chdir(processor);
const { EngineBase } = await import(pathToFileURL(path.resolve(processor, "engine.mjs")));
// The bundle is written for a worker: it communicates over the port that a message gives it.
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
