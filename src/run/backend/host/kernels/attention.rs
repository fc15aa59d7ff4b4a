//! Scaled dot-product attention and its gradient, tile by tile.
//!
//! Nothing of the size of the attention matrix is kept: forward leaves the logarithm of each row's sum,
//! backward computes the probabilities again from it, and draws the same dropout mask. Not for: paths
//! that a framework takes apart itself, whose pieces are ordinary operators.

use super::super::view::{Call, TILE_BYTES, View};
use super::Kernel;
use super::arguments::{
    flag, floating, maybe_number, maybe_tensor, number_or, output, result, tensor,
};
use super::elements::{at, broadcast, fill, read, same_shape, sum_of, write};
use super::math::exp;
use super::random::{Random, survivors};
use crate::job::{Arg, Dtype};

/// The kernel for `kind`.
pub fn find(kind: &str) -> Option<Kernel> {
    let kernel: Kernel = match kind.strip_prefix("aten::")? {
        "scaled_dot_product_attention" => |c| {
            let call = Forward {
                bias: maybe_tensor(c, 3)?,
                share: number_or(c, 4, 0.0)?,
                causal: flag(c, 5),
                scale: maybe_number(c, 6)?,
            };
            forward(c, &call)
        },
        "_scaled_dot_product_efficient_attention" => |c| {
            let call = Forward {
                bias: maybe_tensor(c, 3)?,
                share: number_or(c, 5, 0.0)?,
                causal: flag(c, 6),
                scale: maybe_number(c, 7)?,
            };
            forward(c, &call)
        },
        "_scaled_dot_product_flash_attention" => |c| {
            let call = Forward {
                bias: None,
                share: number_or(c, 3, 0.0)?,
                causal: flag(c, 4),
                scale: maybe_number(c, 6)?,
            };
            forward(c, &call)
        },
        "_scaled_dot_product_efficient_attention_backward" => |c| {
            let saved =
                Saved { bias: maybe_tensor(c, 4)?, out: tensor(c, 5)?, sums: tensor(c, 6)? };
            let wanted = |k: usize| !matches!(c.operator.args.get(10), Some(Arg::Bools(mask)) if !mask.get(k).copied().unwrap_or(false));
            if wanted(3) && result(c, 3)?.is_some() {
                return Err("the gradient of an attention bias is not supported".into());
            }
            backward(c, &saved, number_or(c, 9, 0.0)?, flag(c, 11), maybe_number(c, 12)?, wanted)
        },
        "_scaled_dot_product_flash_attention_backward" => |c| {
            let saved = Saved { bias: None, out: tensor(c, 4)?, sums: tensor(c, 5)? };
            backward(c, &saved, number_or(c, 10, 0.0)?, flag(c, 11), maybe_number(c, 14)?, |_| true)
        },
        _ => return None,
    };
    Some(kernel)
}

struct Forward<'a> {
    bias: Option<&'a View>,
    share: f64,
    causal: bool,
    scale: Option<f64>,
}

struct Saved<'a> {
    bias: Option<&'a View>,
    out: &'a View,
    sums: &'a View,
}

/// Rows of queries handled together, when keys are few enough.
const ROWS: usize = 64;

/// The extents, checked: batch, query heads, queries, keys, and the widths of queries and values.
struct Shape<'a> {
    q: &'a View,
    k: &'a View,
    v: &'a View,
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    width: usize,
    value_width: usize,
    /// Query heads for each head of keys and values.
    group: [usize; 2],
    scale: f32,
    causal: bool,
    share: f64,
    bias: Option<(&'a View, Vec<usize>)>,
    random: Random,
    rows: usize,
}

