//! `bench/gpu/traffic.md`: what kernels compute and move at the shapes of recorded models, beside
//! what the roofline charges their operators. `NEAP_BLESS=1` writes it anew.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use super::{Work, charged};
use crate::backend::cuda::launch::{Action, Launch};
use crate::backend::cuda::occupancy::{actions, models};
use crate::device::{builtin, roofline};
use crate::job::{Dtype, Graph, Operator};

/// The most bytes that an operator's kernels may touch, in percent of the roofline's.
const MOST: u64 = 105;

/// Operators whose kernels touch more, by how their kinds end: at most how much, in percent, and
/// why.
const ABOVE: &[(&str, u64, &str)] = &[
    ("_log_softmax", 155, "scores twice: facts of the row, results"),
    ("_log_softmax_backward_data", 135, "gradients twice: the row's sum, results"),
    ("attention", 280, "keys and values by each tile of queries; they stay in the L2"),
    ("attention_backward", 380, "each side by each tile of the other; they stay in the L2"),
    ("embedding", 205, "a row's number by each of its elements"),
    ("embedding_dense_backward", 135, "all numbers by each 16 rows of the table; 16 KiB in the L1"),
    ("layer_norm", 255, "the row twice, weights by each row; all in the L1"),
    ("layer_norm_backward", 415, "the row twice, weights by each row, facts by each element"),
    ("cudnn_batch_norm", 165, "input twice: sums, results; a channel's facts by each thread"),
    ("cudnn_batch_norm_backward", 180, "inputs twice: sums, results; facts by each thread"),
    ("div", 200, "one element spread over many, loaded for each"),
    ("max_pool2d_with_indices", 175, "pixels by each window that they are in"),
    ("max_pool2d_with_indices_backward", 210, "indices by each window of a pixel"),
];

/// Operators of a kind.
#[derive(Default)]
struct Row {
    /// By kernel: launches, and what they do.
    kernels: BTreeMap<String, (u64, Work)>,
    charged: Work,
}

/// What an action does besides calls of libraries; `None` for those.
fn work_of(action: &Action) -> Option<(String, Work)> {
    let moved =
        |name: &str, bytes: usize| Some((name.to_owned(), Work { flops: 0, bytes: bytes as u64 }));
    match action {
        Action::Launch(launch) => Some((Launch::clone(launch).kernel, charged(launch))),
        Action::Copy { bytes, .. } => moved("(copy)", 2 * bytes),
        Action::Zero { bytes, .. } => moved("(zeros)", *bytes),
        Action::Upload { data, .. } => moved("(upload)", data.len()),
        Action::Gemm(_) | Action::Conv(_) => None,
    }
}

/// The operators that neap's own kernels carry out, by kind.
fn rows(graph: &Graph) -> BTreeMap<String, Row> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for (operator, actions) in actions(graph) {
        let all: Option<Vec<_>> = actions.iter().map(work_of).collect();
        let Some(all) = all.filter(|all| !all.is_empty()) else { continue };
        let row = rows.entry(operator.kind.clone()).or_default();
        let charged = |of: fn(&Operator) -> u128| u64::try_from(of(operator)).unwrap();
        row.charged.flops += charged(roofline::flops);
        row.charged.bytes += charged(roofline::bytes);
        for (kernel, work) in all {
            let sum = row.kernels.entry(kernel).or_default();
            sum.0 += 1;
            sum.1.flops += work.flops;
            sum.1.bytes += work.bytes;
        }
    }
    rows
}

#[test]
fn kernels_move_what_the_roofline_charges() {
    let device = builtin::find("h100").unwrap();
    let mut table = String::from(
        "# What kernels compute and move, beside the roofline\n\n\
         Written by a test, from the launches of one training iteration. *MiB*: all that threads \
         load and store, caches not\nconsidered. *MFLOP*: operations of the kernels' source; in \
         attention those of whole tiles. *Roofline's*: what the\nroofline charges the operators; \
         it counts a tensor once, however often it is read. Operators of cuBLASLt and cuDNN are\n\
         not here.\n",
    );
    let mut wrong = Vec::new();
    for (model, graph) in models() {
        write!(
            table,
            "\n## {model}\n\n| operator | kernel | launches | MFLOP | roofline's | MiB | \
             roofline's | % | why more |\n\
             | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n"
        )
        .unwrap();
        for (kind, Row { kernels, charged }) in rows(&graph) {
            let sum = |of: fn(&Work) -> u64| kernels.values().map(|k| of(&k.1)).sum::<u64>();
            let (flops, bytes) = (sum(|w| w.flops), sum(|w| w.bytes));
            let percent = (100 * bytes).div_ceil(charged.bytes.max(1));
            let above = ABOVE.iter().find(|a| kind.ends_with(a.0));
            let (most, why) = above.map_or((MOST, ""), |a| (a.1, a.2));
            // Bytes of less than a microsecond may stay.
            if percent > most && bytes > 2 << 20 {
                wrong.push(format!("{model}: {kind} moves {percent} % of the roofline's bytes"));
            }
            let attention = kind.contains("attention");
            let (rate, width) = (device.rate(Dtype::F32), device.memory_bandwidth);
            let computing = |flops: u64| u128::from(flops) * u128::from(width);
            if !attention && computing(flops) > u128::from(bytes) * u128::from(rate) {
                wrong.push(format!("{model}: {kind} is limited by {flops} operations"));
            }
            if attention && flops > charged.flops {
                wrong.push(format!("{model}: {kind} does {flops} operations"));
            }
            let mega = |n: u64| format!("{}.{}", n / 1_000_000, n / 100_000 % 10);
            let mebi = |n: u64| format!("{}.{}", n >> 20, ((n & 0xf_ffff) * 10) >> 20);
            for (at, (kernel, (launches, work))) in kernels.iter().enumerate() {
                let own = format!(
                    "{kernel} | {launches} | {} | {{}} | {} | {{}} | {{}} | {{}}",
                    mega(work.flops),
                    mebi(work.bytes)
                );
                let cells = if at == 0 {
                    [mega(charged.flops), mebi(charged.bytes), percent.to_string(), why.to_owned()]
                } else {
                    Default::default()
                };
                let row = cells.iter().fold(own, |row, cell| row.replacen("{}", cell, 1));
                let kind = if at == 0 { kind.as_str() } else { "" };
                writeln!(table, "| {kind} | {row} |").unwrap();
            }
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/gpu/traffic.md");
    if std::env::var_os("NEAP_BLESS").is_some() {
        std::fs::write(&path, &table).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), table, "NEAP_BLESS=1 writes it anew");
}
