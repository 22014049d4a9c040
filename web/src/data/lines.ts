/** What the page says about itself, in the words of the terminal. */
export interface LinesInfo {
  device: string;
  legend: string[];
  notes: string[];
  /** The names of what no custom category has, and of what no compiled region allocated. */
  no_custom_category: string;
  not_compiled: string;
}
