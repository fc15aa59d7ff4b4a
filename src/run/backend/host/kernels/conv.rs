//! Convolutions in two dimensions, forward and backward, as matrix products over unfolded tiles.
//!
//! A *column* is one output position of one image; a tile is a range of columns by a range of
//! kernel elements, unfolded into a fixed scratch ([`with_tiles`]). Pointwise convolutions multiply
//! the images themselves.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{
    expect_shape, flag, mask, maybe_real, real, result, shaped,
};
use crate::backend::operators::conv::{Convolution, Places};
use crate::backend::operators::error::unsupported;
use crate::backend::operators::shapes::collapse;
use crate::backend::operators::view::{Call, View};

use super::gemm::{Matrix, product_of};
use super::strided::{COLUMN_FLOATS, ROW_FLOATS, base, f32_operands, fill, runs, with_tiles};
use super::unfold::{Unfold, copy_columns, fold_tile, unfold_tile};

/// Columns in a tile: enough to amortise the packing of the weights.
const TILE_COLUMNS: usize = 1024;
/// Images with fewer output positions than this share tiles.
const SMALL_IMAGE: usize = 256;

/// One group's matrices: everything a pass needs to address memory.
struct Group<'a> {
    shape: &'a Shape,
    /// First element of the group's input channels, and the input's strides.
    input: (*mut f32, [usize; 4]),
    /// First element of the group's output channels, and the output's strides.
    output: (*mut f32, [usize; 4]),
    /// First element of the group's weights, and their strides.
    weight: (*mut f32, [usize; 4]),
}

/// What is convolved, per group.
struct Shape {
    images: usize,
    groups: usize,
    /// Input and output channels of one group.
    channels: [usize; 2],
    unfold: Unfold,
    /// Walks the weights of one output channel in the order in which kernel elements are unfolded,
    /// where one step does.
    kernel_step: Option<usize>,
}

/// A tile of columns, as a matrix of `rows` by `count`.
struct Tile {
    first: usize,
    count: usize,
}

impl Shape {
    /// The convolution in the order of unfolding that `weight` asks for.
    fn new(of: &Convolution, weight: &View) -> Result<Self, KernelError> {
        if of.channels[1] > ROW_FLOATS {
            return Err(unsupported!("at most {ROW_FLOATS} output channels per group"));
        }
        let kernel_step = collapse(&weight.shape[1..], &weight.stride[1..]);
        let unfold = Unfold {
            channels: of.channels[0],
            size: of.size,
            out: of.out,
            kernel: of.kernel,
            stride: of.stride,
            padding: of.padding,
            dilation: of.dilation,
            channels_last: kernel_step.is_none(),
        };
        Ok(Self {
            images: of.images,
            groups: of.groups,
            channels: of.channels,
            unfold,
            kernel_step,
        })
    }

    /// Tiles of columns; none crosses the end of an image if the images are large and can be
    /// addressed in place.
    fn tiles(&self, in_place: bool, rows: usize) -> impl Iterator<Item = Tile> + use<> {
        let positions = self.unfold.out[0] * self.unfold.out[1];
        let (spans, span, most) = if in_place {
            (self.images, positions, TILE_COLUMNS)
        } else {
            (1, self.images * positions, TILE_COLUMNS.min(ROW_FLOATS / rows.max(1)).max(1))
        };
        let pieces = span.div_ceil(most).max(1);
        let length = span.div_ceil(pieces);
        (0..spans)
            .flat_map(move |i| {
                (0..pieces).map(move |p| {
                    (i * span + (p * length).min(span), i * span + ((p + 1) * length).min(span))
                })
            })
            .filter(|(from, to)| from < to)
            .map(|(first, to)| Tile { first, count: to - first })
    }

    /// Whether the columns of an output can be multiplied where they lie, and the step between
    /// them.
    fn column_step(&self, output: &[usize; 4]) -> Option<usize> {
        let step = collapse(&self.unfold.out, &output[2..])?;
        (self.unfold.out[0] * self.unfold.out[1] >= SMALL_IMAGE || self.images == 1).then_some(step)
    }

    /// The step between the input's pixels if the input is its own unfolding.
    fn pointwise(&self, input: &[usize; 4]) -> Option<usize> {
        let u = &self.unfold;
        let plain = u.kernel == [1, 1] && u.stride == [1, 1] && u.padding == [0, 0];
        if plain { collapse(&u.size, &input[2..]) } else { None }
    }

