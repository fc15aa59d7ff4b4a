//! Distances between all rows of two matrices, and their gradient.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{number_or, output, real};
use crate::backend::operators::error::invalid;
use crate::backend::operators::shapes::broadcast;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{fill, read, write};

pub const TABLE: Table<Kernel> = table! {
    "cdist" | "_cdist_forward" | "_euclidean_dist" => |call| {
            let order = if call.operator.kind.ends_with("_dist") { 2.0 } else { number_or(call, 2, 2.0)? };
            each(output(call)?, real(call, 0)?, real(call, 1)?, |out, a, b, to, rows| {
                let terms = (0..rows.width).map(|k| (rows.a(a, k) - rows.b(b, k)).abs());
                write(out, to, norm(terms, order) as f32);
            })
        },
    "_cdist_backward" => backward,
};

fn norm(terms: impl Iterator<Item = f64>, order: f64) -> f64 {
    if order == 0.0 {
        terms.filter(|t| *t != 0.0).count() as f64
    } else if order == 1.0 {
        terms.sum()
    } else if order == 2.0 {
        terms.map(|t| t * t).sum::<f64>().sqrt()
    } else if order == f64::INFINITY {
        terms.fold(0.0, f64::max)
    } else {
        terms.map(|t| t.powf(order)).sum::<f64>().powf(1.0 / order)
    }
}

/// Elements of the rows at two places.
struct Pair<'a> {
    views: [&'a View; 2],
    width: usize,
}

impl Pair<'_> {
    fn a(&self, at: usize, k: usize) -> f64 {
        read(self.views[0], at + k * self.views[0].stride[self.views[0].stride.len() - 1])
    }

    fn b(&self, at: usize, k: usize) -> f64 {
        read(self.views[1], at + k * self.views[1].stride[self.views[1].stride.len() - 1])
    }
}

/// `visit(distances, row of a, row of b, place of the distance, rows)` for every pair; batches are
/// broadcast.
fn each(
    distances: &View,
    a: &View,
    b: &View,
    mut visit: impl FnMut(&View, usize, usize, usize, &Pair<'_>),
) -> Result<(), KernelError> {
    let fail = || invalid!("distances of {:?} and {:?} as {:?}", a.shape, b.shape, distances.shape);
    let rank = distances.shape.len();
    let width = a.shape.last().copied().filter(|w| b.shape.last() == Some(w)).ok_or_else(fail)?;
    if rank < 2 || a.shape.len() < 2 || b.shape.len() < 2 {
        return Err(fail());
    }
    // A row of one, a column of the other: both seen with the shape of the distances.
    let seen = |of: &View, column: bool| {
        let mut view = of.clone();
        view.shape.pop();
        view.stride.pop();
        let at = if column { view.shape.len() - 1 } else { view.shape.len() };
        view.shape.insert(at, 1);
        view.stride.insert(at, 0);
        broadcast(&view, &distances.shape)
    };
    let strides = [distances.stride.clone(), seen(a, false)?, seen(b, true)?];
    let pair = Pair { views: [a, b], width };
    crate::backend::operators::shapes::each(&distances.shape, &strides, |[to, x, y]| {
        visit(distances, x, y, to, &pair);
    });
    Ok(())
}

/// `(grad, a, b, order, distances)` to the gradient of a.
fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    let (grad, a, b) = (real(call, 0)?, real(call, 1)?, real(call, 2)?);
    let (order, distances, out) = (number_or(call, 3, 2.0)?, real(call, 4)?, output(call)?);
    if out.shape != a.shape || grad.shape != distances.shape {
        return Err(invalid!("gradients of {:?} for {:?}", grad.shape, a.shape));
    }
    fill(out, 0.0)?;
    // Gradients and distances are two views of one shape, so they are walked together.
    let mut places = Vec::new();
    crate::backend::operators::shapes::each(&grad.shape, &[&grad.stride], |[at]| places.push(at));
    let mut places = places.into_iter();
    let same = View { data: out.data, ..out.clone() };
    let mut to_rows = Vec::new();
    each(distances, &same, b, |_, to, _, _, _| to_rows.push(to))?;
    let mut to_rows = to_rows.into_iter();
    let step = out.stride[out.stride.len() - 1];
    each(distances, a, b, |view, x, y, at, rows| {
        let (g, d) = (read(grad, places.next().unwrap_or(0)), read(view, at));
        let to = to_rows.next().unwrap_or(0);
        for k in 0..rows.width {
            let diff = rows.a(x, k) - rows.b(y, k);
            let slope = if diff == 0.0 || d == 0.0 || order == 0.0 {
                0.0
            } else if order == f64::INFINITY {
                if diff.abs() == d { diff.signum() } else { 0.0 }
            } else {
                diff.signum() * (diff.abs() / d).powf(order - 1.0)
            };
            let to = to + k * step;
            write(out, to, (read(out, to) + g * slope) as f32);
        }
    })
}