impl<'a> Shape<'a> {
    #[allow(clippy::too_many_arguments, reason = "one for each of the operator's arguments")]
    fn new(
        call: &Call<'_>,
        [q, k, v]: [&'a View; 3],
        bias: Option<&'a View>,
        share: f64,
        causal: bool,
        scale: Option<f64>,
        buffers: usize,
    ) -> Result<Self, String> {
        let fail = || format!("attention of shapes {:?}, {:?} and {:?}", q.shape, k.shape, v.shape);
        for view in [q, k, v] {
            matrix(view)?;
        }
        let (&[batch, heads, queries, width], &[kb, kh, keys, kw], &[vb, vh, vk, value_width]) =
            (&q.shape[..], &k.shape[..], &v.shape[..])
        else {
            return Err(fail());
        };
        let divides = |part: usize| part > 0 && heads % part == 0;
        if kb != batch
            || vb != batch
            || vk != keys
            || kw != width
            || heads > 0 && !(divides(kh) && divides(vh))
        {
            return Err(fail());
        }
        // A recorded scale has six decimals; the usual one is known exactly.
        let usual = 1.0 / (width.max(1) as f64).sqrt();
        let scale = scale.filter(|s| (s - usual).abs() > 6e-7).unwrap_or(usual) as f32;
        let bias = bias
            .map(|b| broadcast(b, &[batch, heads, queries, keys]).map(|s| (b, s)))
            .transpose()?;
        let rows = (TILE_BYTES / 4 / buffers / keys.max(1)).min(ROWS);
        if rows == 0 {
            return Err(format!("attention over {keys} keys, more than a tile holds"));
        }
        let group = [heads / kh.max(1), heads / vh.max(1)].map(|n| n.max(1));
        let random = Random { key: call.random_key, iteration: call.iteration };
        Ok(Self {
            q,
            k,
            v,
            batch,
            heads,
            queries,
            keys,
            width,
            value_width,
            group,
            scale,
            causal,
            share,
            bias,
            random,
            rows,
        })
    }

    /// Keys that any of the queries before `last` may see.
    fn seen(&self, last: usize) -> usize {
        if self.causal { self.keys.min(last) } else { self.keys }
    }

    /// `visit(batch, head, first query, queries)` for every tile.
    fn tiles(
        &self,
        mut visit: impl FnMut(usize, usize, usize, usize) -> Result<(), String>,
    ) -> Result<(), String> {
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
            Matrix::of(self.q, b, h).skip(first),
            Matrix::of(self.k, b, h / self.group[0]).transposed(),
        );
        multiply([rows, self.width, keys], self.scale, q, k, 0.0, Matrix::tile(scores, self.keys));
        for i in 0..rows {
            let row = &mut scores[i * self.keys..][..keys];
            if let Some((bias, stride)) = &self.bias {
                let start = b * stride[0] + h * stride[1] + (first + i) * stride[2];
                for (j, x) in row.iter_mut().enumerate() {
                    let value = read(bias, start + j * stride[3]);
                    if bias.dtype == Dtype::F32 {
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

/// Refuses what the matrix kernels can't read.
fn matrix(view: &View) -> Result<&View, String> {
    if view.shape.len() != 4 {
        return Err(format!(
            "attention over a tensor of shape {:?}, not of four dimensions",
            view.shape
        ));
    }
    if view.data.align_offset(4) != 0 {
        return Err("a tensor that is not aligned to its elements".into());
    }
    floating(view)
}

/// A strided matrix: its first element and its steps by row and column.
#[derive(Clone, Copy)]
struct Matrix {
    data: *mut f32,
    row: usize,
    column: usize,
}

impl Matrix {
    fn of(view: &View, b: usize, h: usize) -> Self {
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

fn forward(call: &Call<'_>, f: &Forward<'_>) -> Result<(), String> {
    let operands = [tensor(call, 0)?, tensor(call, 1)?, tensor(call, 2)?];
    let shape = Shape::new(call, operands, f.bias, f.share, f.causal, f.scale, 1)?;
    let (out, sums) = (matrix(output(call)?)?, result(call, 1)?);
    if out.shape != [shape.batch, shape.heads, shape.queries, shape.value_width] {
        return Err(format!("attention with a result of shape {:?}", out.shape));
    }
    let sums = sums.filter(|s| s.shape.iter().product::<usize>() > 0);
    if let Some(sums) = sums {
        row_sums(sums, &shape)?;
    }
    let factor = survivors(f.share);
    let mut tile = vec![0.0f32; shape.rows * shape.keys];
    let mut keep = vec![false; if f.share > 0.0 { shape.keys } else { 0 }];
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
            if f.share > 0.0 {
                shape.keep(b, h, first + i, &mut keep[..keys]);
                row.iter_mut()
                    .zip(&keep)
                    .for_each(|(x, &k)| *x = if k { *x * factor } else { 0.0 });
            }
        }
        let v = Matrix::of(shape.v, b, h / shape.group[1]);
        multiply(
            [rows, keys, shape.value_width],
            1.0,
            Matrix::tile(&mut tile, shape.keys),
            v,
            0.0,
            Matrix::of(out, b, h).skip(first),
        );
        Ok(())
    })
}

/// Refuses row sums of another shape; frameworks may pad the queries.
fn row_sums(sums: &View, shape: &Shape<'_>) -> Result<(), String> {
    match floating(sums)?.shape[..] {
        [b, h, n] if b == shape.batch && h == shape.heads && n >= shape.queries => Ok(()),
        _ => Err(format!("row sums of shape {:?}", sums.shape)),
    }
}

fn backward(
    call: &Call<'_>,
    saved: &Saved<'_>,
    share: f64,
    causal: bool,
    scale: Option<f64>,
    wanted: impl Fn(usize) -> bool,
) -> Result<(), String> {
    let grad = matrix(tensor(call, 0)?)?;
    let operands = [tensor(call, 1)?, tensor(call, 2)?, tensor(call, 3)?];
    let shape = Shape::new(call, operands, saved.bias, share, causal, scale, 2)?;
    let out = matrix(saved.out)?;
    same_shape(grad, out)?;
    if out.shape != [shape.batch, shape.heads, shape.queries, shape.value_width] {
        return Err(format!("attention with a result of shape {:?}", out.shape));
    }
    row_sums(saved.sums, &shape)?;
    let mut results = [None; 3];
    for (i, slot) in results.iter_mut().enumerate() {
        if let Some(view) = result(call, i)?.filter(|_| wanted(i)) {
            same_shape(matrix(view)?, operands[i])?;
            fill(view, 0.0)?;
            *slot = Some(view);
        }
    }
    let [dq, dk, dv] = results;
    let factor = survivors(share);
    let mut p = vec![0.0f32; shape.rows * shape.keys];
    let mut d = vec![0.0f32; shape.rows * shape.keys];
    let mut keep = vec![true; shape.keys];
    shape.tiles(|b, h, first, rows| {
        let keys = shape.seen(first + rows);
        let width = shape.keys;
        let (key_head, value_head) = (h / shape.group[0], h / shape.group[1]);
        let g = Matrix::of(grad, b, h).skip(first);
        shape.scores(b, h, first, rows, &mut p);
        multiply(
            [rows, shape.value_width, keys],
            1.0,
            g,
            Matrix::of(shape.v, b, value_head).transposed(),
            0.0,
            Matrix::tile(&mut d, width),
        );
        for i in 0..rows {
            let (p, d) = (&mut p[i * width..][..keys], &mut d[i * width..][..keys]);
            let sum = read(
                saved.sums,
                b * saved.sums.stride[0]
                    + h * saved.sums.stride[1]
                    + (first + i) * saved.sums.stride[2],
            ) as f32;
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
                for ((p, d), &k) in p.iter_mut().zip(d).zip(&keep) {
                    let kept = if k { factor } else { 0.0 };
                    *d = *p * (*d * kept - delta) * shape.scale;
                    *p *= kept;
                }
            } else {
                for (&mut p, d) in p.iter_mut().zip(d) {
                    *d = p * (*d - delta) * shape.scale;
                }
            }
        }
        let (p, d) = (Matrix::tile(&mut p, width), Matrix::tile(&mut d, width));
        if let Some(dq) = dq {
            multiply(
                [rows, keys, shape.width],
                1.0,
                d,
                Matrix::of(shape.k, b, key_head),
                0.0,
                Matrix::of(dq, b, h).skip(first),
            );
        }
        if let Some(dk) = dk {
            multiply(
                [keys, rows, shape.width],
                1.0,
                d.transposed(),
                Matrix::of(shape.q, b, h).skip(first),
                1.0,
                Matrix::of(dk, b, key_head),
            );
        }
        if let Some(dv) = dv {
            multiply(
                [keys, rows, shape.value_width],
                1.0,
                p.transposed(),
                g,
                1.0,
                Matrix::of(dv, b, value_head),
            );
        }
        Ok(())
    })
}
