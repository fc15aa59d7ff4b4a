//! Looking rows up by number: shapes, checked once for every backend.

use super::KernelError;
use super::arguments::{flag, floating, int_or, ints, output, tensor, tensors};
use super::error::{invalid, unsupported};
use super::shapes::{broadcast, dimension, same_shape};
use super::view::{Call, View};
use crate::job::Dtype;

/// Refuses indices that are not whole numbers.
///
/// # Errors
/// For other types.
pub fn whole(view: &View) -> Result<&View, KernelError> {
    if matches!(view.dtype, Dtype::I64 | Dtype::I32) {
        Ok(view)
    } else {
        Err(unsupported!("indices are {:?}, not whole numbers", view.dtype))
    }
}

/// Rows of dimension `dim` of a table; in the result the dimensions of the indices take its place.
pub struct Rows<'a> {
    /// The result.
    pub out: &'a View,
    /// Where rows are looked up.
    pub table: &'a View,
    /// Row numbers.
    pub indices: &'a View,
    /// Along which dimension of the table.
    pub dim: usize,
}

impl<'a> Rows<'a> {
    fn new(
        out: &'a View,
        table: &'a View,
        indices: &'a View,
        dim: usize,
    ) -> Result<Self, KernelError> {
        let rank = whole(indices)?.shape.len();
        let fits = dim < table.shape.len()
            && out.shape.len() + 1 == table.shape.len() + rank
            && out.shape[..dim] == table.shape[..dim]
            && out.shape[dim..dim + rank] == indices.shape[..]
            && out.shape[dim + rank..] == table.shape[dim + 1..];
        if !fits {
            return Err(invalid!(
                "rows of {:?} by indices of {:?} don't give {:?}",
                table.shape,
                indices.shape,
                out.shape
            ));
        }
        Ok(Self { out, table, indices, dim })
    }

    /// `embedding`.
    ///
    /// # Errors
    /// When the shapes don't fit.
    pub fn embedding(call: &'a Call<'_>) -> Result<Self, KernelError> {
        Self::new(output(call)?, tensor(call, 0)?, tensor(call, 1)?, 0)
    }

    /// `index_select`.
    ///
    /// # Errors
    /// When the shapes don't fit.
    pub fn index_select(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let (out, table, indices) = (output(call)?, tensor(call, 0)?, tensor(call, 2)?);
        let dim = dimension(int_or(call, 1, 0)?, table.shape.len())?;
        if indices.shape.len() != 1 {
            return Err(invalid!("rows by indices of {:?}", indices.shape));
        }
        Self::new(out, table, indices, dim)
    }
}

/// The gradient of an embedding's table, or of consecutive rows of it.
pub struct EmbeddingBackward<'a> {
    /// The gradient of the rows, (rows, width).
    pub out: &'a View,
    /// The first of these rows, and how many the table has.
    pub rows: (usize, usize),
    /// The gradient of what was looked up, (…, width).
    pub gradient: &'a View,
    /// Which rows were looked up.
    pub indices: &'a View,
    /// This row gets no gradient.
    pub padding: i64,
}

impl<'a> EmbeddingBackward<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// When the shapes don't fit.
    pub fn new(call: &'a Call<'_>) -> Result<Self, KernelError> {
        let (out, gradient, indices) =
            (floating(output(call)?)?, floating(tensor(call, 0)?)?, whole(tensor(call, 1)?)?);
        if flag(call, 4)? {
            return Err(unsupported!("gradients scaled by frequency are not supported"));
        }
        let rank = indices.shape.len();
        if out.shape.len() != 2
            || gradient.shape.len() != rank + 1
            || gradient.shape[..rank] != indices.shape
            || gradient.shape[rank] != out.shape[1]
        {
            return Err(invalid!(
                "gradients of {:?} for indices of {:?} and a table of {:?}",
                gradient.shape,
                indices.shape,
                out.shape
            ));
        }
        // A piece says which rows it makes (`job::arrange`).
        let rows = match ints(call, 2)?[..] {
            [first, all] => {
                (usize::try_from(first).unwrap_or(usize::MAX), usize::try_from(all).unwrap_or(0))
            }
            _ => (0, out.shape[0]),
        };
        if rows.0.checked_add(out.shape[0]).is_none_or(|end| end > rows.1) {
            return Err(invalid!("{} rows from {} on of {}", out.shape[0], rows.0, rows.1));
        }
        Ok(Self { out, rows, gradient, indices, padding: int_or(call, 3, -1)? })
    }
}

