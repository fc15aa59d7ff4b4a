//! A plan's file form, `*.plan.json`: tensors and operators by name, graphs by path and hash.
//!
//! Reads and writes plans, and finds their graphs. A plan that was read may be unsafe:
//! [`super::check`] decides. The serde types are in `form`.

mod arranged;

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

pub use arranged::arranged;
use arranged::{arrangement, moved_form, pieces_form, reserve};

pub use super::form::PlanFile;
use super::form::{EventForm, JobForm, LatencyForm, PlacementForm, SlotForm, WindowForm};
use super::plan::{Chosen, Event, JobPlan, Latency, Place, Placement, Plan, Trigger, Window};
use crate::files::{self, FileError};
use crate::job::Graph;
use crate::job::json::{self, ReadError, Tag, Version};
use crate::units::{Bytes, OpId, TensorId};

/// The largest offset, size and time, so that sums of two don't overflow.
const LIMIT: u64 = 1 << 62;

/// Why a plan file does not describe a plan: its graphs contradict it, or a value is impossible.
#[derive(Debug, thiserror::Error)]
#[error("{place}{problem}")]
pub struct ResolveError {
    /// The job, followed by a colon; empty for the plan itself.
    place: String,
    problem: String,
}

impl ResolveError {
    fn plan(problem: impl Into<String>) -> Self {
        Self { place: String::new(), problem: problem.into() }
    }
}

/// Reads a `*.plan.json` into its file form. [`resolve`] turns it into a plan.
///
/// # Errors
/// An error that names the file, the line and column, and what was found.
pub fn read(path: &Path) -> Result<PlanFile<'static>, ReadError> {
    json::parse(path)
}

/// Reads a plan and its graphs. Each graph is at its path relative to the plan's folder or, if
/// `graphs` is not empty, at the path given there for each job in turn. The graphs get the
/// workspaces that the plan reserves for libraries.
///
/// # Errors
/// When a file can't be read, contradicts another, or a graph is not the one that the plan was made
/// for.
pub fn load(path: &Path, graphs: &[PathBuf]) -> Result<(Plan, Vec<Graph>), ReadError> {
    let file = read(path)?;
    if !graphs.is_empty() && graphs.len() != file.jobs.len() {
        let problem = format!(
            "has {} jobs, but {} graphs are given; give one `--graph` for each job, in order",
            file.jobs.len(),
            graphs.len()
        );
        return Err(ReadError::content(path, problem));
    }
    let mut all = Vec::with_capacity(file.jobs.len());
    for (index, job) in file.jobs.iter().enumerate() {
        let (graph_path, read) = match graphs.get(index) {
            Some(given) => (given.clone(), json::read(given)),
            // The plan's file names it, so it may be a pipe that nothing is ever written to.
            None => {
                let recorded = graph_path(path, &job.graph);
                let read = json::read_regular(&recorded);
                (recorded, read)
            }
        };
        let graph = read.map_err(|e| match e {
            ReadError::File(e) if graphs.is_empty() => ReadError::content(
                path,
                format!("its graph is not where it says: {e}; say where with `--graph`"),
            ),
            e => e,
        })?;
        let found = json::sha256(&graph);
        if found != job.graph_sha256 {
            let problem = format!(
                "was made for another graph: {} has SHA-256 {found}, the plan was made for {}; plan again, or give the right graph with `--graph`",
                graph_path.display(),
                job.graph_sha256.escape_debug().take(64).collect::<String>(),
            );
            return Err(ReadError::content(path, problem));
        }
        all.push(graph);
    }
    let all = arranged(&file, all).map_err(|e| ReadError::content(path, e))?;
    let plan = resolve(file, &all).map_err(|e| ReadError::content(path, e))?;
    let mut reserved = Vec::with_capacity(all.len());
    for (job, graph) in plan.jobs.iter().zip(all) {
        reserved.push(
            reserve(job, graph).map_err(|e| {
                ReadError::content(path, format!("with its `workspace_bytes`, {e}"))
            })?,
        );
    }
    Ok((plan, reserved))
}

