//! Sums, means and maxima of rows of a table, bag by bag, and the table's gradient.

use crate::backend::operators::KernelError;
use crate::backend::operators::arguments::{
    flag, int_or, maybe_real, real, result, shaped, tensor,
};
use crate::backend::operators::error::{data_error, invalid, unsupported};
use crate::backend::operators::index::whole;
use crate::backend::operators::view::{Call, View};
use crate::backend::operators::{Table, table};

use super::Kernel;
use super::elements::{fill, read, read_int, write, write_int};

pub const TABLE: Table<Kernel> = table! {
    "embedding_bag" | "_embedding_bag" | "_embedding_bag_forward_only" => forward,
    "_embedding_bag_backward" | "_embedding_bag_dense_backward" => backward,
};

/// Which bag each index is in, and the rows that count.
struct Bags {
    /// For each bag, places in the list of indices and rows of the table.
    members: Vec<Vec<(usize, usize)>>,
}

impl Bags {
    fn new(
        indices: &View,
        offsets: &View,
        rows: usize,
        padding: i64,
        with_end: bool,
    ) -> Result<Self, KernelError> {
        let (&[count], &[starts]) = (&whole(indices)?.shape[..], &whole(offsets)?.shape[..]) else {
            return Err(invalid!("bags of {:?} that start at {:?}", indices.shape, offsets.shape));
        };
        let bags = if with_end { starts.saturating_sub(1) } else { starts };
        let start = |bag: usize| {
            let at = if bag < starts {
                read_int(offsets, bag * offsets.stride[0])
            } else {
                count as i64
            };
            usize::try_from(at).ok().filter(|&at| at <= count)
        };
        let mut members = Vec::with_capacity(bags);
        for bag in 0..bags {
            let (Some(from), Some(to)) = (start(bag), start(bag + 1)) else {
                return Err(data_error!("bag {bag} starts outside {count} indices"));
            };
            let mut own = Vec::new();
            for at in from..to {
                let index = read_int(indices, at * indices.stride[0]);
                let row = usize::try_from(index).ok().filter(|&row| row < rows);
                let row = row.ok_or_else(|| data_error!("index {index} into {rows} rows"))?;
                if index != padding {
                    own.push((at, row));
                }
            }
            members.push(own);
        }
        Ok(Self { members })
    }

    fn bag_of(&self, count: usize) -> Vec<usize> {
        let mut of = vec![0; count];
        for (bag, own) in self.members.iter().enumerate() {
            own.iter().for_each(|&(at, _)| of[at] = bag);
        }
        of
    }
}

fn row(view: &View, at: usize) -> usize {
    at * view.stride[0]
}

/// `(weight, indices, offsets, scale_by_frequency, mode, sparse, weights, with_end, padding)`.
fn forward(call: &Call<'_>) -> Result<(), KernelError> {
    let (table, indices, offsets) = (real(call, 0)?, tensor(call, 1)?, tensor(call, 2)?);
    let (mode, weights) = (int_or(call, 4, 0)?, maybe_real(call, 6)?);
    let &[rows, width] = &table.shape[..] else {
        return Err(invalid!("a table of shape {:?}", table.shape));
    };
    let bags = Bags::new(indices, offsets, rows, int_or(call, 8, -1)?, flag(call, 7)?)?;
    let out = shaped(call, 0, &[bags.members.len(), width])?;
    let most = result(call, 3)?.filter(|v| v.shape.len() == 2);
    for (bag, own) in bags.members.iter().enumerate() {
        for column in 0..width {
            let value = |&(at, r): &(usize, usize)| {
                let weight = weights.map_or(1.0, |w| read(w, at * w.stride[0]));
                weight * read(table, row(table, r) + column * table.stride[1])
            };
            let result = match mode {
                0 => own.iter().map(value).sum::<f64>(),
                1 => own.iter().map(value).sum::<f64>() / own.len().max(1) as f64,
                2 => {
                    let mut best = own.first().map(|m| (value(m), m.1));
                    for m in own.iter().skip(1) {
                        if best.is_none_or(|(b, _)| value(m) > b) {
                            best = Some((value(m), m.1));
                        }
                    }
                    if let Some(view) = most {
                        let at = bag * view.stride[0] + column * view.stride[1];
                        write_int(view, at, best.map_or(0, |(_, r)| r as i64));
                    }
                    best.map_or(0.0, |(value, _)| value)
                }
                other => return Err(unsupported!("bags by mode {other}")),
            };
            write(out, row(out, bag) + column * out.stride[1], result as f32);
        }
    }
    let of = bags.bag_of(indices.shape[0]);
    if let Some(view) = result(call, 1)?.filter(|v| v.shape == [of.len()]) {
        of.iter().enumerate().for_each(|(i, &b)| write_int(view, i * view.stride[0], b as i64));
    }
    if let Some(view) = result(call, 2)?.filter(|v| v.shape == [bags.members.len()]) {
        for (bag, own) in bags.members.iter().enumerate() {
            write_int(view, bag * view.stride[0], own.len() as i64);
        }
    }
    Ok(())
}

