//! Finds the gradient and the states that belong to each parameter.
//!
//! The lists of a multi-tensor operator belong together by position, the operands of a
//! single-tensor operator with each other. All tensors that are so connected within a step belong
//! to one parameter, its column.

use std::collections::BTreeMap;

use crate::job::optimizer::Rule;
use crate::job::{Arg, Operand, Operator};
use crate::units::TensorId;

/// A parameter, its gradient and its optimizer states.
#[derive(Clone, Debug)]
pub(in crate::job) struct Column {
    /// The number of its optimizer step, from 1.
    pub step: u16,
    pub parameter: TensorId,
    pub gradient: TensorId,
    /// Its states by the framework's names.
    pub states: BTreeMap<String, TensorId>,
}

/// Sets of tensors connected by the operators of one step, each in ascending order.
pub(in crate::job) fn columns(
    operators: &[Operator],
    step: &[u16],
    number: u16,
    tensors: usize,
) -> Vec<Vec<TensorId>> {
    let mut sets = petgraph::unionfind::UnionFind::<usize>::new(tensors);
    let mut used = vec![false; tensors];
    for operator in operators.iter().zip(step).filter(|(_, of)| **of == number).map(|(o, _)| o) {
        for row in rows(operator) {
            for pair in row.windows(2) {
                sets.union(pair[0].index(), pair[1].index());
            }
            row.iter().for_each(|t| used[t.index()] = true);
        }
    }
    let mut groups: BTreeMap<usize, Vec<TensorId>> = BTreeMap::new();
    for tensor in (0..tensors).filter(|t| used[*t]) {
        groups.entry(sets.find(tensor)).or_default().push(TensorId::from_index(tensor));
    }
    groups.into_values().collect()
}

/// The tensors that one operator connects: one row for each position of its lists.
fn rows(operator: &Operator) -> Vec<Vec<TensorId>> {
    let lists: Vec<&[Option<Operand>]> = operator
        .args
        .iter()
        .filter_map(|a| if let Arg::Tensors(list) = a { Some(&list[..]) } else { None })
        .collect();
    let length = lists.iter().map(|l| l.len()).max().unwrap_or(0);
    if length == 0 {
        let all: Vec<&Operand> = operator.reads().chain(operator.writes()).collect();
        let largest = all.iter().map(|o| o.elements()).max().unwrap_or(0);
        // A single number beside larger tensors is shared by all parameters: a rate, a step count,
        // a flag.
        return vec![
            all.iter().filter(|o| o.elements() > 1 || largest == 1).map(|o| o.tensor).collect(),
        ];
    }
    let paired = |list: &[Option<Operand>], at: usize| {
        if list.len() == length { list[at].as_ref().map(|o| o.tensor) } else { None }
    };
    (0..length)
        .map(|at| {
            lists
                .iter()
                .copied()
                .chain([&operator.outputs[..]])
                .filter_map(|list| paired(list, at))
                .collect()
        })
        .collect()
}

/// A name for the state in each tensor that the step writes in place or takes in a fused list.
pub(in crate::job) fn state_keys(
    operators: &[Operator],
    step: &[u16],
    classes: &[String],
) -> BTreeMap<TensorId, &'static str> {
    let mut keys: BTreeMap<TensorId, &'static str> = BTreeMap::new();
    for (operator, number) in operators.iter().zip(step).filter(|(_, of)| **of > 0) {
        let class = classes.get(usize::from(*number) - 1).map(String::as_str);
        if operator.kind.contains("_fused_") {
            let lists = Rule::of_fused(base(&operator.kind)).map_or(&[][..], |r| r.fused_lists);
            for (key, arg) in lists.iter().zip(operator.args.iter().skip(2)) {
                if let Arg::Tensors(list) = arg {
                    keys.extend(list.iter().flatten().map(|o| (o.tensor, *key)));
                }
            }
            continue;
        }
        let key = match (base(&operator.kind), class) {
            ("lerp", Some("RMSprop")) => Some("grad_avg"),
            ("lerp", _) => Some("exp_avg"),
            ("addcmul", Some("RMSprop")) => Some("square_avg"),
            ("addcmul", Some("Adagrad")) => Some("sum"),
            ("addcmul", _) => Some("exp_avg_sq"),
            ("maximum", _) => Some("max_exp_avg_sq"),
            _ => None,
        };
        for written in operator.updates() {
            match key {
                Some(key) => {
                    keys.insert(written.tensor, key);
                }
                None => {
                    keys.entry(written.tensor).or_insert("momentum_buffer");
                }
            }
        }
    }
    keys
}

/// The short name of a kind: `add` for `aten::_foreach_add_`.
pub(super) fn base(kind: &str) -> &str {
    let short = kind.rsplit("::").next().unwrap_or(kind);
    let short =
        short.strip_prefix("_foreach_").or_else(|| short.strip_prefix("_fused_")).unwrap_or(short);
    short.strip_suffix('_').unwrap_or(short)
}