/// The path of a graph that the plan at `plan` records.
#[must_use]
pub fn graph_path(plan: &Path, recorded: &str) -> PathBuf {
    plan.parent().unwrap_or(Path::new("")).join(recorded)
}

/// Turns names into ids: the plan that a file describes, for the graph of each job in order.
///
/// # Errors
/// When a name does not exist, an operator's latency is missing or given twice, or a value is
/// impossible.
pub fn resolve(file: PlanFile<'_>, graphs: &[Graph]) -> Result<Plan, ResolveError> {
    if file.jobs.len() != graphs.len() {
        return Err(ResolveError::plan(format!(
            "the plan has {} jobs, but there are {} graphs",
            file.jobs.len(),
            graphs.len()
        )));
    }
    file.device.validate().map_err(|e| ResolveError::plan(format!("`device`: {e}")))?;
    let figures = &file.figures;
    for (key, value) in [
        ("budget_bytes", file.budget_bytes.0),
        ("figures.peak_bytes", figures.peak_bytes.0),
        ("figures.arena_bytes", figures.arena_bytes.0),
        ("figures.pinned_bytes", figures.pinned_bytes.0),
        ("figures.iteration_ns", figures.iteration_ns.0),
        ("figures.first_iteration_ns", figures.first_iteration_ns.0),
        ("figures.unplanned_peak_bytes", figures.unplanned_peak_bytes.0),
        ("figures.unplanned_iteration_ns", figures.unplanned_iteration_ns.0),
    ] {
        within(key, value).map_err(ResolveError::plan)?;
    }
    let mut jobs = Vec::with_capacity(graphs.len());
    for (index, (form, graph)) in file.jobs.into_iter().zip(graphs).enumerate() {
        let place = format!("job {index} (`{}`): ", graph.name);
        jobs.push(job(form, graph).map_err(|problem| ResolveError { place, problem })?);
    }
    Ok(Plan {
        planner: file.planner.into_owned(),
        options: file.options,
        device: file.device,
        budget: file.budget_bytes,
        jobs,
        figures: file.figures,
    })
}

fn within(what: &str, value: u64) -> Result<u64, String> {
    if value > LIMIT {
        Err(format!("`{what}` is {value}; more than 2^62 is impossible"))
    } else {
        Ok(value)
    }
}

/// The ids of a graph's tensors and operators by name.
struct Names<'a> {
    tensors: HashMap<&'a str, TensorId>,
    operators: HashMap<&'a str, OpId>,
}

impl<'a> Names<'a> {
    fn new(graph: &'a Graph) -> Self {
        Self {
            tensors: graph
                .tensors
                .iter()
                .enumerate()
                .map(|(i, t)| (&*t.name, TensorId::from_index(i)))
                .collect(),
            operators: graph
                .operators
                .iter()
                .enumerate()
                .map(|(i, o)| (&*o.name, OpId::from_index(i)))
                .collect(),
        }
    }

    fn tensor(&self, name: &str) -> Result<TensorId, String> {
        self.tensors
            .get(name)
            .copied()
            .ok_or_else(|| format!("the graph has no tensor named `{name}`"))
    }

    fn operator(&self, name: &str) -> Result<OpId, String> {
        self.operators
            .get(name)
            .copied()
            .ok_or_else(|| format!("the graph has no operator named `{name}`"))
    }

    fn trigger(&self, after: Option<&str>) -> Result<Trigger, String> {
        Ok(Trigger { after: after.map(|name| self.operator(name)).transpose()? })
    }

    fn event(&self, form: &EventForm<'_>) -> Result<Event, String> {
        Ok(match form {
            EventForm::SwapOut { tensor, after } => Event::SwapOut {
                tensor: self.tensor(tensor)?,
                trigger: self.trigger(after.as_deref())?,
            },
            EventForm::SwapIn { tensor, after } => Event::SwapIn {
                tensor: self.tensor(tensor)?,
                trigger: self.trigger(after.as_deref())?,
            },
            EventForm::Release { tensor, after } => Event::Release {
                tensor: self.tensor(tensor)?,
                trigger: self.trigger(after.as_deref())?,
            },
            EventForm::Recompute { operator, after, keep } => Event::Recompute {
                operator: self.operator(operator)?,
                trigger: self.trigger(after.as_deref())?,
                keep: keep.iter().map(|name| self.tensor(name)).collect::<Result<_, _>>()?,
            },
        })
    }

