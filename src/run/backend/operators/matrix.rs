//! Matrix products: what is multiplied with what, checked once for every backend.

use super::KernelError;
use super::arguments::{maybe_real, number_or, real, shaped};
use super::error::{invalid, unsupported};
use super::shapes::{broadcast, collapse};
use super::view::{Call, View};

/// `alpha * a b + beta * start`; without `start`, `alpha * a b`.
pub struct Affine<'a> {
    /// What is added, broadcast to the result.
    pub start: Option<&'a View>,
    /// The left factor.
    pub a: View,
    /// The right factor.
    pub b: View,
    /// Scales the product.
    pub alpha: f32,
    /// Scales what is added.
    pub beta: f32,
}

impl<'a> Affine<'a> {
    /// `mm`, `bmm` and `matmul`.
    ///
    /// # Errors
    /// When an argument is missing.
    pub fn product(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let (a, b) = (real(call, 0)?.clone(), real(call, 1)?.clone());
        Ok(Self { start: None, a, b, alpha: 1.0, beta: 0.0 })
    }

    /// `linear`: the weight is transposed, the bias added.
    ///
    /// # Errors
    /// When an argument is missing or the weight is no matrix.
    pub fn linear(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let (a, mut b) = (real(call, 0)?.clone(), real(call, 1)?.clone());
        if b.shape.len() != 2 {
            return Err(invalid!("a weight of shape {:?} is not a matrix", b.shape));
        }
        b.shape.reverse();
        b.stride.reverse();
        Ok(Self { start: maybe_real(call, 2)?, a, b, alpha: 1.0, beta: 1.0 })
    }

    /// `addmm` and `baddbmm`.
    ///
    /// # Errors
    /// When an argument is missing.
    pub fn added(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let (start, a, b) = (real(call, 0)?, real(call, 1)?.clone(), real(call, 2)?.clone());
        let (beta, alpha) = (number_or(call, 3, 1.0)? as f32, number_or(call, 4, 1.0)? as f32);
        Ok(Self { start: (beta != 0.0).then_some(start), a, b, alpha, beta })
    }
}

/// A product over all leading dimensions, as `torch.matmul` broadcasts them.
pub struct Product<'a> {
    /// The left factor, at least a matrix.
    pub a: View,
    /// The right factor, at least a matrix.
    pub b: View,
    /// The result.
    pub out: &'a View,
    /// Rows of `a`, the inner extent, columns of `b`.
    pub extents: [usize; 3],
    /// Steps from row to row and from column to column of `a`, `b` and the result.
    pub steps: [[usize; 2]; 3],
    /// Extents of the leading dimensions.
    pub batch: Vec<usize>,
    /// Steps of `a`, `b` and the result along them.
    pub batch_steps: [Vec<usize>; 3],
}

impl<'a> Product<'a> {
    /// What `a b` reads and writes.
    ///
    /// # Errors
    /// When the shapes don't fit each other or output 0, or the types differ.
    pub fn new(call: &'a Call<'_>, a: &View, b: &View) -> Result<Self, KernelError> {
        // A vector is a row on the left and a column on the right, and leaves no dimension behind.
        let (mut a, mut b) = (a.clone(), b.clone());
        let (row, column) = (a.shape.len() == 1, b.shape.len() == 1);
        if row {
            a.shape.insert(0, 1);
            a.stride.insert(0, 0);
        }
        if column {
            b.shape.push(1);
            b.stride.push(0);
        }
        let (&[ref a_batch @ .., m, k], &[ref b_batch @ .., k_too, n]) =
            (a.shape.as_slice(), b.shape.as_slice())
        else {
            return Err(invalid!("a product of {:?} and {:?} needs matrices", a.shape, b.shape));
        };
        if k != k_too {
            return Err(invalid!(
                "{:?} and {:?} do not agree on the inner extent",
                a.shape,
                b.shape
            ));
        }
        let longer = if a_batch.len() >= b_batch.len() { a_batch } else { b_batch };
        let mut batch = longer.to_vec();
        for other in [a_batch, b_batch] {
            let skip = batch.len() - other.len();
            for (extent, &n) in batch[skip..].iter_mut().zip(other) {
                if *extent == 1 {
                    *extent = n;
                }
            }
        }
        let leading = |view: &View, own: &[usize]| {
            let stride = view.stride[..own.len()].to_vec();
            broadcast(&View { shape: own.to_vec(), stride, ..view.clone() }, &batch)
        };
        let (a_steps, b_steps) = (leading(&a, a_batch)?, leading(&b, b_batch)?);
        let mut shape = batch.clone();
        shape.extend((!row).then_some(m));
        shape.extend((!column).then_some(n));
        let out = shaped(call, 0, &shape)?;
        if a.dtype != b.dtype || a.dtype != out.dtype {
            return Err(unsupported!(
                "a product of {:?} and {:?} into {:?}",
                a.dtype,
                b.dtype,
                out.dtype
            ));
        }
        let last = |view: &View| -> [usize; 2] {
            let rank = view.stride.len();
            [view.stride[rank - 2], view.stride[rank - 1]]
        };
        let out_steps = [
            if row { 0 } else { out.stride[batch.len()] },
            if column { 0 } else { out.stride[shape.len() - 1] },
        ];
        let mut product = Self {
            extents: [m, k, n],
            steps: [last(&a), last(&b), out_steps],
            batch_steps: [a_steps, b_steps, out.stride[..batch.len()].to_vec()],
            a,
            b,
            out,
            batch,
        };
        if !row {
            product.join_rows();
        }
        Ok(product)
    }

    /// Makes one taller matrix of batches that share the right factor and whose rows follow each
    /// other.
    fn join_rows(&mut self) {
        let [a_steps, b_steps, out_steps] = &self.batch_steps;
        let shared = b_steps.iter().zip(&self.batch).all(|(&s, &n)| s == 0 || n == 1);
        if self.batch.is_empty() || !shared {
            return;
        }
        let rows: Vec<usize> = self.batch.iter().copied().chain([self.extents[0]]).collect();
        let walk = |steps: &[usize], row: usize| {
            collapse(&rows, &steps.iter().copied().chain([row]).collect::<Vec<_>>())
        };
        let joined = walk(a_steps, self.steps[0][0]).zip(walk(out_steps, self.steps[2][0]));
        if let Some((a_row, out_row)) = joined {
            self.extents[0] = rows.iter().product();
            (self.steps[0][0], self.steps[2][0]) = (a_row, out_row);
            self.batch.clear();
            self.batch_steps = Default::default();
        }
    }
}
