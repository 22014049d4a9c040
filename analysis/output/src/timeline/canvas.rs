//! A pixel image with rectangles, dashed lines and text. The font is Noto Sans Mono, as bitmaps.

use std::io::{self, Write};

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};

/// A color as 0xRRGGBB.
pub(super) type Color = u32;

/// The height of text, in pixels.
pub(super) const TEXT: i32 = 20;
const SIZE: RasterHeight = RasterHeight::Size20;

/// Which point of a text its position refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// An image, white at first. Anything outside is not drawn.
#[derive(Debug)]
pub(super) struct Canvas {
    width: i32,
    height: i32,
    pixels: Vec<[u8; 3]>,
}

/// The bytes of a color.
fn rgb(color: Color) -> [u8; 3] {
    let [_, red, green, blue] = color.to_be_bytes();
    [red, green, blue]
}

/// The width of a text, in pixels.
pub(super) fn text_width(text: &str) -> i32 {
    (text.chars().count() * get_raster_width(FontWeight::Regular, SIZE)) as i32
}

impl Canvas {
    pub(super) fn new(width: i32, height: i32) -> Canvas {
        Canvas { width, height, pixels: vec![[255; 3]; (width.max(0) as usize) * (height.max(0) as usize)] }
    }

    fn pixel(&mut self, x: i32, y: i32) -> Option<&mut [u8; 3]> {
        let inside = (0..self.width).contains(&x) && (0..self.height).contains(&y);
        inside.then(|| &mut self.pixels[y as usize * self.width as usize + x as usize])
    }

    /// Fills a rectangle from `x` and `y`, `wide` and `high` pixels large.
    pub(super) fn fill(&mut self, x: i32, y: i32, wide: i32, high: i32, color: Color) {
        for y in y..y + high {
            for x in x..x + wide {
                if let Some(pixel) = self.pixel(x, y) {
                    *pixel = rgb(color);
                }
            }
        }
    }

    /// Draws a vertical dashed line.
    pub(super) fn dashes(&mut self, x: i32, from: i32, to: i32, color: Color) {
        for y in (from..to).step_by(10) {
            self.fill(x, y, 1, 6.min(to - y), color);
        }
    }

    /// Writes a line of text. `y` is the top of the letters.
    pub(super) fn text(&mut self, x: i32, y: i32, anchor: Anchor, bold: bool, text: &str) {
        let wide = text_width(text);
        let mut left = match anchor {
            Anchor::Start => x,
            Anchor::Middle => x - wide / 2,
            Anchor::End => x - wide,
        };
        let weight = if bold { FontWeight::Bold } else { FontWeight::Regular };
        for letter in text.chars() {
            // A letter that the font lacks is drawn as `?`.
            if let Some(raster) = get_raster(letter, weight, SIZE).or_else(|| get_raster('?', weight, SIZE)) {
                for (dy, row) in raster.raster().iter().enumerate() {
                    for (dx, ink) in row.iter().enumerate() {
                        if let Some(pixel) = self.pixel(left + dx as i32, y + dy as i32) {
                            // Black ink over the existing pixel.
                            *pixel = pixel.map(|under| (u16::from(under) * u16::from(255 - ink) / 255) as u8);
                        }
                    }
                }
            }
            left += get_raster_width(weight, SIZE) as i32;
        }
    }

    /// Writes the image as a PNG file.
    pub(super) fn png(&self, mut out: impl Write) -> io::Result<()> {
        let mut encoder = png::Encoder::new(&mut out, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(self.pixels.as_flattened())?;
        writer.finish()?;
        out.flush()
    }
}
