//! The serde types of `*.plan.json`, from which its JSON Schema is made as well.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::plan::{Figures, Source};
use crate::device::Profile;
use crate::job::json::{FormatName, Tag, Version};
use crate::units::{Bytes, Nanos};

/// `neap.plan`.
#[derive(Clone, Debug, Default)]
pub struct PlanTag;

impl FormatName for PlanTag {
    const NAME: &'static str = "neap.plan";
    const REMEDY: &'static str = "`neap plan` makes a plan of a graph";
}

/// A plan as its file has it: tensors and operators by name, graphs by path.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanFile<'a> {
    pub(super) format: Tag<PlanTag>,
    pub(super) version: Version,
    /// Which planner made it.
    pub planner: Cow<'a, str>,
    /// Its switches, as given.
    pub options: BTreeMap<String, String>,
    /// What `arena_bytes` may not exceed.
    pub budget_bytes: Bytes,
    /// What the plan promises without noise.
    pub figures: Figures,
    /// The device it was made for, whole.
    pub device: Profile,
    /// One for each job.
    pub jobs: Vec<JobForm<'a>>,
}

/// The plan of one job.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Job")]
pub struct JobForm<'a> {
    /// Where its graph is, relative to the plan's file.
    pub graph: Cow<'a, str>,
    /// SHA-256 of the graph's canonical JSON, in hex.
    pub graph_sha256: Cow<'a, str>,
    /// Operators that run elsewhere than the graph lists them; those behind one operator run in
    /// this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub order: Vec<MovedForm<'a>>,
    /// Operators that run as several, each over consecutive elements. The pieces of operator `NAME`
    /// are called `NAME#0`, `NAME#1` …, and so are those of a tensor that nothing generates and
    /// that only operators in pieces of one size touch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<PiecesForm<'a>>,
    /// In program order.
    pub events: Vec<EventForm<'a>>,
    /// In the order in which shared bytes pass from hand to hand.
    pub placements: Vec<PlacementForm<'a>>,
    /// For each tensor that is ever on the host, its place in the pinned slab.
    pub host_slots: Vec<SlotForm<'a>>,
    /// One for each operator, pieces included.
    pub latencies: Vec<LatencyForm<'a>>,
    /// Bytes of the arena that it has together with other jobs, which hold them in turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<WindowForm<'a>>,
}

/// An operator that runs elsewhere than the graph lists it.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Moved")]
pub struct MovedForm<'a> {
    /// Which.
    pub operator: Cow<'a, str>,
    /// The operator behind which it runs, one that does not move; null for the start.
    #[schemars(schema_with = "name_or_null")]
    #[serde(deserialize_with = "Option::deserialize")]
    pub after: Option<Cow<'a, str>>,
}

/// An operator that runs in pieces.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Pieces")]
pub struct PiecesForm<'a> {
    /// Which.
    pub operator: Cow<'a, str>,
    /// How many elements each piece has; the last one has the rest.
    pub elements: u64,
    /// What it takes as a whole, in nanoseconds.
    pub ns: Nanos,
    /// Where that figure is from.
    pub source: Source,
}

/// Bytes of the arena that jobs hold in turn; the same for every job that has any.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Window")]
pub struct WindowForm<'a> {
    /// First byte.
    pub offset_bytes: Bytes,
    /// Its size.
    pub bytes: Bytes,
    /// Operators after whose end, in program order, the job has nothing in it and another may hold
    /// it.
    pub hands_over_after: Vec<Cow<'a, str>>,
}

/// Something the plan does besides running the operators. It becomes due `delay_ns` after the end
/// of operator `after`, or after the start of the iteration where that is null.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case", deny_unknown_fields)]
#[schemars(rename = "Event")]
pub enum EventForm<'a> {
    /// Copy to the host, then give the bytes back.
    SwapOut {
        /// The tensor.
        tensor: Cow<'a, str>,
        /// After which operator.
        #[schemars(schema_with = "name_or_null")]
        after: Option<Cow<'a, str>>,
        /// And how long after.
        #[serde(default, skip_serializing_if = "is_zero")]
        delay_ns: Nanos,
    },
    /// Take bytes and copy from the host.
    SwapIn {
        /// The tensor.
        tensor: Cow<'a, str>,
        /// After which operator.
        #[schemars(schema_with = "name_or_null")]
        after: Option<Cow<'a, str>>,
        /// And how long after.
        #[serde(default, skip_serializing_if = "is_zero")]
        delay_ns: Nanos,
    },
    /// Give the bytes back without a copy.
    Release {
        /// The tensor.
        tensor: Cow<'a, str>,
        /// After which operator.
        #[schemars(schema_with = "name_or_null")]
        after: Option<Cow<'a, str>>,
    },
    /// Run an operator again.
    Recompute {
        /// The operator.
        operator: Cow<'a, str>,
        /// After which operator.
        #[schemars(schema_with = "name_or_null")]
        after: Option<Cow<'a, str>>,
        /// What of its generated tensors becomes resident; the rest is scratch.
        keep: Vec<Cow<'a, str>>,
    },
}

