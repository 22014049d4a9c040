/** The line table of a device. `analysis/schema/lines.schema.json` describes all of it. */

export interface LineFigures {
  times: number;
  active_peak_bytes: number;
  reserved_peak_bytes: number;
  net_bytes: number;
  allocations: number;
  allocated_bytes: number;
  backward_allocations: number;
  backward_bytes: number;
}

export interface LineRow {
  line: number;
  text?: string;
  figures?: LineFigures;
  largest_tensor?: { name: string; shape?: string; bytes: number; named_blocks: number };
  custom_categories?: { custom_category?: string; bytes: number }[];
  compile_contexts?: { compile_context?: string; bytes: number }[];
}

export interface FunctionLines {
  function: string;
  filename: string;
  first_line: number;
  active_peak_bytes: number;
  reserved_peak_bytes: number;
  allocated_bytes: number;
  net_bytes: number;
  has_source: boolean;
  lines: LineRow[];
}

export interface LinesReport {
  run: string;
  active_peak_bytes: number;
  reserved_peak_bytes: number;
  functions: FunctionLines[];
  functions_left_out: number;
}

/** What the page says about itself, in the words of the terminal. */
export interface LinesInfo {
  device: string;
  legend: string[];
  notes: string[];
  /** The names of what no custom category has, and of what no compiled region allocated. */
  no_custom_category: string;
  not_compiled: string;
}