    fn placement(&self, form: &PlacementForm<'_>, steps: &[OpId]) -> Result<Placement, String> {
        let (place, offset) = match form {
            PlacementForm::Tensor { tensor, residency, offset_bytes } => (
                Place::Tensor { tensor: self.tensor(tensor)?, residency: *residency },
                *offset_bytes,
            ),
            PlacementForm::Workspace { step, operator, offset_bytes } => {
                let named = self.operator(operator)?;
                if steps.get(*step as usize) != Some(&named) {
                    return Err(format!(
                        "a workspace is placed for step {step}, operator `{operator}`, but that step is not this operator"
                    ));
                }
                (Place::Workspace { step: *step }, *offset_bytes)
            }
        };
        within("offset_bytes", offset.0)?;
        Ok(Placement { place, offset })
    }

    fn window(&self, form: &WindowForm<'_>) -> Result<Window, String> {
        within("offset_bytes", form.offset_bytes.0)?;
        within("bytes", form.bytes.0)?;
        let hands_over_after = form
            .hands_over_after
            .iter()
            .map(|name| self.operator(name))
            .collect::<Result<_, _>>()?;
        Ok(Window { offset: form.offset_bytes, bytes: form.bytes, hands_over_after })
    }
}

/// The operators that the steps of a job run, in program order.
pub(super) fn steps(events: &[Event], operators: usize) -> Vec<OpId> {
    let mut again: Vec<_> = events
        .iter()
        .filter_map(|e| {
            if let Event::Recompute { operator, trigger, .. } = e {
                Some((trigger.after, *operator))
            } else {
                None
            }
        })
        .collect();
    again.sort_by_key(|(after, _)| *after);
    let mut again = again.into_iter().peekable();
    let mut steps = Vec::with_capacity(operators + again.len());
    for after in std::iter::once(None).chain((0..operators).map(|i| Some(OpId::from_index(i)))) {
        steps.extend(after);
        while let Some((_, operator)) = again.next_if(|(a, _)| *a == after) {
            steps.push(operator);
        }
    }
    steps
}

fn job(form: JobForm<'_>, graph: &Graph) -> Result<JobPlan, String> {
    let names = Names::new(graph);
    let (arrangement, whole) = arrangement(&form, graph)?;
    let mut events = Vec::with_capacity(form.events.len());
    for (index, event) in form.events.iter().enumerate() {
        events.push(names.event(event).map_err(|e| format!("event {index}: {e}"))?);
    }
    let steps = steps(&events, graph.operators.len());
    let mut placements = Vec::with_capacity(form.placements.len());
    for (index, placement) in form.placements.iter().enumerate() {
        placements.push(
            names.placement(placement, &steps).map_err(|e| format!("placement {index}: {e}"))?,
        );
    }
    let mut host_slots = BTreeMap::new();
    for slot in &form.host_slots {
        let offset = Bytes(
            within("offset_bytes", slot.offset_bytes.0)
                .map_err(|e| format!("host slot of `{}`: {e}", slot.tensor))?,
        );
        if host_slots.insert(names.tensor(&slot.tensor)?, offset).is_some() {
            return Err(format!("tensor `{}` has two host slots", slot.tensor));
        }
    }
    let mut latencies = vec![None; graph.operators.len()];
    let mut libraries = BTreeMap::new();
    let mut total = 0u64;
    for latency in &form.latencies {
        let fail = |problem: &str| {
            Err(format!("the latency of operator `{}` {problem}", latency.operator))
        };
        total = total.saturating_add(latency.ns.0);
        if latency.ns.0 == 0 || total > LIMIT {
            return fail("is impossible: each is at least 1 ns, and all together at most 2^62 ns");
        }
        let id = names.operator(&latency.operator)?;
        if latencies[id.index()]
            .replace(Latency { time: latency.ns, source: latency.source })
            .is_some()
        {
            return fail("is given twice");
        }
        let chosen =
            Chosen { algorithms: latency.algorithm.clone(), workspace: latency.workspace_bytes };
        if chosen != Chosen::default() {
            if !chosen.is_possible() || chosen.workspace.0 > LIMIT {
                return fail(
                    "names impossible algorithms: each is at least -1, they have at most 2^62 `workspace_bytes`, and these come with an `algorithm`",
                );
            }
            libraries.insert(id, chosen);
        }
    }
    let missing = |index: usize| {
        format!(
            "operator `{}` has no latency; each operator needs one",
            graph.operators[index].name
        )
    };
    let latencies = latencies
        .into_iter()
        .enumerate()
        .map(|(i, l)| l.ok_or_else(|| missing(i)))
        .collect::<Result<_, _>>()?;
    let window = form
        .window
        .map(|form| names.window(&form).map_err(|e| format!("`window`: {e}")))
        .transpose()?;
    let (graph, graph_sha256) = (form.graph.into_owned(), form.graph_sha256.into_owned());
    Ok(JobPlan {
        graph,
        graph_sha256,
        arrangement,
        whole,
        latencies,
        libraries,
        events,
        placements,
        host_slots,
        window,
    })
}