    fn kernel_elements(&self) -> usize {
        self.channels[0] * self.unfold.kernel[0] * self.unfold.kernel[1]
    }

    /// Ranges of kernel elements whose unfolding fits the scratch.
    fn chunks(&self, columns: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let (all, most) = (self.kernel_elements(), (COLUMN_FLOATS / columns).max(1));
        let pieces = all.div_ceil(most);
        let length = all.div_ceil(pieces.max(1));
        (0..pieces).map(move |p| (p * length).min(all)..((p + 1) * length).min(all))
    }
}

impl Group<'_> {
    /// The weights of a range of kernel elements: pieces of (first kernel element, count, matrix of
    /// output channels by kernel elements).
    fn weights(&self, range: std::ops::Range<usize>) -> Vec<(usize, usize, Matrix)> {
        let (data, [out_step, in_step, row_step, column_step]) = self.weight;
        if let Some(step) = self.shape.kernel_step {
            let matrix =
                Matrix { data: data.wrapping_add(range.start * step), row: out_step, column: step };
            return vec![(range.start, range.len(), matrix)];
        }
        let (channels, width) = (self.shape.channels[0], self.shape.unfold.kernel[1]);
        let mut pieces = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (cell, channel) = (at / channels, at % channels);
            let count = (channels - channel).min(range.end - at);
            let offset = channel * in_step + cell / width * row_step + cell % width * column_step;
            pieces.push((
                at,
                count,
                Matrix { data: data.wrapping_add(offset), row: out_step, column: in_step },
            ));
            at += count;
        }
        pieces
    }

    /// The tile's columns where they lie in `side` (input or output), given the step between them.
    fn place(&self, (data, stride): (*mut f32, [usize; 4]), step: usize, tile: &Tile) -> Matrix {
        let positions = self.shape.unfold.out[0] * self.shape.unfold.out[1];
        let offset = tile.first / positions * stride[0] + tile.first % positions * step;
        Matrix { data: data.wrapping_add(offset), row: stride[1], column: step }
    }

    /// # Safety
    /// The views behind the group are inside live memory, the output used by this call alone.
    unsafe fn forward(
        &self,
        bias: Option<(*mut f32, usize)>,
        columns: &mut [f32],
        rows: &mut [f32],
    ) {
        let (shape, out_channels) = (self.shape, self.shape.channels[1]);
        let in_place = shape.column_step(&self.output.1);
        let pointwise = in_place.and_then(|_| shape.pointwise(&self.input.1));
        for tile in shape.tiles(in_place.is_some(), out_channels) {
            let into = match in_place {
                Some(step) => self.place(self.output, step, &tile),
                None => Matrix { data: rows.as_mut_ptr(), row: tile.count, column: 1 },
            };
            let mut beta = 0.0;
            if let Some(step) = pointwise {
                for (first, count, weight) in self.weights(0..shape.kernel_elements()) {
                    let mut pixels = self.place(self.input, step, &tile);
                    pixels.data = pixels.data.wrapping_add(first * pixels.row);
                    // SAFETY: the tile's columns lie inside input and output, the pieces inside the
                    // weights.
                    unsafe {
                        product_of(
                            [out_channels, count, tile.count],
                            1.0,
                            weight,
                            pixels,
                            beta,
                            into,
                        )
                    };
                    beta = 1.0;
                }
            } else {
                for chunk in shape.chunks(tile.count) {
                    // SAFETY: the input is inside live memory, and only read.
                    unsafe {
                        unfold_tile(
                            &shape.unfold,
                            self.input.0,
                            &self.input.1,
                            chunk.clone(),
                            tile.first,
                            tile.count,
                            columns,
                        )
                    };
                    for (first, count, weight) in self.weights(chunk.clone()) {
                        let data =
                            columns.as_mut_ptr().wrapping_add((first - chunk.start) * tile.count);
                        let unfolded = Matrix { data, row: tile.count, column: 1 };
                        // SAFETY: the chunk fits the scratch; output and weights as above.
                        unsafe {
                            product_of(
                                [out_channels, count, tile.count],
                                1.0,
                                weight,
                                unfolded,
                                beta,
                                into,
                            )
                        };
                        beta = 1.0;
                    }
                }
            }
            for channel in 0..out_channels {
                // SAFETY: the bias has one element for each output channel.
                let start = bias.map(|(data, step)| unsafe { *data.wrapping_add(channel * step) });
                if beta != 0.0 && start.is_none() {
                    break;
                }
                let row = into.data.wrapping_add(channel * into.row);
                for i in 0..tile.count {
                    // SAFETY: inside the tile's output.
                    let value = unsafe { &mut *row.wrapping_add(i * into.column) };
                    *value = start.unwrap_or(0.0) + if beta == 0.0 { 0.0 } else { *value };
                }
            }
            if in_place.is_none() {
                // SAFETY: the output's columns are inside live memory and used by this call alone.
                unsafe {
                    copy_columns::<true>(
                        &shape.unfold.out,
                        self.output,
                        out_channels,
                        tile.first,
                        tile.count,
                        rows,
                    )
                };
            }
        }
    }

    /// The gradient of the tile's outputs, gathered into `rows` where it can't be used in place.
    ///
    /// # Safety
    /// As [`Group::forward`], with the output only read.
    unsafe fn gradient(&self, in_place: Option<usize>, tile: &Tile, rows: &mut [f32]) -> Matrix {
        if let Some(step) = in_place {
            return self.place(self.output, step, tile);
        }
        // SAFETY: the caller's promise.
        unsafe {
            copy_columns::<false>(
                &self.shape.unfold.out,
                self.output,
                self.shape.channels[1],
                tile.first,
                tile.count,
                rows,
            )
        };
        Matrix { data: rows.as_mut_ptr(), row: tile.count, column: 1 }
    }

    /// Adds to an input gradient that starts as zeros.
    ///
    /// # Safety
    /// As [`Group::forward`], with the input's place taken by its gradient, which this call alone
    /// uses.
    unsafe fn backward_input(&self, columns: &mut [f32], rows: &mut [f32]) {
        let (shape, out_channels) = (self.shape, self.shape.channels[1]);
        let in_place = shape.column_step(&self.output.1);
        let pointwise = in_place.and_then(|_| shape.pointwise(&self.input.1));
        for tile in shape.tiles(in_place.is_some(), out_channels) {
            // SAFETY: the caller's promise.
            let gradient = unsafe { self.gradient(in_place, &tile, rows) };
            let turned =
                |weight: Matrix| Matrix { row: weight.column, column: weight.row, ..weight };
            if let Some(step) = pointwise {
                for (first, count, weight) in self.weights(0..shape.kernel_elements()) {
                    let mut pixels = self.place(self.input, step, &tile);
                    pixels.data = pixels.data.wrapping_add(first * pixels.row);
                    // SAFETY: the tile's columns lie inside input and output, the pieces inside the
                    // weights.
                    unsafe {
                        product_of(
                            [count, out_channels, tile.count],
                            1.0,
                            turned(weight),
                            gradient,
                            0.0,
                            pixels,
                        )
                    };
                }
                continue;
            }
            for chunk in shape.chunks(tile.count) {
                for (first, count, weight) in self.weights(chunk.clone()) {
                    let data =
                        columns.as_mut_ptr().wrapping_add((first - chunk.start) * tile.count);
                    let unfolded = Matrix { data, row: tile.count, column: 1 };
                    // SAFETY: the chunk fits the scratch; gradient and weights are inside live
                    // memory.
                    unsafe {
                        product_of(
                            [count, out_channels, tile.count],
                            1.0,
                            turned(weight),
                            gradient,
                            0.0,
                            unfolded,
                        )
                    };
                }
                // SAFETY: the input gradient is inside live memory and used by this call alone.
                unsafe {
                    fold_tile(
                        &shape.unfold,
                        self.input.0,
                        &self.input.1,
                        chunk,
                        tile.first,
                        tile.count,
                        columns,
                    )
                };
            }
        }
    }

    /// Adds to a weight gradient that starts as zeros.
    ///
    /// # Safety
    /// As [`Group::forward`], with the weights' place taken by their gradient, which this call
    /// alone uses.
    unsafe fn backward_weight(&self, columns: &mut [f32], rows: &mut [f32]) {
        let (shape, out_channels) = (self.shape, self.shape.channels[1]);
        let in_place = shape.column_step(&self.output.1);
        let pointwise = in_place.and_then(|_| shape.pointwise(&self.input.1));
        for tile in shape.tiles(in_place.is_some(), out_channels) {
            // SAFETY: the caller's promise.
            let gradient = unsafe { self.gradient(in_place, &tile, rows) };
            if let Some(step) = pointwise {
                for (first, count, weight) in self.weights(0..shape.kernel_elements()) {
                    let pixels = self.place(self.input, step, &tile);
                    let turned = Matrix {
                        data: pixels.data.wrapping_add(first * pixels.row),
                        row: pixels.column,
                        column: pixels.row,
                    };
                    // SAFETY: the tile's columns lie inside input and output, the pieces inside the
                    // weights.
                    unsafe {
                        product_of(
                            [out_channels, tile.count, count],
                            1.0,
                            gradient,
                            turned,
                            1.0,
                            weight,
                        )
                    };
                }
                continue;
            }
            for chunk in shape.chunks(tile.count) {
                // SAFETY: the input is inside live memory, and only read.
                unsafe {
                    unfold_tile(
                        &shape.unfold,
                        self.input.0,
                        &self.input.1,
                        chunk.clone(),
                        tile.first,
                        tile.count,
                        columns,
                    )
                };
                for (first, count, weight) in self.weights(chunk.clone()) {
                    let data =
                        columns.as_mut_ptr().wrapping_add((first - chunk.start) * tile.count);
                    let turned = Matrix { data, row: 1, column: tile.count };
                    // SAFETY: the chunk fits the scratch; gradient and weights are inside live
                    // memory.
                    unsafe {
                        product_of(
                            [out_channels, tile.count, count],
                            1.0,
                            gradient,
                            turned,
                            1.0,
                            weight,
                        )
                    };
                }
            }
        }
    }
}

