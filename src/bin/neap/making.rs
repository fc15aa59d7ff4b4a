//! Plans that a run or a measurement makes for itself and never writes.

use std::collections::BTreeMap;

use neap::contract::{JobPlan, Latency, Plan};
use neap::device::Profile;
use neap::job::Graph;
use neap::plan::{self, Method, PlanError, Request};
use neap::units::Bytes;

/// The plan of a job that moves and recomputes nothing, and the bytes of its arena.
///
/// # Errors
/// Only through a defect of neap.
pub fn unplanned(
    graph: &Graph,
    device: &Profile,
    latencies: &[Latency],
) -> anyhow::Result<(JobPlan, Bytes)> {
    let method = Method::default();
    let request = request(graph, device, latencies, Bytes::ZERO, method, BTreeMap::new());
    let mut planned = plan::unplanned(&request)?;
    Ok((planned.plan.jobs.remove(0), planned.plan.figures.arena_bytes))
}

/// A plan within a budget. The caller checks it.
///
/// # Errors
/// When there is no such plan.
pub fn within(
    graph: &Graph,
    device: &Profile,
    latencies: &[Latency],
    budget: Bytes,
    method: Method,
    recorded_options: BTreeMap<String, String>,
) -> Result<Plan, PlanError> {
    let request = request(graph, device, latencies, budget, method, recorded_options);
    plan::make(&request).map(|planned| planned.plan)
}

fn request<'a>(
    graph: &'a Graph,
    device: &'a Profile,
    latencies: &'a [Latency],
    budget: Bytes,
    method: Method,
    recorded_options: BTreeMap<String, String>,
) -> Request<'a> {
    Request { method, recorded_options, ..Request::new(graph, device, latencies, budget) }
}