/// Writes a plan; the file appears whole or not at all. Graphs as in [`to_bytes`].
///
/// # Errors
/// When it can't be written.
pub fn write(path: &Path, plan: &Plan, graphs: &[Graph]) -> Result<(), FileError> {
    let bytes = to_bytes(plan, graphs);
    files::write(path, |out| out.write_all(&bytes))
}

/// The bytes of a plan's file, with a line for each event, placement, slot and latency.
///
/// # Panics
/// When `graphs` are not the plan's graphs, one for each job in order.
#[must_use]
pub fn to_bytes(plan: &Plan, graphs: &[Graph]) -> Vec<u8> {
    assert_eq!(plan.jobs.len(), graphs.len(), "one graph for each job");
    let file = PlanFile {
        format: Tag::default(),
        version: Version::needed(plan.jobs.iter().any(|job| !job.arrangement.is_empty())),
        planner: (&*plan.planner).into(),
        options: plan.options.clone(),
        budget_bytes: plan.budget,
        figures: plan.figures,
        device: plan.device.clone(),
        jobs: plan.jobs.iter().zip(graphs).map(|(job, graph)| job_form(job, graph)).collect(),
    };
    let mut all = Vec::new();
    emit(&mut all, &file).unwrap_or_else(|e| unreachable!("writing to memory: {e}"));
    all
}

fn emit(out: &mut Vec<u8>, file: &PlanFile<'_>) -> io::Result<()> {
    write!(
        out,
        "{{\"format\":{},\"version\":{}",
        json::text(&file.format)?,
        json::text(&file.version)?
    )?;
    write!(
        out,
        ",\n\"planner\":{},\n\"options\":{}",
        json::text(&file.planner)?,
        json::text(&file.options)?
    )?;
    write!(
        out,
        ",\n\"budget_bytes\":{},\n\"figures\":{}",
        json::text(&file.budget_bytes)?,
        json::text(&file.figures)?
    )?;
    write!(out, ",\n\"device\":{},\n\"jobs\":[", json::text(&file.device)?)?;
    for (index, job) in file.jobs.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(
            out,
            "{comma}\n{{\"graph\":{},\"graph_sha256\":{}",
            json::text(&job.graph)?,
            json::text(&job.graph_sha256)?
        )?;
        if !job.order.is_empty() {
            write!(out, ",\n\"order\":")?;
            json::lines(out, &job.order)?;
        }
        if !job.pieces.is_empty() {
            write!(out, ",\n\"pieces\":")?;
            json::lines(out, &job.pieces)?;
        }
        write!(out, ",\n\"events\":")?;
        json::lines(out, &job.events)?;
        write!(out, ",\n\"placements\":")?;
        json::lines(out, &job.placements)?;
        write!(out, ",\n\"host_slots\":")?;
        json::lines(out, &job.host_slots)?;
        write!(out, ",\n\"latencies\":")?;
        json::lines(out, &job.latencies)?;
        if let Some(window) = &job.window {
            write!(out, ",\n\"window\":{}", json::text(window)?)?;
        }
        write!(out, "}}")?;
    }
    writeln!(out, "]}}")
}

