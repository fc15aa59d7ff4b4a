//! What a recompute needs besides its operator: inputs that nothing else keeps.
//!
//! The output of an activation function can be made again from what it read. If nothing uses that
//! any more (the product before a ReLU), it must be made again too, or be kept in place of the
//! output, which frees nothing where it is no smaller. So a byte that is made again bears a part of
//! the time of such inputs too.
//!
//! An input *passes* if one operator generates it and nothing else writes it, if it has no gap with
//! an instant in it, and if no instant lies between the operator that reads it and its last use.
//! The largest tensor that this operator alone writes bears what it needs. All tensors that bear
//! one input's time, through other inputs too, are together no larger than it, and copying them
//! takes no longer than copying it. Several readers bear equal parts.
//!
//! # Proof
//!
//! A plan makes X again at t, from an input Y that passes. Since X was generated, Y had no other
//! use at any instant. If Y was there at all instants on the device or the host since then, let X
//! be, in the program, where Y is in the plan: it is no larger. Y may have been copied out before X
//! was generated, so X may be too, from Y's operator on. Otherwise Y was made again at some t' ≤ t,
//! and was on the device or on the host from t' to t. Give X's operator and what X bears of Y any
//! prices, p at t and p' at t'. If p ≤ p', let X be made again at t as a whole, which costs no more
//! than in the plan. Otherwise let X be made again at t' as a whole, and be where Y is from then
//! on. So at all prices what the program says of X costs no more than what the plan does. For
//! inputs of inputs, and for several, the same holds with the time whose price is lowest.

use std::cmp::Reverse;

use crate::device::Link;
use crate::residency::Residencies;
use crate::sim::engine::work;
use crate::sim::program::Direction;
use crate::units::{TensorId, id32};

/// What operators need, by operator.
pub(super) struct Needs {
    /// Nanoseconds of what else must run again.
    times: Vec<u64>,
    /// The tensor that bears this time.
    bears: Vec<Option<TensorId>>,
    /// The first operator of those that must run.
    begins: Vec<u32>,
}

/// The job as far as it matters here.
pub(super) struct Job<'a> {
    pub(super) link: &'a Link,
    pub(super) residencies: &'a Residencies<'a>,
    /// By operator, nanoseconds.
    pub(super) times: &'a [u64],
    /// By operator, the bytes of what it writes.
    pub(super) written: &'a [u64],
    /// By operator, whether it runs elsewhere than in the graph.
    pub(super) late: &'a [bool],
    /// The operators of the instants, of this program and of those with fewer instants.
    pub(super) instants: &'a [u32],
}

/// Bytes of memory, and the work of copies to the device and from it.
type Size = [u128; 3];

const NONE: Size = [0; 3];

fn sum(a: Size, b: Size) -> Size {
    std::array::from_fn(|at| a[at] + b[at])
}

impl Job<'_> {
    fn size(&self, tensor: TensorId) -> Size {
        let bytes = self.residencies.graph.tensor(tensor).bytes;
        let copy = |direction| work(self.link, direction, bytes);
        let held = u128::from(self.residencies.lifetime(tensor).bytes);
        [held, copy(Direction::H2d), copy(Direction::D2h)]
    }

    /// The operator that alone writes a tensor that it generates; `None` if there are others.
    fn maker(&self, tensor: TensorId) -> Option<u32> {
        let lifetime = self.residencies.lifetime(tensor);
        let alone = !lifetime.long_lived && lifetime.bytes > 0 && lifetime.writes.len() == 1;
        let first = lifetime.uses.first().map(|slot| slot / 2)?;
        (alone && lifetime.writes[0] == first && !self.late[first as usize]).then_some(first)
    }

    /// The operators that read what an operator alone writes, if that passes.
    fn readers(&self, tensor: TensorId, maker: u32) -> Vec<u32> {
        let uses = &self.residencies.lifetime(tensor).uses;
        let readers: Vec<u32> = uses.iter().map(|slot| slot / 2).filter(|at| *at > maker).collect();
        let last = readers.last().copied().unwrap_or(maker);
        let mut within = self.instants_in(maker, last).iter();
        let passes = within.all(|instant| readers.contains(instant))
            && !readers.iter().any(|&at| self.late[at as usize]);
        if passes { readers } else { Vec::new() }
    }

    /// The instants behind an operator, up to another.
    fn instants_in(&self, behind: u32, until: u32) -> &[u32] {
        let at = |operator: u32| self.instants.partition_point(|instant| *instant <= operator);
        &self.instants[at(behind)..at(until).max(at(behind))]
    }
}

