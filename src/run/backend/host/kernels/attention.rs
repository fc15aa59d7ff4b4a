//! Scaled dot-product attention and its gradient, tile by tile.
//!
//! Nothing of the size of the attention matrix is kept: forward leaves the logarithm of each row's
//! sum, backward computes the probabilities again from it, and draws the same dropout mask. Not
//! for: paths that a framework takes apart itself, whose pieces are ordinary operators.

use crate::backend::operators::arguments::is_floating;
use crate::backend::operators::attention::{self, Attention};
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::random::survivors;
use crate::backend::operators::shapes::at;
use crate::backend::operators::view::{Call, TILE_BYTES, View};
use crate::backend::operators::{KernelError, Table, table};

use super::Kernel;
use super::elements::{fill, read, sum_of, write};
use super::math::exp;
use super::strided::f32_operands;

pub const TABLE: Table<Kernel> = table! {
    "scaled_dot_product_attention" | "_scaled_dot_product_efficient_attention"
    | "_scaled_dot_product_flash_attention" | "_scaled_dot_product_cudnn_attention" => forward,
    "_scaled_dot_product_efficient_attention_backward"
    | "_scaled_dot_product_flash_attention_backward"
    | "_scaled_dot_product_cudnn_attention_backward" => backward,
};

/// Rows of queries handled together, when keys are few enough.
const ROWS: usize = 64;

/// Attention over tiles of this many rows of queries.
struct Shape<'a> {
    of: Attention<'a>,
    rows: usize,
}

impl<'a> std::ops::Deref for Shape<'a> {
    type Target = Attention<'a>;

    fn deref(&self) -> &Attention<'a> {
        &self.of
    }
}

impl<'a> Shape<'a> {
    /// Has room for `buffers` buffers of a tile's rows.
    fn new(call: &Call<'_>, of: Attention<'a>, buffers: usize) -> Result<Self, KernelError> {
        f32_operands(call)?;
        if call.views().any(|view| is_floating(view) && view.data.align_offset(4) != 0) {
            return Err(invalid!("a tensor that is not aligned to its elements"));
        }
        match (TILE_BYTES / 4 / buffers / of.keys.max(1)).min(ROWS) {
            0 => Err(unsupported!("attention over {} keys, more than a tile holds", of.keys)),
            rows => Ok(Self { of, rows }),
        }
    }

    /// Keys that any of the queries before `last` may see.
    fn seen(&self, last: usize) -> usize {
        if self.causal { self.keys.min(last) } else { self.keys }
    }

