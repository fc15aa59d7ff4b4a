//! Products of vectors, and of a matrix with one, in double precision.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{Input, floating, number_or, output, real, shaped};
use crate::backend::operators::error::invalid;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{map2, read, write};

pub const TABLE: Table<Kernel> = table! {
    "dot" | "vdot" => |c| {
        let (a, b) = (real(c, 0)?, real(c, 1)?);
        let [n] = same_length(a, b)?;
        let sum: f64 = (0..n).map(|i| read(a, i * a.stride[0]) * read(b, i * b.stride[0])).sum();
        write(shaped(c, 0, &[])?, 0, sum as f32);
        Ok(())
    },
    "mv" => |c| matrix_vector(c, 0, None),
    "addmv" => |c| matrix_vector(c, 1, Some(real(c, 0)?)),
    "outer" | "ger" => outer,
};

fn same_length(a: &View, b: &View) -> Result<[usize; 1], KernelError> {
    match (&a.shape[..], &b.shape[..]) {
        (&[n], &[m]) if n == m => Ok([n]),
        _ => Err(invalid!("a product of vectors of shapes {:?} and {:?}", a.shape, b.shape)),
    }
}

/// `alpha matrix vector + beta start`; the matrix is argument `at`.
fn matrix_vector(call: &Call<'_>, at: usize, start: Option<&View>) -> Result<(), KernelError> {
    let (matrix, vector) = (real(call, at)?, real(call, at + 1)?);
    let (&[rows, columns], &[length]) = (&matrix.shape[..], &vector.shape[..]) else {
        return Err(invalid!("{:?} times a vector of {:?}", matrix.shape, vector.shape));
    };
    if columns != length {
        return Err(invalid!("{:?} times a vector of {length}", matrix.shape));
    }
    let (beta, alpha) = match start {
        Some(_) => (number_or(call, 3, 1.0)?, number_or(call, 4, 1.0)?),
        None => (0.0, 1.0),
    };
    let out = shaped(call, 0, &[rows])?;
    for row in 0..rows {
        let term = |i: usize| {
            let a = read(matrix, row * matrix.stride[0] + i * matrix.stride[1]);
            a * read(vector, i * vector.stride[0])
        };
        let sum: f64 = (0..columns).map(term).sum();
        let more = match start {
            Some(view) => {
                let step = view.stride.last().copied().filter(|_| view.shape != [1]).unwrap_or(0);
                beta * read(view, row * step)
            }
            None => 0.0,
        };
        write(out, row * out.stride[0], (alpha * sum + more) as f32);
    }
    Ok(())
}

/// Every element of one vector times every element of another.
fn outer(call: &Call<'_>) -> Result<(), KernelError> {
    let (out, a, b) = (floating(output(call)?)?, real(call, 0)?, real(call, 1)?);
    let (&[n], &[m]) = (&a.shape[..], &b.shape[..]) else {
        return Err(invalid!("an outer product of {:?} and {:?}", a.shape, b.shape));
    };
    if out.shape != [n, m] {
        return Err(invalid!("an outer product of {n} and {m} numbers into {:?}", out.shape));
    }
    let column = View { shape: vec![n, 1], stride: vec![a.stride[0], 0], ..a.clone() };
    map2::<f32>(out, &Input::View(&column), &Input::View(b), |a, b| a * b)
}
