//! The serde types of `*.plan.json`. Its JSON Schema is made from them too.

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

/// A plan in its file form: tensors and operators by name, graphs by path.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanFile<'a> {
    pub(super) format: Tag<PlanTag>,
    pub(super) version: Version,
    /// The planner that made it.
    pub planner: Cow<'a, str>,
    /// The planner's switches, as given.
    pub options: BTreeMap<String, String>,
    /// The largest allowed value of `arena_bytes`.
    pub budget_bytes: Bytes,
    /// The figures that the plan promises without noise.
    pub figures: Figures,
    /// The complete profile of the device for which it was made.
    pub device: Profile,
    /// The plan of each job.
    pub jobs: Vec<JobForm<'a>>,
}

/// The plan of one job.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Job")]
pub struct JobForm<'a> {
    /// The path of its graph, relative to the plan's file.
    pub graph: Cow<'a, str>,
    /// SHA-256 of the graph's canonical JSON, in hex.
    pub graph_sha256: Cow<'a, str>,
    /// Operators that run elsewhere than the graph lists them; those behind one operator run in
    /// this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub order: Vec<MovedForm<'a>>,
    /// Operators that run as several, each over consecutive elements. The pieces of operator `NAME`
    /// are called `NAME#0`, `NAME#1` …, and so are those of a tensor that only operators in pieces
    /// of one size touch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<PiecesForm<'a>>,
    /// In program order.
    pub events: Vec<EventForm<'a>>,
    /// Placements in the order in which residencies take over shared bytes.
    pub placements: Vec<PlacementForm<'a>>,
    /// The slot in the pinned pool of each tensor that is ever on the host.
    pub host_slots: Vec<SlotForm<'a>>,
    /// The latency of each operator.
    pub latencies: Vec<LatencyForm<'a>>,
    /// The window: bytes of the arena that it shares with other jobs, which hold them in turn.
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
    /// The number of one of its pieces, if that alone runs here; the others run where the operator
    /// does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub piece: Option<u32>,
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
    /// How many elements each piece has; the last one has the rest. Whole rows where the operator
    /// makes a matrix row by row.
    pub elements: u64,
    /// What it takes as a whole, in nanoseconds.
    pub ns: Nanos,
    /// Where that figure is from.
    pub source: Source,
}

/// The region of the arena that jobs hold in turn. All jobs that have one have the same.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Window")]
pub struct WindowForm<'a> {
    /// Its first byte in the arena.
    pub offset_bytes: Bytes,
    /// Its size.
    pub bytes: Bytes,
    /// Operators after which, in program order, the job has nothing in the window, so that another
    /// job may hold it.
    pub hands_over_after: Vec<Cow<'a, str>>,
}

/// An action of the plan besides running the operators. It becomes due at the end of operator
/// `after`, or at the start of the iteration if `after` is null.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case", deny_unknown_fields)]
#[schemars(rename = "Event")]
pub enum EventForm<'a> {
    /// Copy the tensor to the host, then free its device bytes.
    SwapOut {
        /// The tensor.
        tensor: Cow<'a, str>,
        /// The operator after which it becomes due.
        #[schemars(schema_with = "name_or_null")]
        after: Option<Cow<'a, str>>,
    },
    /// Take device bytes and copy the tensor from the host.
    SwapIn {
        /// The tensor.
        tensor: Cow<'a, str>,
        /// The operator after which it becomes due.
        #[schemars(schema_with = "name_or_null")]
        after: Option<Cow<'a, str>>,
    },
    /// Free the device bytes without a copy.
    Release {
        /// The tensor.
        tensor: Cow<'a, str>,
        /// The operator after which it becomes due.
        #[schemars(schema_with = "name_or_null")]
        after: Option<Cow<'a, str>>,
    },
    /// Run an operator again.
    Recompute {
        /// The operator.
        operator: Cow<'a, str>,
        /// The operator after which it becomes due.
        #[schemars(schema_with = "name_or_null")]
        after: Option<Cow<'a, str>>,
        /// Which of the tensors that it generates become resident; the others are scratch.
        keep: Vec<Cow<'a, str>>,
    },
}

/// An optional name whose field must be present, even if it is null.
fn name_or_null(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"] })
}

/// An address in the arena, of a tensor's residency or of a step's workspace.
#[derive(Serialize, JsonSchema)]
#[serde(untagged, deny_unknown_fields)]
#[schemars(rename = "Placement")]
pub enum PlacementForm<'a> {
    /// A residency of a tensor.
    Tensor {
        /// The tensor.
        tensor: Cow<'a, str>,
        /// The number of the tensor's residency in the iteration, from 0.
        residency: u32,
        /// Its first byte in the arena; a multiple of 512.
        offset_bytes: Bytes,
    },
    /// The workspace of a step.
    Workspace {
        /// Its position among the operators and recomputes in program order, from 0.
        step: u32,
        /// The operator it runs.
        operator: Cow<'a, str>,
        /// Its first byte in the arena; a multiple of 512.
        offset_bytes: Bytes,
    },
}

/// A tensor's slot in the pinned pool.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "HostSlot")]
pub struct SlotForm<'a> {
    /// The tensor.
    pub tensor: Cow<'a, str>,
    /// Its first byte in the pool; a multiple of 512.
    pub offset_bytes: Bytes,
}

/// An operator's latency.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Latency")]
pub struct LatencyForm<'a> {
    /// The operator.
    pub operator: Cow<'a, str>,
    /// The latency in nanoseconds, at least 1.
    pub ns: Nanos,
    /// The source of the latency.
    pub source: Source,
    /// The library's algorithm with that latency for each of the operator's passes, in order; 1000
    /// for matrix products, -1 for a plain kernel.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub algorithm: Vec<i32>,
    /// Bytes of these algorithms' workspace. The operator's workspace in this plan is at least as
    /// large.
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

/// An event with any fields. All events are read into this type first, so that errors give their
/// place.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnyEvent {
    event: EventName,
    tensor: Option<Cow<'static, str>>,
    operator: Option<Cow<'static, str>>,
    #[serde(default, deserialize_with = "present")]
    after: Option<Option<Cow<'static, str>>>,
    keep: Option<Vec<Cow<'static, str>>>,
}

/// Distinguishes a null from a missing field.
fn present<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Option<Cow<'static, str>>>, D::Error> {
    Option::deserialize(from).map(Some)
}

impl<'de> Deserialize<'de> for EventForm<'_> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let AnyEvent { event, tensor, operator, after, keep } = AnyEvent::deserialize(from)?;
        let after = after.ok_or_else(|| D::Error::missing_field("after"))?;
        match (event, tensor, operator, keep) {
            (EventName::SwapOut, Some(tensor), None, None) => Ok(Self::SwapOut { tensor, after }),
            (EventName::SwapIn, Some(tensor), None, None) => Ok(Self::SwapIn { tensor, after }),
            (EventName::Release, Some(tensor), None, None) => Ok(Self::Release { tensor, after }),
            (EventName::Recompute, None, Some(operator), Some(keep)) => {
                Ok(Self::Recompute { operator, after, keep })
            }
            _ => Err(D::Error::custom(
                "swap_out, swap_in and release have the fields `tensor` and `after`; \
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
