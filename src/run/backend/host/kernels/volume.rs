//! Pooling in one and three dimensions, and adaptive maxima in two.
//!
//! Every image is seen as (batch, channels, depth, height, width): what is missing has extent 1.
//! Averages are summed in double precision. Two dimensions are the work of [`super::pool`].

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{
    flag, ints, maybe_int, output, real, result, shaped, tensor,
};
use crate::backend::operators::error::{data_error, invalid};
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};
use crate::job::Arg;

use super::Kernel;
use super::elements::{fill, read, read_int, write, write_int};

pub const TABLE: Table<Kernel> = table! {
    "max_pool1d" | "max_pool1d_with_indices" => |c| max(c, &Windows::new(c, 1, 0, Some(4))?),
    "max_pool3d" | "max_pool3d_with_indices" => |c| max(c, &Windows::new(c, 3, 0, Some(4))?),
    "max_pool3d_with_indices_backward" => |c| max_backward(c, 3, tensor(c, 7)?),
    "avg_pool1d" => |c| average(c, &Windows::new(c, 1, 0, None)?, false),
    "avg_pool3d" => |c| average(c, &Windows::new(c, 3, 0, None)?, false),
    "avg_pool3d_backward" => |c| average(c, &Windows::new(c, 3, 1, None)?, true),
    "adaptive_avg_pool1d" => |c| average(c, &Windows::even(c, 1, 0)?, false),
    "adaptive_avg_pool3d" | "_adaptive_avg_pool3d" => {
            |c| average(c, &Windows::even(c, 3, 0)?, false)
        },
    "_adaptive_avg_pool3d_backward" => |c| average(c, &Windows::even(c, 3, 1)?, true),
    "adaptive_max_pool1d" => |c| max(c, &Windows::even(c, 1, 0)?),
    "adaptive_max_pool2d" => |c| max(c, &Windows::even(c, 2, 0)?),
    "adaptive_max_pool3d" => |c| max(c, &Windows::even(c, 3, 0)?),
    "adaptive_max_pool2d_backward" => |c| max_backward(c, 2, tensor(c, 2)?),
    "adaptive_max_pool3d_backward" => |c| max_backward(c, 3, tensor(c, 2)?),
};

/// A view with five dimensions, of `rank` spatial ones.
pub fn lifted(view: &View, rank: usize) -> Result<View, KernelError> {
    let mut five = view.clone();
    let missing = (rank + 2).checked_sub(view.shape.len()).filter(|&missing| missing <= 1);
    let Some(missing) = missing else {
        return Err(invalid!("images of {rank} dimensions, not of shape {:?}", view.shape));
    };
    (0..missing).for_each(|_| insert(&mut five, 0));
    (0..3 - rank).for_each(|_| insert(&mut five, 2));
    Ok(five)
}

fn insert(view: &mut View, dim: usize) {
    view.shape.insert(dim, 1);
    view.stride.insert(dim, 0);
}

/// The windows along one dimension: the pixels under each, and how many count with the padding.
type Spans = Vec<(Vec<usize>, usize)>;

/// Windows over an image.
struct Windows {
    /// How many of the dimensions are the image's.
    rank: usize,
    /// Along depth, height and width.
    spans: [Spans; 3],
    /// What sums are divided by, in place of the pixels that count.
    divisor: Option<i64>,
    /// The padding counts.
    padding_counts: bool,
}

