//! Steps turned into kernel calls once, so that an iteration allocates nothing.

use super::arena::{Arena, POISON};
use super::kernels::{Kernel, half};
use crate::backend::operators::KernelError;
use crate::backend::operators::error::{invalid, unsupported};
use crate::backend::operators::view::{Call, Operand as Seen, View};
use crate::backend::{Capture, Failure, StepWork};
use crate::job::{Arg, Dtype, Graph, Operand};
use crate::units::Bytes;

/// Finds the kernel for an operator kind.
pub type Lookup = fn(&str) -> Option<Kernel>;

/// A step that is ready to run as often as wanted.
pub struct Prepared<'a> {
    work: &'a StepWork,
    kernel: Kernel,
    args: Vec<Seen>,
    outputs: Vec<Option<View>>,
    hidden: Vec<View>,
    /// Filled before it runs, when poisoning.
    begins: Vec<(*mut u8, usize)>,
    capture: Option<(*const u8, Dtype)>,
}

impl<'a> Prepared<'a> {
    /// Resolves a step's addresses in `arena`.
    ///
    /// # Errors
    /// When there is no kernel, or a view lies outside the arena.
    pub fn new(
        graph: &Graph,
        work: &'a StepWork,
        arena: &Arena,
        kernels: Lookup,
    ) -> Result<Self, Failure> {
        let operator = graph.operator(work.operator);
        let fail = |problem: KernelError| Failure::Operator { operator: work.operator, problem };
        let kernel = kernels(&operator.kind)
            .ok_or_else(|| fail(unsupported!("the host device has no `{}`", operator.kind)))?;
        let Operands { args, outputs, hidden } =
            operands(graph, work, &|offset, bytes| arena.at(offset, bytes))?;
        let outside = || fail("its bytes lie outside the arena".into());
        let begins = work
            .begins
            .iter()
            .map(|&(offset, bytes)| {
                Ok((
                    arena.at(offset, bytes).ok_or_else(outside)?,
                    usize::try_from(bytes.0).map_err(|_| outside())?,
                ))
            })
            .collect::<Result<_, Failure>>()?;
        let capture = match work.capture {
            None => None,
            Some(Capture { offset, dtype }) => Some((
                arena.at(offset, Bytes(dtype.size())).ok_or_else(outside)?.cast_const(),
                dtype,
            )),
        };
        Ok(Self { work, kernel, args, outputs, hidden, begins, capture })
    }

    /// Runs it, and reads the loss if it has just been written.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn run(
        &self,
        graph: &Graph,
        iteration: u64,
        batch: &[Vec<u8>],
        poison: bool,
    ) -> Result<Option<f32>, KernelError> {
        if poison {
            for &(data, bytes) in &self.begins {
                // SAFETY: inside the arena (checked in `new`), and begins with this step, so
                // nothing else holds it.
                unsafe { data.write_bytes(POISON, bytes) };
            }
        }
        let call = Call {
            operator: graph.operator(self.work.operator),
            args: &self.args,
            outputs: &self.outputs,
            hidden: &self.hidden,
            iteration,
            position: u64::from(self.work.operator.0),
            steps_done: iteration,
            random_key: self.work.random_key,
            replay: self.work.replay,
            optimizer: graph.group(graph.operator(self.work.operator)),
            batch,
        };
        super::widen::run(self.kernel, &call)?;
        Ok(self.capture.map(|(data, dtype)| {
            // SAFETY: inside the arena (checked in `new`), and this step has just written it.
            unsafe { number(data, dtype) }
        }))
    }
}

/// What a step reads and writes.
pub struct Operands {
    /// One for each argument.
    pub args: Vec<Seen>,
    /// One for each declared output.
    pub outputs: Vec<Option<View>>,
    /// The hidden outputs.
    pub hidden: Vec<View>,
}