/// Whether a bag has no index.
fn is_empty(offsets: &View, bag: usize, count: usize) -> bool {
    let start = |bag: usize| {
        let inside = offsets.shape.first().is_some_and(|&starts| bag < starts);
        if inside { read_int(offsets, bag * offsets.stride[0]) } else { count as i64 }
    };
    start(bag) == start(bag + 1)
}

/// `(grad, indices, offsets, bags, sizes, largest, rows, scale, mode, …, weights, padding)`; the
/// dense form lacks the offsets, and `sparse` before the weights.
fn backward(call: &Call<'_>) -> Result<(), KernelError> {
    let dense = call.operator.kind.contains("dense");
    let (at, last) = if dense { (1, 0) } else { (2, 2) };
    let (grad, indices, of) = (real(call, 0)?, tensor(call, 1)?, tensor(call, at + 1)?);
    let mode = int_or(call, at + 6, 0)?;
    if flag(call, at + 5)? {
        return Err(unsupported!("gradients scaled by frequency are not supported"));
    }
    let weights = maybe_real(call, 8 + last)?;
    let padding = int_or(call, 9 + last, -1)?;
    let out =
        shaped(call, 0, &[usize::try_from(int_or(call, at + 4, 0)?).unwrap_or(0), grad.shape[1]])?;
    fill(out, 0.0)?;
    let add = |r: usize, column: usize, value: f64| {
        let to = row(out, r) + column * out.stride[1];
        write(out, to, (read(out, to) + value) as f32);
    };
    let (rows, width) = (out.shape[0], out.shape[1]);
    let inside = |index: i64, extent: usize| {
        usize::try_from(index)
            .ok()
            .filter(|&i| i < extent)
            .ok_or_else(|| data_error!("index {index} into {extent} rows"))
    };
    if mode == 2 {
        let most = tensor(call, at + 3)?;
        for bag in 0..grad.shape[0] {
            // What stands for the largest of an empty bag is not said; its bounds are.
            if !dense && is_empty(tensor(call, 2)?, bag, indices.shape[0]) {
                continue;
            }
            for column in 0..width {
                let index = read_int(most, bag * most.stride[0] + column * most.stride[1]);
                let value = read(grad, row(grad, bag) + column * grad.stride[1]);
                add(inside(index, rows)?, column, value);
            }
        }
        return Ok(());
    }
    let sizes = tensor(call, at + 2)?;
    for i in 0..indices.shape.first().copied().unwrap_or(0) {
        let index = read_int(indices, i * indices.stride[0]);
        let bag = inside(read_int(of, i * of.stride[0]), grad.shape[0])?;
        if index == padding {
            continue;
        }
        let r = inside(index, rows)?;
        let share = match mode {
            1 => 1.0 / (read_int(sizes, bag * sizes.stride[0]).max(1) as f64),
            _ => weights.map_or(1.0, |w| read(w, i * w.stride[0])),
        };
        for column in 0..width {
            add(r, column, share * read(grad, row(grad, bag) + column * grad.stride[1]));
        }
    }
    Ok(())
}