impl Windows {
    /// Windows of a fixed size over the image in argument `image`, whose numbers follow it;
    /// `dilation` counts from the image.
    fn new(
        call: &Call<'_>,
        rank: usize,
        image: usize,
        dilation: Option<usize>,
    ) -> Result<Self, KernelError> {
        let size = lifted(real(call, image)?, rank)?.shape;
        let list = |at: usize, otherwise: [i64; 3]| -> Result<[i64; 3], KernelError> {
            let given = ints(call, image + at)?;
            let mut all = otherwise;
            for (k, slot) in all[3 - rank..].iter_mut().enumerate() {
                match given.get(if given.len() == 1 { 0 } else { k }) {
                    Some(&n) if (0..1 << 24).contains(&n) => *slot = n,
                    Some(n) => return Err(invalid!("{n} in a list of extents")),
                    None => {}
                }
            }
            Ok(all)
        };
        let kernel = list(1, [1; 3])?;
        let stride = list(2, kernel)?;
        let padding = list(3, [0; 3])?;
        let steps = dilation.map_or(Ok([1; 3]), |at| list(at, [1; 3]))?;
        let ceil = flag(call, image + 4 + usize::from(dilation.is_some()))?;
        let mut spans: [Spans; 3] = Default::default();
        for i in 0..3 {
            if kernel[i] == 0 || stride[i] == 0 || steps[i] == 0 {
                return Err(invalid!("a window of {kernel:?} by {stride:?}"));
            }
            let extent = size[2 + i] as i64;
            let room = extent + 2 * padding[i] - steps[i] * (kernel[i] - 1) - 1
                + if ceil { stride[i] - 1 } else { 0 };
            let mut count = room.max(-1).div_euclid(stride[i]) + 1;
            if ceil && (count - 1) * stride[i] >= extent + padding[i] {
                count -= 1;
            }
            for o in 0..count {
                let start = o * stride[i] - padding[i];
                let inside = (0..kernel[i]).map(|k| start + k * steps[i]);
                let pixels = inside.filter(|p| (0..extent).contains(p)).map(|p| p as usize);
                let counted = (start + kernel[i]).min(extent + padding[i]) - start;
                spans[i].push((pixels.collect(), counted as usize));
            }
        }
        let with_padding = dilation.is_none();
        Ok(Self {
            rank,
            spans,
            divisor: if with_padding { maybe_int(call, image + 6)? } else { None },
            padding_counts: !matches!(call.operator.args.get(image + 5), Some(Arg::Bool(false))),
        })
    }

    /// Windows that split the image in argument `image` evenly; as many as the output has or,
    /// backward, as the gradient before the image.
    fn even(call: &Call<'_>, rank: usize, image: usize) -> Result<Self, KernelError> {
        let size = lifted(real(call, image)?, rank)?.shape;
        let pooled = if image > 0 { real(call, 0)? } else { output(call)? };
        let out = lifted(pooled, rank)?.shape;
        let spans = std::array::from_fn(|i| {
            let (from, to) = (size[2 + i], out[2 + i]);
            let span = |o: usize| (o * from / to..((o + 1) * from).div_ceil(to)).collect();
            (0..to).map(|o| (span(o), usize::MAX)).collect()
        });
        Ok(Self { rank, spans, divisor: None, padding_counts: false })
    }

    /// The pooled shape of an image of five dimensions.
    fn pooled(&self, image: &View) -> Vec<usize> {
        let counts = self.spans.iter().map(Vec::len);
        image.shape[..2].iter().copied().chain(counts).collect()
    }