/// Where a stretch of the arena lies, if it is inside.
type Find<'a> = &'a dyn Fn(Bytes, Bytes) -> Option<*mut u8>;

/// Resolves a step's addresses.
///
/// # Errors
/// When a view lies outside the arena or its tensor.
pub fn operands(graph: &Graph, work: &StepWork, at: Find<'_>) -> Result<Operands, Failure> {
    let operator = graph.operator(work.operator);
    let fail = |problem: KernelError| Failure::Operator { operator: work.operator, problem };
    let view = |operand: &Operand| view(graph, work, at, operand).map_err(fail);
    let args = operator
        .args
        .iter()
        .map(|arg| {
            Ok(match arg {
                Arg::Tensor(operand) => Seen::Tensor(view(operand)?),
                Arg::Tensors(list) => Seen::Tensors(
                    list.iter()
                        .map(|o| o.as_ref().map(view).transpose())
                        .collect::<Result<_, Failure>>()?,
                ),
                _ => Seen::Plain,
            })
        })
        .collect::<Result<_, Failure>>()?;
    let outputs = operator
        .outputs
        .iter()
        .map(|o| o.as_ref().map(view).transpose())
        .collect::<Result<_, Failure>>()?;
    let hidden = operator.hidden.iter().map(view).collect::<Result<_, Failure>>()?;
    Ok(Operands { args, outputs, hidden })
}

/// A view, or a null one for what a replay leaves out.
fn view(
    graph: &Graph,
    work: &StepWork,
    at: Find<'_>,
    operand: &Operand,
) -> Result<View, KernelError> {
    let tensor = graph.tensor(operand.tensor);
    let fail = || invalid!("a view of `{}` reaches beyond it", tensor.name);
    let size = |x: u64| usize::try_from(x).map_err(|_| fail());
    let data = match work.addresses.binary_search_by_key(&operand.tensor, |a| a.0) {
        Err(_) => std::ptr::null_mut(),
        Ok(found) => {
            let end = operand.end_byte().filter(|&e| e <= tensor.bytes.0).ok_or_else(fail)?;
            let skip = if end == 0 { 0 } else { operand.offset * operand.dtype.size() };
            let base = at(work.addresses[found].1, tensor.bytes)
                .ok_or_else(|| invalid!("`{}` lies outside the arena", tensor.name))?;
            base.wrapping_add(size(skip)?)
        }
    };
    Ok(View {
        data,
        dtype: operand.dtype,
        shape: operand.shape.iter().map(|&x| size(x)).collect::<Result<_, _>>()?,
        stride: operand.stride.iter().map(|&x| size(x)).collect::<Result<_, _>>()?,
    })
}

/// Reads a floating number as f32.
///
/// # Safety
/// `data` points to an element of `dtype`, which may be unaligned.
pub unsafe fn number(data: *const u8, dtype: Dtype) -> f32 {
    // SAFETY: the caller vouches for an element of that type.
    unsafe {
        match dtype {
            Dtype::F64 => data.cast::<f64>().read_unaligned() as f32,
            Dtype::Bf16 => half::from_bf16(data.cast::<u16>().read_unaligned()),
            Dtype::F16 => half::from_f16(data.cast::<u16>().read_unaligned()),
            Dtype::F32 => data.cast::<f32>().read_unaligned(),
            _ => f32::NAN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_of_every_floating_type() {
        let read = |bytes: &[u8], dtype| {
            // SAFETY: each slice holds one element of its type.
            unsafe { number(bytes.as_ptr(), dtype) }
        };
        assert_eq!(read(&1.5f32.to_le_bytes(), Dtype::F32), 1.5);
        assert_eq!(read(&(-1.5f64).to_le_bytes(), Dtype::F64), -1.5);
        assert_eq!(read(&0x3fc0u16.to_le_bytes(), Dtype::Bf16), 1.5);
        assert_eq!(read(&0x3e00u16.to_le_bytes(), Dtype::F16), 1.5);
    }
}
