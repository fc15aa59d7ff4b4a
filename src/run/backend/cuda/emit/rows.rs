//! Rows of tensors as kernels take them: outer dimensions, and a run of evenly spaced elements.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::floating;
use crate::backend::operators::error::unsupported;
use crate::backend::operators::view::View;

use super::super::launch::Actions;
use super::super::params::{Operand, Parts, RANK, Rows};
use super::map::{join, signed};

/// One operand of a rows kernel before its dimensions are joined.
#[derive(Clone, Debug)]
pub struct Row<'a> {
    /// The tensor; `None` for a number.
    pub view: Option<&'a View>,
    /// The number.
    pub value: f64,
    /// Strides of the outer dimensions.
    pub stride: Vec<i64>,
    /// Step inside a row.
    pub step: i64,
}

impl<'a> Row<'a> {
    /// A number, or what is not there.
    pub fn number(value: f64) -> Self {
        Self { view: None, value, stride: Vec::new(), step: 0 }
    }

    /// The rows along dimension `dim`.
    pub fn along(view: &'a View, dim: usize) -> Result<Self, KernelError> {
        floating(view)?;
        let mut stride = signed(&view.stride);
        let step = if stride.is_empty() { 1 } else { stride.remove(dim) };
        Ok(Self { view: Some(view), value: 0.0, stride, step })
    }

    /// The rows along the last `inner` dimensions, and their length.
    pub fn last(view: &'a View, inner: usize) -> Result<(Self, i64), KernelError> {
        floating(view)?;
        let split = view
            .shape
            .len()
            .checked_sub(inner)
            .ok_or("more normalised dimensions than the tensor has")?;
        let length = view.shape[split..].iter().product::<usize>() as i64;
        let (shape, strides) = join(&view.shape[split..], &[signed(&view.stride[split..])], false)?;
        let step = match (shape.len(), &strides[0][..]) {
            (0, _) => 1,
            (1, [step]) => *step,
            _ if length == 0 => 1,
            _ => {
                return Err(unsupported!(
                    "the last {inner} dimensions of strides {:?} are not one run",
                    view.stride
                ));
            }
        };
        Ok((
            Self { view: Some(view), value: 0.0, stride: signed(&view.stride[..split]), step },
            length,
        ))
    }

    /// One value for each row.
    pub fn each(view: Option<&'a View>, stride: &[usize]) -> Self {
        Self { view, value: 0.0, stride: signed(stride), step: 0 }
    }
}

/// Parameters over rows numbered by `outer`.
pub fn params(
    actions: &Actions,
    outer: &[usize],
    length: i64,
    rows: &[Row<'_>],
) -> Result<Rows, KernelError> {
    let real: Vec<&Row<'_>> = rows.iter().filter(|r| r.view.is_some()).collect();
    let strides: Vec<Vec<i64>> = real
        .iter()
        .map(|r| if r.stride.is_empty() { vec![0; outer.len()] } else { r.stride.clone() })
        .collect();
    let (shape, strides) = join(outer, &strides, false)?;
    if shape.len() >= RANK {
        return Err(unsupported!("rows over more than {} dimensions", RANK - 1));
    }
    let mut p = Rows {
        rows: outer.iter().product::<usize>() as i64,
        length,
        rank: shape.len() as i32,
        flags: 0,
        shape: [1; RANK],
        o: [Operand::number(0.0); 6],
        s: [0.0; 4],
        k: [0; 4],
        status: actions.status,
        item: actions.item,
        parts: Parts::new(1, 0, 1),
    };
    p.shape[..shape.len()].copy_from_slice(&shape);
    let mut strides = strides.iter();
    for (slot, row) in p.o.iter_mut().zip(rows) {
        *slot = match row.view {
            None => Operand::number(row.value),
            Some(view) => {
                let mut operand =
                    Operand::strided(view, strides.next().map_or(&[][..], Vec::as_slice))?;
                operand.stride[RANK - 1] = row.step;
                operand
            }
        };
    }
    Ok(p)
}
