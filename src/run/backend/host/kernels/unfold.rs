//! Unfolding images into columns, folding columns back, and moving columns in and out of a tile.

use std::ops::Range;

/// How kernel elements and output positions meet input pixels; per group of channels.
#[derive(Clone, Copy, Debug)]
pub struct Unfold {
    /// Input channels.
    pub channels: usize,
    /// Height and width of the input.
    pub size: [usize; 2],
    /// Height and width of the output.
    pub out: [usize; 2],
    /// Height and width of the kernel.
    pub kernel: [usize; 2],
    /// Steps between windows.
    pub stride: [usize; 2],
    /// Zeros on each side.
    pub padding: [usize; 2],
    /// Steps inside a window.
    pub dilation: [usize; 2],
    /// Kernel elements are counted row, column, channel instead of channel, row, column.
    pub channels_last: bool,
}

impl Unfold {
    /// Channel, row and column of a kernel element.
    fn element(&self, at: usize) -> [usize; 3] {
        if self.channels_last {
            let cell = at / self.channels;
            [at % self.channels, cell / self.kernel[1], cell % self.kernel[1]]
        } else {
            let (row, column) = (at / self.kernel[1], at % self.kernel[1]);
            [row / self.kernel[0], row % self.kernel[0], column]
        }
    }

    /// The input row or column under kernel offset `k` at output `o`, in dimension `i`; `None` in
    /// the padding.
    fn pixel(&self, i: usize, o: usize, k: usize) -> Option<usize> {
        (o * self.stride[i] + k * self.dilation[i])
            .checked_sub(self.padding[i])
            .filter(|&p| p < self.size[i])
    }

    /// The output columns whose pixel under kernel column `k` is inside the image.
    fn inside(&self, k: usize) -> Range<usize> {
        let (ahead, step) = (k * self.dilation[1], self.stride[1]);
        let from = self.padding[1].saturating_sub(ahead).div_ceil(step);
        let to = (self.size[1] + self.padding[1]).saturating_sub(ahead).div_ceil(step);
        from.min(self.out[1])..to.clamp(from, self.out[1].max(from)).min(self.out[1])
    }
}

/// Cuts a range of columns into stretches of one output row: (image, output row, output columns,
/// place in the tile).
fn stretches(
    out: &[usize; 2],
    first: usize,
    count: usize,
    mut visit: impl FnMut(usize, usize, Range<usize>, usize),
) {
    let [height, width] = *out;
    let (mut column, mut row) = (first % width, first / width);
    let mut done = 0;
    while done < count {
        let length = (width - column).min(count - done);
        visit(row / height, row % height, column..column + length, done);
        (done, row, column) = (done + length, row + 1, 0);
    }
}

/// Visits each stretch of each kernel element's row of a tile: (place in the tile, stretch of zeros
/// before, pixels, first pixel or none).
fn walk(
    shape: &Unfold,
    stride: &[usize; 4],
    elements: Range<usize>,
    first: usize,
    count: usize,
    mut visit: impl FnMut(Range<usize>, Range<usize>, usize),
) {
    for (row, element) in elements.enumerate() {
        let [channel, kernel_row, kernel_column] = shape.element(element);
        let inside = shape.inside(kernel_column);
        stretches(&shape.out, first, count, |image, out_row, columns, place| {
            let place = row * count + place;
            let whole = place..place + columns.len();
            let from = inside.start.clamp(columns.start, columns.end);
            let to = inside.end.clamp(from, columns.end);
            match shape.pixel(0, out_row, kernel_row).filter(|_| from < to) {
                None => visit(whole, place..place, 0),
                Some(pixel_row) => {
                    let pixel = from * shape.stride[1] + kernel_column * shape.dilation[1]
                        - shape.padding[1];
                    let offset = image * stride[0]
                        + channel * stride[1]
                        + pixel_row * stride[2]
                        + pixel * stride[3];
                    visit(whole, place + from - columns.start..place + to - columns.start, offset);
                }
            }
        });
    }
}

/// Writes the tile of kernel elements `elements` by columns `first..first + count`, one row per
/// kernel element.
///
/// # Safety
/// `data` with `stride` addresses the input that `shape` describes, in memory that no thread
/// writes.
pub unsafe fn unfold_tile(
    shape: &Unfold,
    data: *const f32,
    stride: &[usize; 4],
    elements: Range<usize>,
    first: usize,
    count: usize,
    tile: &mut [f32],
) {
    let step = shape.stride[1] * stride[3];
    walk(shape, stride, elements, first, count, |whole, pixels, offset| {
        tile[whole.start..pixels.start].fill(0.0);
        tile[pixels.end..whole.end].fill(0.0);
        let to = &mut tile[pixels];
        let from = data.wrapping_add(offset);
        if step == 1 {
            // SAFETY: `walk` visits pixels inside the image only, here neighbours in memory.
            to.copy_from_slice(unsafe { std::slice::from_raw_parts(from, to.len()) });
        } else {
            for (i, value) in to.iter_mut().enumerate() {
                // SAFETY: as above, one at a time.
                *value = unsafe { *from.wrapping_add(i * step) };
            }
        }
    });
}