/// Checks an operator that picks elements along `dim` of `from` by `indices`, as many as `picked`
/// has.
fn along(from: &View, picked: &View, indices: &View, dim: usize) -> Result<(), KernelError> {
    same_shape(picked, whole(indices)?)?;
    let fits = picked.shape.len() == from.shape.len()
        && (0..from.shape.len()).all(|d| d == dim || picked.shape[d] <= from.shape[d]);
    if !fits || from.shape.is_empty() {
        return Err(invalid!("picking {:?} from {:?}", picked.shape, from.shape));
    }
    Ok(())
}

/// The dimension along which `gather` picks.
///
/// # Errors
/// When the shapes don't fit.
pub fn gather(call: &Call<'_>) -> Result<usize, KernelError> {
    let (out, from) = (output(call)?, tensor(call, 0)?);
    let dim = dimension(int_or(call, 1, 0)?, from.shape.len())?;
    along(from, out, tensor(call, 2)?, dim)?;
    Ok(dim)
}

/// The mask that is the only index of `tensor[mask]`, and how many dimensions stand before it.
///
/// # Errors
/// When argument 1 is no list of tensors.
pub fn mask(call: &Call<'_>) -> Result<Option<(View, usize)>, KernelError> {
    let list = tensors(call, 1)?;
    let mut given = list.iter().enumerate().filter_map(|(d, v)| Some((d, v.as_ref()?)));
    match (given.next(), given.next()) {
        (Some((first, mask)), None) if matches!(mask.dtype, Dtype::Bool | Dtype::U8) => {
            Ok(Some((mask.clone(), first)))
        }
        _ => Ok(None),
    }
}

/// `tensor[i, j, …]`: whole-number tensors for neighbouring dimensions, broadcast together.
pub struct Places<'a> {
    /// The first dimension that is indexed.
    pub first: usize,
    /// The indices' common shape, which takes the place of the indexed dimensions.
    pub shape: Vec<usize>,
    /// For each indexed dimension, the indices and their strides when broadcast.
    pub indices: Vec<(&'a View, Vec<usize>)>,
}

impl<'a> Places<'a> {
    /// The shape of what is read or written at the places of a `table`.
    ///
    /// # Errors
    /// As [`Places::new`].
    pub fn shape_of(call: &Call<'_>, table: &View) -> Result<Vec<usize>, KernelError> {
        let list = tensors(call, 1)?;
        let Some(first) = list.iter().position(Option::is_some) else {
            return Ok(table.shape.clone());
        };
        let given: Vec<&View> = list.iter().flatten().collect();
        let rank = given.iter().map(|v| v.shape.len()).max().unwrap_or(0);
        let mut common = vec![1; rank];
        for view in &given {
            for (d, &n) in view.shape.iter().rev().enumerate() {
                let slot = &mut common[rank - 1 - d];
                *slot = if *slot == 1 { n } else { *slot };
            }
        }
        let rest = table.shape.get(first + given.len()..).ok_or("more indices than dimensions")?;
        Ok([&table.shape[..first], &common, rest].concat())
    }

    /// The places in a `table` by the list in argument 1; `None` where no dimension is indexed.
    ///
    /// # Errors
    /// For indices of dimensions that are not neighbours, and when the shapes don't fit `picked`,
    /// the shape of what is read or written there.
    pub fn new(
        call: &'a Call<'_>,
        table: &View,
        picked: &[usize],
    ) -> Result<Option<Self>, KernelError> {
        let list = tensors(call, 1)?;
        let given: Vec<(usize, &View)> =
            list.iter().enumerate().filter_map(|(d, v)| Some((d, v.as_ref()?))).collect();
        let Some(&(first, _)) = given.first() else { return Ok(None) };
        if given.iter().enumerate().any(|(i, (d, _))| *d != first + i)
            || first + given.len() > table.shape.len()
        {
            return Err(unsupported!(
                "indices of dimensions that are not neighbours are not supported"
            ));
        }
        let rank = given.iter().map(|(_, v)| v.shape.len()).max().unwrap_or(0);
        let (before, after) = (&table.shape[..first], &table.shape[first + given.len()..]);
        if picked.len() != before.len() + rank + after.len()
            || !picked.starts_with(before)
            || !picked.ends_with(after)
        {
            return Err(invalid!("indexing {:?} into {picked:?}", table.shape));
        }
        let shape = picked[first..first + rank].to_vec();
        let indices = given
            .into_iter()
            .map(|(_, view)| Ok((view, broadcast(whole(view)?, &shape)?)))
            .collect::<Result<_, KernelError>>()?;
        Ok(Some(Self { first, shape, indices }))
    }
}