/// An optional name that must be there, be it null.
fn name_or_null(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"] })
}

fn is_zero(time: &Nanos) -> bool {
    time.0 == 0
}

/// An address in the arena, of a tensor's residency or of a step's workspace.
#[derive(Serialize, JsonSchema)]
#[serde(untagged, deny_unknown_fields)]
#[schemars(rename = "Placement")]
pub enum PlacementForm<'a> {
    /// The `residency`-th residency of a tensor.
    Tensor {
        /// The tensor.
        tensor: Cow<'a, str>,
        /// Which of its residencies in the iteration, from 0.
        residency: u32,
        /// First byte; a multiple of 512.
        offset_bytes: Bytes,
    },
    /// The workspace of a step.
    Workspace {
        /// Its position among the operators and recomputes in program order, from 0.
        step: u32,
        /// The operator it runs.
        operator: Cow<'a, str>,
        /// First byte; a multiple of 512.
        offset_bytes: Bytes,
    },
}

/// A tensor's place in the pinned slab.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "HostSlot")]
pub struct SlotForm<'a> {
    /// The tensor.
    pub tensor: Cow<'a, str>,
    /// First byte; a multiple of 512.
    pub offset_bytes: Bytes,
}

/// How long an operator takes.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Latency")]
pub struct LatencyForm<'a> {
    /// The operator.
    pub operator: Cow<'a, str>,
    /// Nanoseconds, at least one.
    pub ns: Nanos,
    /// Where the figure is from.
    pub source: Source,
    /// The library's algorithm for each of the operator's passes, in order, that takes so long; -1
    /// for a plain kernel.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub algorithm: Vec<i32>,
    /// Scratch that these work in: the operator's workspace in this plan is no smaller.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub workspace_bytes: Bytes,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_empty(bytes: &Bytes) -> bool {
    bytes.0 == 0
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum EventName {
    SwapOut,
    SwapIn,
    Release,
    Recompute,
}

/// An event with any fields. Reading all into one type and then telling apart gives errors with
/// their place.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnyEvent {
    event: EventName,
    tensor: Option<Cow<'static, str>>,
    operator: Option<Cow<'static, str>>,
    #[serde(default, deserialize_with = "present")]
    after: Option<Option<Cow<'static, str>>>,
    delay_ns: Option<Nanos>,
    keep: Option<Vec<Cow<'static, str>>>,
}

/// Tells a null from a field that is missing.
fn present<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Option<Cow<'static, str>>>, D::Error> {
    Option::deserialize(from).map(Some)
}

impl<'de> Deserialize<'de> for EventForm<'_> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let AnyEvent { event, tensor, operator, after, delay_ns, keep } =
            AnyEvent::deserialize(from)?;
        let after = after.ok_or_else(|| D::Error::missing_field("after"))?;
        let delay = delay_ns.unwrap_or_default();
        match (event, tensor, operator, keep) {
            (EventName::SwapOut, Some(tensor), None, None) => {
                Ok(Self::SwapOut { tensor, after, delay_ns: delay })
            }
            (EventName::SwapIn, Some(tensor), None, None) => {
                Ok(Self::SwapIn { tensor, after, delay_ns: delay })
            }
            (EventName::Release, Some(tensor), None, None) if delay_ns.is_none() => {
                Ok(Self::Release { tensor, after })
            }
            (EventName::Recompute, None, Some(operator), Some(keep)) if delay_ns.is_none() => {
                Ok(Self::Recompute { operator, after, keep })
            }
            _ => Err(D::Error::custom(
                "swap_out and swap_in have the fields `tensor`, `after` and perhaps `delay_ns`; release `tensor` and `after`; \
                 recompute `operator`, `after` and `keep`",
            )),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnyPlacement {
    tensor: Option<Cow<'static, str>>,
    residency: Option<u32>,
    step: Option<u32>,
    operator: Option<Cow<'static, str>>,
    offset_bytes: Bytes,
}

impl<'de> Deserialize<'de> for PlacementForm<'_> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match AnyPlacement::deserialize(from)? {
            AnyPlacement {
                tensor: Some(tensor),
                residency: Some(residency),
                step: None,
                operator: None,
                offset_bytes,
            } => Ok(Self::Tensor { tensor, residency, offset_bytes }),
            AnyPlacement {
                tensor: None,
                residency: None,
                step: Some(step),
                operator: Some(operator),
                offset_bytes,
            } => Ok(Self::Workspace { step, operator, offset_bytes }),
            _ => Err(D::Error::custom(
                "a placement has `tensor` and `residency`, or `step` and `operator`; and `offset_bytes`",
            )),
        }
    }
}