/// Runs `work` for each group of a convolution between `input`, `weight` and `output`, whose shapes
/// have been checked.
fn each_group(
    shape: &Shape,
    [input, weight, output]: [&View; 3],
    mut work: impl FnMut(usize, &Group<'_>, &mut [f32], &mut [f32]),
) {
    let four = |view: &View| -> [usize; 4] { std::array::from_fn(|i| view.stride[i]) };
    let [is, ws, os] = [four(input), four(weight), four(output)];
    let [channels_in, channels_out] = shape.channels;
    with_tiles(|columns, rows| {
        for g in 0..shape.groups {
            let group = Group {
                shape,
                input: (base(input).wrapping_add(g * channels_in * is[1]), is),
                output: (base(output).wrapping_add(g * channels_out * os[1]), os),
                weight: (base(weight).wrapping_add(g * channels_out * ws[0]), ws),
            };
            work(g, &group, columns, rows);
        }
    });
}

/// The convolution of argument 0 by argument 1, with the bias in argument `bias`.
///
/// # Errors
/// When shapes and arguments contradict each other.
pub fn forward(call: &Call<'_>, bias: Option<usize>, places: Places) -> Result<(), KernelError> {
    f32_operands(call)?;
    let (input, weight) = (real(call, 0)?, real(call, 1)?);
    let of = Convolution::new(call, &input.shape, weight, places)?;
    let output = shaped(call, 0, &of.output())?;
    let bias = bias_of(call, bias, of.output()[1])?;
    // SAFETY: all operands are of f32, their shapes agree, and the output is apart.
    unsafe { images_forward(&Shape::new(&of, weight)?, [input, weight, output], bias) };
    Ok(())
}

fn bias_of<'a>(
    call: &'a Call<'_>,
    at: Option<usize>,
    channels: usize,
) -> Result<Option<&'a View>, KernelError> {
    let bias = at.map(|at| maybe_real(call, at)).transpose()?.flatten();
    bias.map_or(Ok(()), |bias| expect_shape("its bias", bias, &[channels]))?;
    Ok(bias)
}