impl Needs {
    pub(super) fn new(job: &Job<'_>) -> Self {
        let count = job.times.len();
        let tensors = job.residencies.lifetimes.len();
        let mut bears: Vec<Option<TensorId>> = vec![None; count];
        let mut makers: Vec<(u32, TensorId)> = Vec::new();
        for tensor in (0..tensors).map(TensorId::from_index) {
            let Some(maker) = job.maker(tensor) else { continue };
            makers.push((maker, tensor));
            let bytes = |of: TensorId| job.residencies.lifetime(of).bytes;
            let bearer = &mut bears[maker as usize];
            if bearer.is_none_or(|other| bytes(tensor) > bytes(other)) {
                *bearer = Some(tensor);
            }
        }
        // From the last on: by tensor, the size of those that bear its time; by operator, its
        // inputs that pass, what makes them, and how many read them.
        let mut borne: Vec<Size> =
            (0..tensors).map(|t| job.size(TensorId::from_index(t))).collect();
        let mut inputs: Vec<Vec<(TensorId, usize, u64)>> = vec![Vec::new(); count];
        makers.sort_by_key(|&(maker, tensor)| (Reverse(maker), tensor));
        for &(maker, tensor) in &makers {
            let readers = job.readers(tensor, maker);
            let Some(&last) = readers.last() else { continue };
            let most = job.size(tensor);
            let mut all = NONE;
            for &reader in &readers {
                let Some(bearer) = bears[reader as usize] else { continue };
                let more = borne[bearer.index()];
                let both = sum(all, more);
                let fits = both.iter().zip(&most).all(|(both, most)| both <= most);
                if more != NONE && fits && job.instants_in(reader, last).is_empty() {
                    all = both;
                    inputs[reader as usize].push((tensor, maker as usize, readers.len() as u64));
                }
            }
            borne[tensor.index()] = all;
        }
        let mut needs = Self { times: vec![0; count], bears, begins: (0..id32(count)).collect() };
        for (at, inputs) in inputs.iter().enumerate() {
            for &(tensor, maker, parts) in inputs {
                needs.times[at] += needs.to_make(job, tensor, maker) / parts;
                needs.begins[at] = needs.begins[at].min(needs.begins[maker]);
            }
        }
        needs
    }

    /// The nanoseconds that it takes to make a tensor again, its part of its maker's time.
    fn to_make(&self, job: &Job<'_>, tensor: TensorId, maker: usize) -> u64 {
        let bytes = u128::from(job.residencies.lifetime(tensor).bytes);
        let own = u128::from(job.times[maker]) * bytes / u128::from(job.written[maker].max(1));
        let needed = if self.bears[maker] == Some(tensor) { self.times[maker] } else { 0 };
        u64::try_from(own).unwrap_or(u64::MAX).saturating_add(needed)
    }

    /// The nanoseconds that a tensor bears of what an operator needs.
    pub(super) fn time(&self, operator: u32, tensor: TensorId) -> u64 {
        let operator = operator as usize;
        if self.bears[operator] == Some(tensor) { self.times[operator] } else { 0 }
    }

    /// The first operator of what a tensor bears of what an operator needs; itself if it is
    /// nothing.
    pub(super) fn begins(&self, operator: u32, tensor: TensorId) -> u32 {
        let bears = self.bears[operator as usize] == Some(tensor);
        if bears { self.begins[operator as usize] } else { operator }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exact::{device, operand, operator, tensor};
    use crate::job::{Graph, Operator, Phase, Role};

    /// What the output of a ReLU needs, and from where on: a product, a ReLU, an operator with much
    /// memory, and one that uses the output again. `product` are the bytes of what the ReLU reads.
    fn needed(product: u64, read_later: bool, instants: &[u32]) -> (u64, u32) {
        let all = [
            ("in", 4096, Role::Input),
            ("product", product, Role::Activation),
            ("output", 8192, Role::Activation),
            ("much", 65_536, Role::Activation),
            ("gradient", 4096, Role::Gradient),
        ];
        let tensors: Vec<_> =
            all.iter().map(|&(name, bytes, role)| tensor(name.to_owned(), bytes, role)).collect();
        let much: &[usize] = if read_later { &[0, 1] } else { &[0] };
        let reads: [&[usize]; 4] = [&[0], &[1], much, &[3, 2]];
        let operators = reads.iter().enumerate().map(|(at, reads)| Operator {
            outputs: vec![Some(operand(&tensors, at + 1, 0))],
            ..operator(format!("operator{at}"), Phase::Forward, reads, &tensors)
        });
        let operators = operators.collect();
        let graph = Graph::new("job".to_owned(), tensors, operators, None, None, None).unwrap();
        let needs = Needs::new(&Job {
            link: &device().link,
            residencies: &Residencies::new(&graph),
            times: &[1000, 10, 500, 500],
            written: &[product, 8192, 65_536, 4096],
            late: &[false; 4],
            instants,
        });
        (needs.time(1, TensorId::from_index(2)), needs.begins(1, TensorId::from_index(2)))
    }

    #[test]
    fn the_output_of_a_relu_needs_the_product_before_it() {
        assert_eq!(needed(8192, false, &[2, 3]), (1000, 0));
        // What is smaller may be kept in place of the output.
        assert_eq!(needed(4096, false, &[2, 3]), (0, 1));
        // At an instant that it is read at it is there anyway, and the output need not be.
        assert_eq!(needed(8192, true, &[2, 3]), (0, 1));
        assert_eq!(needed(8192, true, &[3]), (500, 0));
    }
}
