//! Measures operators on a device: each at its place in a job, or one alone many times.
//!
//! Times are medians of repeats after a warm-up.

use std::collections::BTreeMap;

use super::backend::{
    Device, Failure, Item, Measured, Memory, Script, StepWork, Stream, Work, host,
};
use super::{Job, RunError, Settings, Spare, open, seed, weights};
use crate::contract::{Chosen, JobPlan};
use crate::device::Profile;
use crate::device::latency::Row;
use crate::job::{Graph, GraphError, Tensor};
use crate::units::{Bytes, Nanos, OpId, TensorId};

/// Iterations before the measurement: memory is touched for the first time, and caches fill.
pub const WARM_UP: u32 = 2;

/// The bytes of random data after which a tensor's content repeats.
const PIECE: u64 = 64 << 10;

/// Lets the CUDA device's libraries use up to `workspace` bytes for each operator for which they
/// have several algorithms, so that a profile shows their choice.
///
/// # Errors
/// When sizes overflow.
pub fn allow(graph: &mut Graph, workspace: Bytes) -> Result<(), GraphError> {
    let having = graph
        .operators
        .iter()
        .enumerate()
        .filter(|(_, o)| super::has_algorithms(&o.kind))
        .map(|(i, _)| OpId::from_index(i));
    let wanted: Vec<_> = having.map(|id| (id, workspace)).collect();
    graph.reserve(wanted)
}

/// Runs `job`, a checked plan of `graph`, for `settings.iterations` iterations after a warm-up of
/// [`WARM_UP`]. Returns each operator's latency under `settings.load_percent`, and beside it the
/// time by the roofline of `profile`.
///
/// # Errors
/// As [`super::run`].
pub fn job(
    graph: &Graph,
    job: &JobPlan,
    arena: Bytes,
    profile: &Profile,
    settings: &Settings,
    progress: &mut dyn FnMut(u32),
) -> Result<Vec<Row>, RunError> {
    let iterations = settings.iterations.saturating_add(WARM_UP);
    let settings = Settings { iterations, timed: true, ..settings.clone() };
    let outcome = super::run(graph, job, arena, profile, &settings, progress)?;
    let row = |(index, (operator, times)): (_, (_, &Vec<Nanos>))| {
        let counted = times.get(WARM_UP as usize..).unwrap_or_default();
        Row {
            load_percent: settings.load_percent,
            ..Row::new(operator, settings.target.key(&profile.name), middle(counted))
        }
        .beside(operator, profile)
        .by(outcome.libraries.get(&OpId::from_index(index)))
    };
    Ok(graph.operators.iter().zip(&outcome.operator_ns).enumerate().map(row).collect())
}

/// Start and end of each run.
pub type Spans = Vec<(Nanos, Nanos)>;

/// Runs the first operator of `graph` `settings.iterations` times after a warm-up, and returns its
/// latency. What a device leaves in `spare` serves the next call.
///
/// # Errors
/// When the device lacks it, or it fails.
pub fn alone(
    graph: &Graph,
    profile: &Profile,
    settings: &Settings,
    spare: &Spare,
) -> Result<Row, RunError> {
    let (times, chosen) =
        again(graph, profile, settings, settings.iterations.saturating_add(WARM_UP), spare)?;
    let Some(operator) = graph.operators.first() else {
        return Err(RunError::Graph("the graph has no operator".to_owned()));
    };
    let counted = times.get(WARM_UP as usize..).unwrap_or_default();
    let times: Vec<Nanos> = counted.iter().map(|(start, end)| *end - *start).collect();
    Ok(Row {
        load_percent: settings.load_percent,
        ..Row::new(operator, settings.target.key(&profile.name), middle(&times))
    }
    .beside(operator, profile)
    .by(chosen.as_ref()))
}