/// # Safety
/// The views are of f32 and of the shapes that `shape` says; the output is apart from all others.
unsafe fn images_forward(shape: &Shape, views: [&View; 3], bias: Option<&View>) {
    each_group(shape, views, |g, group, columns, rows| {
        let bias = bias.map(|view| {
            (base(view).wrapping_add(g * shape.channels[1] * view.stride[0]), view.stride[0])
        });
        // SAFETY: the caller's promise.
        unsafe { group.forward(bias, columns, rows) };
    });
}

/// # Safety
/// As [`images_forward`], with the first view written.
unsafe fn images_backward(shape: &Shape, views: [&View; 3]) {
    // SAFETY: the caller's promise.
    unsafe { fill(views[0], 0.0) };
    // SAFETY: the caller's promise.
    each_group(shape, views, |_, group, columns, rows| unsafe {
        group.backward_input(columns, rows)
    });
}

/// # Safety
/// As [`images_forward`], with the second view written.
unsafe fn weights_backward(shape: &Shape, views: [&View; 3]) {
    // SAFETY: the caller's promise.
    unsafe { fill(views[1], 0.0) };
    // SAFETY: the caller's promise.
    each_group(shape, views, |_, group, columns, rows| unsafe {
        group.backward_weight(columns, rows)
    });
}