fn job_form<'a>(job: &'a JobPlan, graph: &'a Graph) -> JobForm<'a> {
    let tensor = |id: TensorId| (&*graph.tensor(id).name).into();
    let operator = |id: OpId| (&*graph.operator(id).name).into();
    let steps = steps(&job.events, graph.operators.len());
    let event = |event: &Event| {
        let Trigger { after } = event.trigger();
        let after = after.map(operator);
        match event {
            Event::SwapOut { tensor: t, .. } => EventForm::SwapOut { tensor: tensor(*t), after },
            Event::SwapIn { tensor: t, .. } => EventForm::SwapIn { tensor: tensor(*t), after },
            Event::Release { tensor: t, .. } => EventForm::Release { tensor: tensor(*t), after },
            Event::Recompute { operator: op, keep, .. } => EventForm::Recompute {
                operator: operator(*op),
                after,
                keep: keep.iter().map(|t| tensor(*t)).collect(),
            },
        }
    };
    let placement = |placement: &Placement| match placement.place {
        Place::Tensor { tensor: t, residency } => {
            PlacementForm::Tensor { tensor: tensor(t), residency, offset_bytes: placement.offset }
        }
        Place::Workspace { step } => PlacementForm::Workspace {
            step,
            operator: operator(steps[step as usize]),
            offset_bytes: placement.offset,
        },
    };
    JobForm {
        graph: (&*job.graph).into(),
        graph_sha256: (&*job.graph_sha256).into(),
        order: job.arrangement.order.iter().map(|moved| moved_form(moved, graph)).collect(),
        pieces: job
            .arrangement
            .pieces
            .iter()
            .map(|pieces| pieces_form(pieces, job, graph))
            .collect(),
        events: job.events.iter().map(event).collect(),
        placements: job.placements.iter().map(placement).collect(),
        host_slots: job
            .host_slots
            .iter()
            .map(|(t, offset)| SlotForm { tensor: tensor(*t), offset_bytes: *offset })
            .collect(),
        latencies: (0..)
            .zip(&job.latencies)
            .map(|(i, l): (u32, _)| {
                let Chosen { algorithms: algorithm, workspace } =
                    job.libraries.get(&OpId(i)).cloned().unwrap_or_default();
                LatencyForm {
                    operator: operator(OpId(i)),
                    ns: l.time,
                    source: l.source,
                    algorithm,
                    workspace_bytes: workspace,
                }
            })
            .collect(),
        window: job.window.as_ref().map(|window| WindowForm {
            offset_bytes: window.offset,
            bytes: window.bytes,
            hands_over_after: window.hands_over_after.iter().map(|op| operator(*op)).collect(),
        }),
    }
}

/// The path by which a plan at `plan` names a graph at `graph`: relative to the plan's folder, with
/// `/` between parts.
///
/// # Errors
/// When the current folder can't be found, a folder on the way does not exist, or a name on it is
/// not UTF-8.
pub fn relative(plan: &Path, graph: &Path) -> io::Result<String> {
    let whole = |path: &Path| -> io::Result<PathBuf> {
        let path = std::path::absolute(path)?;
        let folder = path.parent().unwrap_or(Path::new("/")).canonicalize()?;
        Ok(path.file_name().map_or(folder.clone(), |name| folder.join(name)))
    };
    let (plan, graph) = (whole(plan)?, whole(graph)?);
    let from: Vec<_> = plan.parent().unwrap_or(Path::new("/")).components().collect();
    let to: Vec<_> = graph.components().collect();
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = from[common..].iter().map(|_| Component::ParentDir);
    let text = |part: Component<'_>| {
        let text = part.as_os_str().to_str().map(str::to_owned);
        text.ok_or_else(|| io::Error::other("a plan holds UTF-8 text and its graph's path is none; rename the graph or its folder"))
    };
    Ok(up.chain(to[common..].iter().copied()).map(text).collect::<io::Result<Vec<_>>>()?.join("/"))
}

#[cfg(test)]
pub(super) mod tests;