/// Start and end of each of `repeats` runs of the first operator of `graph`, and the library's
/// choice for it.
///
/// # Errors
/// As [`alone`].
pub fn again(
    graph: &Graph,
    profile: &Profile,
    settings: &Settings,
    repeats: u32,
    spare: &Spare,
) -> Result<(Spans, Option<Chosen>), RunError> {
    let mut job = Job::new(host::kernels::find, graph, profile, settings, None)?;
    let (item, addresses) = first(graph, Bytes::ZERO);
    let script = alike(vec![item.clone(); repeats as usize], item.top, Bytes::ZERO);
    let batch = std::mem::take(&mut job.batch);
    let (nothing, options) = (BTreeMap::new(), settings.host(profile));
    let measured = open(
        (&settings.target, None, spare),
        graph,
        (&script, &nothing),
        host::kernels::find,
        &batch,
        &options,
        |device| {
            for tensor in weights::long_lived(graph) {
                fill(device, graph.tensor(tensor), addresses[&tensor], settings.seed)?;
            }
            once(device, &script)
        },
    );
    let measured =
        measured.and_then(|(measured, mut said)| Ok((measured?, said.libraries.remove(&OpId(0)))));
    let (measured, chosen) = measured.map_err(|failure| match failure {
        Failure::Device(problem) => RunError::Device(settings.target.name(), problem),
        Failure::Operator { problem, .. } => {
            let operator = &graph.operators[0];
            RunError::Operator { name: operator.name.clone(), kind: operator.kind.clone(), problem }
        }
    })?;
    Ok((measured.items, chosen))
}

/// The first operator of a graph, with its tensors one after another from `start` on; and where
/// each tensor is.
#[must_use]
pub fn first(graph: &Graph, start: Bytes) -> (Item, BTreeMap<TensorId, Bytes>) {
    let mut addresses: BTreeMap<TensorId, Bytes> = BTreeMap::new();
    let mut end = start;
    for (index, tensor) in graph.tensors.iter().enumerate() {
        addresses.insert(TensorId::from_index(index), end);
        end += tensor.bytes.in_blocks();
    }
    let own = graph.operators.first().map_or(Bytes::ZERO, |o| o.workspace.in_blocks());
    let workspace = (own > Bytes::ZERO).then_some((end, own));
    let step = StepWork {
        operator: OpId(0),
        addresses: addresses.iter().map(|(t, at)| (*t, *at)).collect(),
        replay: false,
        random_key: 0,
        begins: Vec::new(),
        workspace,
        capture: None,
    };
    let item = Item {
        stream: Stream::Compute,
        waits: Vec::new(),
        fetches: Vec::new(),
        stretch: None,
        trigger: None,
        work: Work::Step(step),
        top: end + own,
    };
    (item, addresses)
}

/// Fills a tensor with a piece of numbers, repeated: an operator's time does not depend on them,
/// and drawing all of them would take long.
fn fill(device: &mut dyn Device, tensor: &Tensor, at: Bytes, seed: u64) -> Result<(), Failure> {
    let piece = Tensor { bytes: Bytes(tensor.bytes.0.min(PIECE)), ..tensor.clone() };
    let numbers = seed::initial(seed, &piece, 0.0, 2);
    let mut done = 0;
    while done < tensor.bytes.0 && !numbers.is_empty() {
        let part = usize::try_from(tensor.bytes.0 - done).unwrap_or(usize::MAX).min(numbers.len());
        device.write(Memory::Device, at + Bytes(done), &numbers[..part])?;
        done += part as u64;
    }
    Ok(())
}

/// A script of items that wait only for the item before on their stream.
#[must_use]
pub fn alike(items: Vec<Item>, arena: Bytes, store: Bytes) -> Script {
    let mut streams = [Vec::new(), Vec::new(), Vec::new()];
    for (index, item) in items.iter().enumerate() {
        streams[item.stream.index()].push(index);
    }
    let order = (0..items.len()).collect();
    Script { order, items, streams, arena, store, stretches: Vec::new() }
}

/// Runs a script once.
///
/// # Errors
/// The device's first failure.
pub fn once(device: &mut dyn Device, script: &Script) -> Result<Measured, Failure> {
    let mut measured =
        Measured { items: Vec::with_capacity(script.items.len()), ..Measured::default() };
    device.begin(0, true)?;
    script.order.iter().try_for_each(|&item| device.enqueue(item))?;
    device.finish(&mut measured)?;
    Ok(measured)
}

/// The median, of an even number the later one; at least 1 ns.
#[must_use]
pub fn middle(times: &[Nanos]) -> Nanos {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default().max(Nanos(1))
}