/// Adds the tile's elements to the pixels that they were unfolded from.
///
/// # Safety
/// `data` with `stride` addresses the input that `shape` describes, in memory that no other call
/// uses.
pub unsafe fn fold_tile(
    shape: &Unfold,
    data: *mut f32,
    stride: &[usize; 4],
    elements: Range<usize>,
    first: usize,
    count: usize,
    tile: &[f32],
) {
    let step = shape.stride[1] * stride[3];
    walk(shape, stride, elements, first, count, |_, pixels, offset| {
        let from = &tile[pixels];
        let to = data.wrapping_add(offset);
        if step == 1 {
            // SAFETY: `walk` visits pixels inside the image only, here neighbours in memory.
            let to = unsafe { std::slice::from_raw_parts_mut(to, from.len()) };
            for (to, from) in to.iter_mut().zip(from) {
                *to += from;
            }
        } else {
            for (i, value) in from.iter().enumerate() {
                // SAFETY: as above, one at a time.
                unsafe { *to.wrapping_add(i * step) += value };
            }
        }
    });
}

/// Moves columns of `channels` rows between a tile and the tensor `(data, strides)`: out of the
/// tile or into it.
///
/// # Safety
/// The address and strides are those of a tensor of `channels` and outputs `out`; out of the tile,
/// no other call uses it.
pub unsafe fn copy_columns<const OUT: bool>(
    out: &[usize; 2],
    (data, stride): (*mut f32, [usize; 4]),
    channels: usize,
    first: usize,
    count: usize,
    tile: &mut [f32],
) {
    for channel in 0..channels {
        let row = &mut tile[channel * count..(channel + 1) * count];
        stretches(out, first, count, |image, out_row, columns, place| {
            let start = data.wrapping_add(
                image * stride[0]
                    + channel * stride[1]
                    + out_row * stride[2]
                    + columns.start * stride[3],
            );
            for (i, value) in row[place..place + columns.len()].iter_mut().enumerate() {
                let element = start.wrapping_add(i * stride[3]);
                // SAFETY: inside the tensor, by the caller's promise.
                unsafe { if OUT { *element = *value } else { *value = *element } };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Unfold {
        Unfold {
            channels: 1,
            size: [2, 3],
            out: [2, 3],
            kernel: [3, 3],
            stride: [1, 1],
            padding: [1, 1],
            dilation: [1, 1],
            channels_last: false,
        }
    }

    #[test]
    fn unfolding_pads_with_zeros_and_folding_counts_uses() {
        let image: Vec<f32> = (1u8..=6).map(f32::from).collect();
        let mut tile = vec![9.0; 9 * 6];
        let stride = [6, 6, 3, 1];
        // SAFETY: the image has the shape described.
        unsafe { unfold_tile(&shape(), image.as_ptr(), &stride, 0..9, 0, 6, &mut tile) };
        assert_eq!(tile[..6], [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
        assert_eq!(tile[4 * 6..5 * 6], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(tile[8 * 6..], [5.0, 6.0, 0.0, 0.0, 0.0, 0.0]);
        let mut back = vec![0.0; 6];
        // SAFETY: as above.
        unsafe { fold_tile(&shape(), back.as_mut_ptr(), &stride, 0..9, 0, 6, &tile) };
        assert_eq!(back, [4.0, 12.0, 12.0, 16.0, 30.0, 24.0]);
    }

    #[test]
    fn a_tile_may_start_and_end_anywhere() {
        let image: Vec<f32> = (1u8..=12).map(f32::from).collect();
        let mut whole = vec![0.0; 9 * 12];
        let mut part = vec![0.0; 2 * 5];
        let stride = [6, 6, 3, 1];
        // SAFETY: two images of the shape described.
        unsafe { unfold_tile(&shape(), image.as_ptr(), &stride, 0..9, 0, 12, &mut whole) };
        // SAFETY: as above.
        unsafe { unfold_tile(&shape(), image.as_ptr(), &stride, 3..5, 4, 5, &mut part) };
        assert_eq!(part[..5], whole[3 * 12 + 4..3 * 12 + 9]);
        assert_eq!(part[5..], whole[4 * 12 + 4..4 * 12 + 9]);
    }
}