    /// `visit(batch, head, first query, queries)` for every tile.
    fn tiles(
        &self,
        mut visit: impl FnMut(usize, usize, usize, usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        for b in 0..self.batch {
            for h in 0..self.heads {
                for first in (0..self.queries).step_by(self.rows) {
                    visit(b, h, first, self.rows.min(self.queries - first))?;
                }
            }
        }
        Ok(())
    }

    /// Scaled, biased scores of a tile, minus infinity where a query doesn't see a key.
    fn scores(&self, b: usize, h: usize, first: usize, rows: usize, scores: &mut [f32]) {
        let keys = self.seen(first + rows);
        let (q, k) = (
            Matrix::new(self.operands[0], b, h).skip(first),
            Matrix::new(self.operands[1], b, h / self.group[0]).transposed(),
        );
        multiply([rows, self.width, keys], self.scale, q, k, 0.0, Matrix::tile(scores, self.keys));
        for i in 0..rows {
            let row = &mut scores[i * self.keys..][..keys];
            if let Some((bias, stride)) = &self.bias {
                let start = b * stride[0] + h * stride[1] + (first + i) * stride[2];
                for (j, x) in row.iter_mut().enumerate() {
                    let value = read(bias, start + j * stride[3]);
                    if is_floating(bias) {
                        *x += value as f32;
                    } else if value == 0.0 {
                        *x = f32::NEG_INFINITY;
                    }
                }
            }
            if self.causal && first + i + 1 < keys {
                row[first + i + 1..].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// The dropout mask of one row of keys.
    fn keep(&self, b: usize, h: usize, query: usize, keep: &mut [bool]) {
        let row = (b * self.heads + h) as u64 * self.queries as u64 + query as u64;
        self.random.keep(self.share, row * self.keys as u64, keep);
    }
}

/// A strided matrix: its first element and its steps by row and column.
#[derive(Clone, Copy)]
struct Matrix {
    data: *mut f32,
    row: usize,
    column: usize,
}

impl Matrix {
    fn new(view: &View, b: usize, h: usize) -> Self {
        Self {
            data: at(view, b * view.stride[0] + h * view.stride[1]).cast(),
            row: view.stride[2],
            column: view.stride[3],
        }
    }

    fn tile(tile: &mut [f32], width: usize) -> Self {
        Self { data: tile.as_mut_ptr(), row: width, column: 1 }
    }

    fn skip(self, rows: usize) -> Self {
        Self { data: self.data.wrapping_add(rows * self.row), ..self }
    }

    fn transposed(self) -> Self {
        Self { data: self.data, row: self.column, column: self.row }
    }
}

/// `c = alpha a b + beta c` with `a` of m by k and `b` of k by n.
fn multiply([m, k, n]: [usize; 3], alpha: f32, a: Matrix, b: Matrix, beta: f32, c: Matrix) {
    let s = |step: usize| step as isize;
    // SAFETY: callers pass matrices inside checked views or tiles; `c` overlaps neither operand.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            alpha,
            a.data,
            s(a.row),
            s(a.column),
            b.data,
            s(b.row),
            s(b.column),
            beta,
            c.data,
            s(c.row),
            s(c.column),
        );
    }
}

fn forward(call: &Call<'_>) -> Result<(), KernelError> {
    let attention::Forward { of, out, sums } = attention::forward(call)?;
    let shape = Shape::new(call, of, 1)?;
    let factor = survivors(shape.share);
    let mut tile = vec![0.0f32; shape.rows * shape.keys];
    let mut keep = vec![false; if shape.share > 0.0 { shape.keys } else { 0 }];
    shape.tiles(|b, h, first, rows| {
        shape.scores(b, h, first, rows, &mut tile);
        let keys = shape.seen(first + rows);
        for i in 0..rows {
            let row = &mut tile[i * shape.keys..][..keys];
            let most =
                row.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m || x.is_nan() { x } else { m });
            // A row that sees nothing is zeros.
            let base = if most == f32::NEG_INFINITY { 0.0 } else { most };
            row.iter_mut().for_each(|x| *x = exp(*x - base));
            let sum = sum_of(keys, |j| f64::from(row[j]));
            let scale = if sum == 0.0 { 0.0 } else { (1.0 / sum) as f32 };
            row.iter_mut().for_each(|x| *x *= scale);
            if let Some(sums) = sums {
                write(
                    sums,
                    b * sums.stride[0] + h * sums.stride[1] + (first + i) * sums.stride[2],
                    (f64::from(base) + sum.ln()) as f32,
                );
            }
            if shape.share > 0.0 {
                shape.keep(b, h, first + i, &mut keep[..keys]);
                row.iter_mut()
                    .zip(&keep)
                    .for_each(|(x, &k)| *x = if k { *x * factor } else { 0.0 });
            }
        }
        let v = Matrix::new(shape.operands[2], b, h / shape.group[1]);
        multiply(
            [rows, keys, shape.value_width],
            1.0,
            Matrix::tile(&mut tile, shape.keys),
            v,
            0.0,
            Matrix::new(out, b, h).skip(first),
        );
        Ok(())
    })
}

fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    let attention::Backward { of, gradient: grad, out, sums, results, bias } =
        attention::backward(call)?;
    let shape = Shape::new(call, of, 2)?;
    for view in results.into_iter().chain([bias.map(|(view, _)| view)]).flatten() {
        fill(view, 0.0)?;
    }
    let [dq, dk, dv] = results;
    let (share, factor) = (shape.share, survivors(shape.share));
    let mut p = vec![0.0f32; shape.rows * shape.keys];
    let mut d = vec![0.0f32; shape.rows * shape.keys];
    let mut keep = vec![true; shape.keys];
    shape.tiles(|b, h, first, rows| {
        let keys = shape.seen(first + rows);
        let width = shape.keys;
        let (key_head, value_head) = (h / shape.group[0], h / shape.group[1]);
        let g = Matrix::new(grad, b, h).skip(first);
        shape.scores(b, h, first, rows, &mut p);
        multiply(
            [rows, shape.value_width, keys],
            1.0,
            g,
            Matrix::new(shape.operands[2], b, value_head).transposed(),
            0.0,
            Matrix::tile(&mut d, width),
        );
        for i in 0..rows {
            let (p, d) = (&mut p[i * width..][..keys], &mut d[i * width..][..keys]);
            let sum =
                read(sums, b * sums.stride[0] + h * sums.stride[1] + (first + i) * sums.stride[2])
                    as f32;
            if sum == f32::NEG_INFINITY {
                p.fill(0.0);
            } else {
                p.iter_mut().for_each(|x| *x = exp(*x - sum));
            }
            let [from, with] = [grad, out]
                .map(|v| (v, b * v.stride[0] + h * v.stride[1] + (first + i) * v.stride[2]));
            let delta = sum_of(shape.value_width, |j| {
                read(from.0, from.1 + j * from.0.stride[3])
                    * read(with.0, with.1 + j * with.0.stride[3])
            }) as f32;
            if share > 0.0 {
                shape.keep(b, h, first + i, &mut keep[..keys]);
                for ((p, d), &k) in p.iter_mut().zip(d.iter_mut()).zip(&keep) {
                    let kept = if k { factor } else { 0.0 };
                    *d = *p * (*d * kept - delta);
                    *p *= kept;
                }
            } else {
                for (&mut p, d) in p.iter_mut().zip(d.iter_mut()) {
                    *d = p * (*d - delta);
                }
            }
            if let Some((view, steps)) = bias {
                let start = b * steps[0] + h * steps[1] + (first + i) * steps[2];
                for (j, &d) in d.iter().enumerate() {
                    let to = start + j * steps[3];
                    write(view, to, read(view, to) as f32 + d);
                }
            }
            d.iter_mut().for_each(|d| *d *= shape.scale);
        }
        let (p, d) = (Matrix::tile(&mut p, width), Matrix::tile(&mut d, width));
        if let Some(dq) = dq {
            multiply(
                [rows, keys, shape.width],
                1.0,
                d,
                Matrix::new(shape.operands[1], b, key_head),
                0.0,
                Matrix::new(dq, b, h).skip(first),
            );
        }
        if let Some(dk) = dk {
            multiply(
                [keys, rows, shape.width],
                1.0,
                d.transposed(),
                Matrix::new(shape.operands[0], b, h).skip(first),
                1.0,
                Matrix::new(dk, b, key_head),
            );
        }
        if let Some(dv) = dv {
            multiply(
                [keys, rows, shape.value_width],
                1.0,
                p.transposed(),
                g,
                1.0,
                Matrix::new(dv, b, value_head),
            );
        }
        Ok(())
    })
}