/// A transposed convolution is the gradient of the convolution from its output to its input.
///
/// # Errors
/// As [`forward`].
pub fn transposed(call: &Call<'_>, places: Places) -> Result<(), KernelError> {
    f32_operands(call)?;
    let (input, weight) = (real(call, 0)?, real(call, 1)?);
    let output = result(call, 0)?.ok_or("it has no output 0")?;
    let of = Convolution::transposed(call, &output.shape, &input.shape, weight, places)?;
    let output = shaped(call, 0, &output.shape)?;
    let bias = bias_of(call, Some(2), output.shape[1])?;
    // SAFETY: all operands are of f32, their shapes agree, and the output is apart.
    unsafe { images_backward(&Shape::new(&of, weight)?, [output, weight, input]) };
    if let Some(bias) = bias {
        let steps = [0, bias.stride[0], 0, 0];
        runs(&output.shape, [&output.stride, &steps], |[o, b], [os, bs], length| {
            for i in 0..length {
                // SAFETY: runs stay inside the two views.
                unsafe {
                    *base(output).wrapping_add(o + i * os) += *base(bias).wrapping_add(b + i * bs)
                };
            }
        });
    }
    Ok(())
}

/// # Errors
/// As [`forward`].
pub fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    f32_operands(call)?;
    let (gradient, input, weight) = (real(call, 0)?, real(call, 1)?, real(call, 2)?);
    let (transposed, wanted) = (flag(call, 7)?, mask(call, 10)?);
    let (of, large, small) = Convolution::backward(call, [gradient, input, weight], transposed)?;
    let present = |at: usize| wanted[at] && call.outputs.get(at).is_some_and(Option::is_some);
    if present(0) {
        let (into, shape) = (shaped(call, 0, &input.shape)?, Shape::new(&of, weight)?);
        // SAFETY: all operands are of f32, their shapes agree, and the output is apart.
        unsafe {
            if transposed {
                images_forward(&shape, [gradient, weight, into], None);
            } else {
                images_backward(&shape, [into, weight, gradient]);
            }
        }
    }
    if present(1) {
        let into = shaped(call, 1, &weight.shape)?;
        // The order of unfolding follows the weights that are written here.
        // SAFETY: as above.
        unsafe { weights_backward(&Shape::new(&of, into)?, [large, into, small]) };
    }
    if present(2) {
        let into = shaped(call, 2, &gradient.shape[1..2])?;
        let (plane, steps) = (
            [gradient.shape[0], gradient.shape[2], gradient.shape[3]],
            [gradient.stride[0], gradient.stride[2], gradient.stride[3]],
        );
        for channel in 0..gradient.shape[1] {
            let start = base(gradient).wrapping_add(channel * gradient.stride[1]);
            let mut sum = 0.0;
            runs(&plane, [&steps], |[at], [step], length| {
                // SAFETY: runs stay inside the gradient.
                sum += unsafe { total(start.wrapping_add(at), step, length) }
            });
            // SAFETY: one element for each channel, checked by `shaped`.
            unsafe { *base(into).wrapping_add(channel * into.stride[0]) = sum as f32 };
        }
    }
    Ok(())
}

/// The sum of `length` floats, in double precision and a fixed order.
///
/// # Safety
/// They lie inside live memory that no thread writes.
pub unsafe fn total(start: *const f32, step: usize, length: usize) -> f64 {
    if step != 1 {
        // SAFETY: the caller's promise.
        return (0..length).map(|i| f64::from(unsafe { *start.wrapping_add(i * step) })).sum();
    }
    // SAFETY: the caller's promise.
    let values = unsafe { std::slice::from_raw_parts(start, length) };
    let mut lanes = [0.0f64; 8];
    let chunks = values.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().map(|&x| f64::from(x)).sum();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x);
        }
    }
    lanes.iter().sum::<f64>() + rest
}
