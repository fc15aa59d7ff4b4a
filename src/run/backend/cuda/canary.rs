//! A debug mode: the bytes between a tensor's end and the end of its block hold no tensor. A
//! pattern is put there before each step that writes the tensor, and compared after the iteration.
//! A byte of each operand is read before each step, too. Every step waits for all operands of its
//! operator, so a wait that is missing shows even where the kernel does not read the operand.
//!
//! All of it goes through the compute stream, so streams overlap as they do without.

use super::driver::{Context, DeviceMemory, Fault, Queue};
use crate::backend::operators::error::device_error;
use crate::backend::{Failure, Script, Work};
use crate::job::Graph;
use crate::units::{Bytes, OpId, TensorId};

const PATTERN: u8 = 0xa5;

/// The bytes behind one tensor, at one step.
struct Tail {
    operator: OpId,
    tensor: TensorId,
    /// In the arena.
    at: Bytes,
    bytes: Bytes,
    /// Where they are kept until the iteration's end.
    kept: Bytes,
}

/// The bytes behind all tensors that steps write.
pub struct Canaries {
    /// By item.
    tails: Vec<Vec<Tail>>,
    /// By item, where its operands are.
    operands: Vec<Vec<Bytes>>,
    /// Tails, and behind them a byte.
    kept: DeviceMemory,
    byte: Bytes,
}

impl Canaries {
    /// The canaries of a script. `fused` lists groups of updates; all updates of a group run with
    /// the group's first item.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn new(
        graph: &Graph,
        script: &Script,
        fused: &[Vec<(usize, u64)>],
        context: &Context,
    ) -> Result<Self, Fault> {
        let mut size = Bytes::ZERO;
        let mut tails: Vec<Vec<Tail>> = Vec::with_capacity(script.items.len());
        let mut operands = Vec::with_capacity(script.items.len());
        for item in &script.items {
            let (mut of, mut given) = (Vec::new(), Vec::new());
            if let Work::Step(work) = &item.work {
                for read in graph.operator(work.operator).reads() {
                    let place = work.addresses.binary_search_by_key(&read.tensor, |a| a.0);
                    let offset = Bytes(read.offset.saturating_mul(read.dtype.size()));
                    if let (Ok(place), true) = (place, read.elements() > 0) {
                        given.push(work.addresses[place].1 + offset);
                    }
                }
                let mut written: Vec<TensorId> =
                    graph.operator(work.operator).writes().map(|o| o.tensor).collect();
                written.sort_unstable();
                written.dedup();
                for tensor in written {
                    let own = graph.tensor(tensor).bytes;
                    let bytes = own.in_blocks() - own;
                    // A replay leaves some writes out.
                    let Ok(place) = work.addresses.binary_search_by_key(&tensor, |a| a.0) else {
                        continue;
                    };
                    if own > Bytes::ZERO && bytes > Bytes::ZERO {
                        let (operator, at) = (work.operator, work.addresses[place].1 + own);
                        of.push(Tail { operator, tensor, at, bytes, kept: size });
                        size += bytes;
                    }
                }
            }
            tails.push(of);
            operands.push(given);
        }
        for group in fused {
            let Some(((first, _), others)) = group.split_first() else { continue };
            for (item, _) in others {
                let moved = std::mem::take(&mut tails[*item]);
                tails[*first].extend(moved);
                let moved = std::mem::take(&mut operands[*item]);
                operands[*first].extend(moved);
            }
        }
        Ok(Self { tails, operands, kept: context.allocate(size + Bytes(1))?, byte: size })
    }

    /// Reads what an item is given, and puts the pattern behind what it writes.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn set(&self, item: usize, queue: &Queue, arena: &DeviceMemory) -> Result<(), Fault> {
        let byte = self.kept.at(self.byte, Bytes(1))?;
        self.operands[item]
            .iter()
            .try_for_each(|at| queue.copy(byte, arena.at(*at, Bytes(1))?, 1))?;
        self.tails[item].iter().try_for_each(|tail| {
            queue.fill(arena.at(tail.at, tail.bytes)?, PATTERN, tail.bytes.0 as usize)
        })
    }

    /// Keeps what is there after the item.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn keep(&self, item: usize, queue: &Queue, arena: &DeviceMemory) -> Result<(), Fault> {
        self.tails[item].iter().try_for_each(|tail| {
            let (from, to) = (arena.at(tail.at, tail.bytes)?, self.kept.at(tail.kept, tail.bytes)?);
            queue.copy(to, from, tail.bytes.0 as usize)
        })
    }

    /// Compares, after the iteration.
    ///
    /// # Errors
    /// When an operator wrote beyond a tensor's end.
    pub fn check(&self, graph: &Graph) -> Result<(), Failure> {
        let mut all = vec![PATTERN; self.byte.0 as usize];
        self.kept.read(Bytes::ZERO, &mut all).map_err(|fault| Failure::Device(fault.0))?;
        for tail in self.tails.iter().flatten() {
            let from = tail.kept.0 as usize;
            if all[from..from + tail.bytes.0 as usize].iter().any(|&byte| byte != PATTERN) {
                let name = &graph.tensor(tail.tensor).name;
                let problem = device_error!("it wrote beyond the end of `{name}`");
                return Err(Failure::Operator { operator: tail.operator, problem });
            }
        }
        Ok(())
    }
}