    /// `visit` with the place of each window, the pixels under it and how many count.
    fn each(
        &self,
        image: &View,
        mut visit: impl FnMut([usize; 5], &[[usize; 5]], f64) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let mut pixels = Vec::new();
        for plane in 0..image.shape[0] * image.shape[1] {
            let (n, c) = (plane / image.shape[1], plane % image.shape[1]);
            for (d, (depths, deep)) in self.spans[0].iter().enumerate() {
                for (h, (rows, tall)) in self.spans[1].iter().enumerate() {
                    for (w, (columns, wide)) in self.spans[2].iter().enumerate() {
                        pixels.clear();
                        for &z in depths {
                            for &y in rows {
                                pixels.extend(columns.iter().map(|&x| [n, c, z, y, x]));
                            }
                        }
                        let counted = match self.divisor {
                            Some(fixed) => fixed as f64,
                            None if self.padding_counts => (deep * tall * wide) as f64,
                            None => pixels.len() as f64,
                        };
                        visit([n, c, d, h, w], &pixels, counted)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Where an element lies, in elements.
pub fn place(view: &View, at: [usize; 5]) -> usize {
    (0..5).map(|d| at[d] * view.stride[d]).sum()
}

fn max(call: &Call<'_>, windows: &Windows) -> Result<(), KernelError> {
    let image = lifted(real(call, 0)?, windows.rank)?;
    let out = lifted(output(call)?, windows.rank)?;
    if out.shape != windows.pooled(&image) {
        return Err(invalid!("{:?} pooled into {:?}", image.shape, out.shape));
    }
    let indices = result(call, 1)?.map(|view| lifted(view, windows.rank)).transpose()?;
    if let Some(view) = &indices
        && view.shape != out.shape
    {
        return Err(invalid!("indices of {:?} for {:?}", view.shape, out.shape));
    }
    windows.each(&image, |to, pixels, _| {
        let (mut best, mut at) = (f64::NEG_INFINITY, 0);
        for (i, &pixel) in pixels.iter().enumerate() {
            let value = read(&image, place(&image, pixel));
            // As PyTorch: the first of equals, and NaN wins.
            if i == 0 || value > best || value.is_nan() {
                let [_, _, z, y, x] = pixel;
                (best, at) = (value, (z * image.shape[3] + y) * image.shape[4] + x);
            }
        }
        write(&out, place(&out, to), best as f32);
        if let Some(view) = &indices {
            write_int(view, place(view, to), at as i64);
        }
        Ok(())
    })
}

/// Adds each gradient to the pixel that its index names.
fn max_backward(call: &Call<'_>, rank: usize, indices: &View) -> Result<(), KernelError> {
    let into = shaped(call, 0, &real(call, 1)?.shape)?;
    let (gradient, indices) = (lifted(real(call, 0)?, rank)?, lifted(indices, rank)?);
    fill(into, 0.0)?;
    let into = lifted(into, rank)?;
    if indices.shape != gradient.shape || gradient.shape[..2] != into.shape[..2] {
        return Err(invalid!("gradients of {:?} for {:?}", gradient.shape, into.shape));
    }
    let [rows, columns] = [into.shape[3], into.shape[4]];
    let strides = [gradient.stride.clone(), indices.stride.clone()];
    let mut outcome = Ok(());
    let mut at = [0; 5];
    crate::backend::operators::shapes::each(&gradient.shape, &strides, |[from, number]| {
        let index = read_int(&indices, number);
        let inside = into.shape[2] * rows * columns;
        match usize::try_from(index).ok().filter(|&i| i < inside) {
            Some(pixel) => {
                let [z, y, x] = [pixel / columns / rows, pixel / columns % rows, pixel % columns];
                let to = place(&into, [at[0], at[1], z, y, x]);
                write(&into, to, (read(&into, to) + read(&gradient, from)) as f32);
            }
            None => outcome = Err(data_error!("index {index} into an image of {inside} pixels")),
        }
        for d in (0..5).rev() {
            at[d] += 1;
            if at[d] < gradient.shape[d] {
                break;
            }
            at[d] = 0;
        }
    });
    outcome
}

/// Averages, or spreads gradients over the pixels.
fn average(call: &Call<'_>, windows: &Windows, backward: bool) -> Result<(), KernelError> {
    let image = real(call, usize::from(backward))?;
    let (pooled, image) = if backward {
        let into = shaped(call, 0, &image.shape)?;
        fill(into, 0.0)?;
        (lifted(real(call, 0)?, windows.rank)?, lifted(into, windows.rank)?)
    } else {
        (lifted(output(call)?, windows.rank)?, lifted(image, windows.rank)?)
    };
    if pooled.shape != windows.pooled(&image) {
        return Err(invalid!("{:?} pooled into {:?}", image.shape, pooled.shape));
    }
    windows.each(&image, |to, pixels, counted| {
        let at = place(&pooled, to);
        if backward {
            let share = read(&pooled, at) / counted;
            for &pixel in pixels {
                let slot = place(&image, pixel);
                write(&image, slot, (read(&image, slot) + share) as f32);
            }
        } else {
            let sum: f64 = pixels.iter().map(|&p| read(&image, place(&image, p))).sum();
            write(&pooled, at, (sum / counted) as f32);
        }
        Ok(())
    })
}
