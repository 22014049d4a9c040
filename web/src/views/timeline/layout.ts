/** Where a timeline has its parts, in CSS pixels. */

export const LEFT = 62;
export const RIGHT = 12;
export const TOP = 34;
/** The height of a row of bands. */
export const BAND = 16;
/** Rows of bands and the axis below the plot, without tracks of ranges. */
export const BOTTOM = 2 * BAND + 34;
/** The height without tracks of ranges. */
export const HEIGHT = 380;
/** The height of one of several timelines. */
export const HEIGHT_IN_GROUP = 270;

/** The rectangle of the areas. */
export interface Plot {
  left: number;
  top: number;
  width: number;
  height: number;
}
