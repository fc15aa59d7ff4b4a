//! The serde types of `*.graph.json`. Its JSON Schema is made from them too.

mod argument;
mod scalars;

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::graph::{Dtype, Phase, Replay, Role};
use super::optimizer::{Group, Optimizer};
use crate::units::Bytes;
pub use argument::{ArgForm, Item};
pub use scalars::{FormatName, GraphTag, Real, Tag, Version};

/// A job: one training or inference iteration, its tensors and its operators.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GraphFile<'a> {
    /// `neap.graph`.
    pub format: Tag<GraphTag>,
    /// 1, or 2 where the graph has fields that version 1 lacks.
    pub version: Version,
    /// A name for people to read.
    pub name: Cow<'a, str>,
    /// The optimizer, if the importer recognised one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerForm>,
    /// The loss, if the importer recognised one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<OperandForm<'a>>,
    /// Liveness peak of the recorded operators, before optimizer steps were lowered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded_peak_bytes: Option<Bytes>,
    /// Storages, in order of first appearance.
    pub tensors: Vec<TensorForm<'a>>,
    /// Operators in any order. An operator that reads a version runs after the one that writes it.
    /// Of operators that may run next, the one listed first runs.
    pub operators: Vec<OperatorForm<'a>>,
}

impl<'a> GraphFile<'a> {
    /// An empty graph of this name.
    pub fn named(name: &'a str) -> Self {
        Self {
            format: Tag::default(),
            version: Version::default(),
            name: name.into(),
            optimizer: None,
            loss: None,
            recorded_peak_bytes: None,
            tensors: Vec::new(),
            operators: Vec::new(),
        }
    }
}

/// One storage from its allocation to its free.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Tensor")]
pub struct TensorForm<'a> {
    /// Its name, unique among the tensors.
    pub name: Cow<'a, str>,
    /// Its role.
    pub role: Role,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Cow<'a, [u64]>,
    /// Size of the storage in bytes; by default that of its elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Bytes>,
    /// The operator before which the framework frees it, if the framework keeps it past its last
    /// use and round the end of the iteration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_until: Option<Cow<'a, str>>,
}

/// The version of a tensor that an operator uses, and the view through which it does.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Operand")]
pub struct OperandForm<'a> {
    /// The tensor's name.
    pub tensor: Cow<'a, str>,
    /// How many in-place writes came before. In an output: the version that is written.
    #[serde(default, skip_serializing_if = "is_zero_u32")]
    pub version: u32,
    /// Type of the elements; by default the tensor's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// Offset of the first element, in elements.
    #[serde(default, skip_serializing_if = "is_zero_u64")]
    pub offset: u64,
    /// Extent of each dimension; by default the tensor's shape.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Cow<'a, [u64]>>,
    /// Step of each dimension in elements; by default row-major without gaps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<Cow<'a, [u64]>>,
}

/// One call on the compute stream.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Operator")]
pub struct OperatorForm<'a> {
    /// Its name, unique among the operators.
    pub name: Cow<'a, str>,
    /// The framework's operator, such as `aten::conv2d`. Any text in a job that is only planned and
    /// simulated.
    #[serde(default = "custom")]
    pub kind: Cow<'a, str>,
    /// Its phase.
    #[serde(default = "forward")]
    pub phase: Phase,
    /// Arguments in schema order.
    #[serde(default)]
    pub args: Vec<ArgForm<'a>>,
    /// Declared outputs in schema order; null where undefined.
    #[serde(default)]
    pub outputs: Vec<Option<OperandForm<'a>>>,
    /// Tensors that it writes without declaring them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hidden: Vec<OperandForm<'a>>,
    /// Bytes of scratch memory that it allocates and frees.
    #[serde(default, skip_serializing_if = "is_zero_bytes")]
    pub workspace_bytes: Bytes,
    /// Whether it may be run again.
    #[serde(default, skip_serializing_if = "is_pure")]
    pub replay: Replay,
    /// Whether it draws random numbers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub random: bool,
    /// Its time in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
    /// The position of the parameter group that an update operator steps; by default the first
    /// (version 2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// The path of the framework's module that called it (version 2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<Cow<'a, str>>,
}

/// The optimizer: `groups`, or one group's `class` and `values`.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Optimizer")]
pub struct OptimizerForm {
    /// Parameter groups, each with its hyperparameters (version 2).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupForm>,
    /// The class of the only group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// The hyperparameters of the only group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<BTreeMap<String, Real>>,
    /// Whether the values of the only group were recovered from rounded scalars.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recovered: bool,
}

/// Parameters that share their hyperparameters.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Group")]
pub struct GroupForm {
    /// `SGD`, `Adam`, `AdamW`, `RMSprop`, `Adagrad`, or the framework's name for another.
    pub class: String,
    /// Hyperparameters by the framework's names; betas are `beta1` and `beta2`, flags are 0 or 1.
    pub values: BTreeMap<String, Real>,
    /// The values of hyperparameters that change, for each step from the first. The last value
    /// stays.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub schedules: BTreeMap<String, Vec<Real>>,
    /// Whether values were recovered from rounded scalars.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recovered: bool,
}

impl OptimizerForm {
    /// The form of an optimizer: that of version 1 where it suffices.
    pub fn new(optimizer: &Optimizer) -> Self {
        let mut groups: Vec<GroupForm> = optimizer.groups.iter().map(GroupForm::new).collect();
        match &mut groups[..] {
            [only] if only.schedules.is_empty() => Self {
                class: Some(std::mem::take(&mut only.class)),
                values: Some(std::mem::take(&mut only.values)),
                recovered: only.recovered,
                groups: Vec::new(),
            },
            _ => Self { groups, class: None, values: None, recovered: false },
        }
    }

    /// The optimizer of this form; `None` where the form is incomplete or contradicts itself.
    pub fn optimizer(self) -> Option<Optimizer> {
        let groups = match (self.class, self.values) {
            (Some(class), Some(values)) if self.groups.is_empty() => {
                vec![GroupForm {
                    class,
                    values,
                    schedules: BTreeMap::new(),
                    recovered: self.recovered,
                }]
            }
            (None, None) if !self.groups.is_empty() && !self.recovered => self.groups,
            _ => return None,
        };
        Some(Optimizer { groups: groups.into_iter().map(GroupForm::group).collect() })
    }
}

impl GroupForm {
    fn new(group: &Group) -> Self {
        Self {
            class: group.class.clone(),
            values: group.values.iter().map(|(key, value)| (key.clone(), Real(*value))).collect(),
            schedules: group
                .schedules
                .iter()
                .map(|(key, of)| (key.clone(), of.iter().copied().map(Real).collect()))
                .collect(),
            recovered: group.recovered,
        }
    }

    fn group(self) -> Group {
        Group {
            class: self.class,
            values: self.values.into_iter().map(|(key, value)| (key, value.0)).collect(),
            schedules: self
                .schedules
                .into_iter()
                .map(|(key, of)| (key, of.into_iter().map(|x| x.0).collect()))
                .collect(),
            recovered: self.recovered,
        }
    }
}

/// A tensor on the host.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Host")]
pub struct HostForm<'a> {
    /// Type of its elements.
    pub host: Dtype,
    /// Its shape.
    pub shape: Cow<'a, [u64]>,
    /// Its value, for a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Real>,
    /// For batch data: the number of the host-to-device copy in the iteration, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<u32>,
}

fn custom() -> Cow<'static, str> {
    "custom".into()
}
fn forward() -> Phase {
    Phase::Forward
}
fn is_zero_u32(n: &u32) -> bool {
    *n == 0
}
fn is_zero_u64(n: &u64) -> bool {
    *n == 0
}
fn is_zero_bytes(n: &Bytes) -> bool {
    n.0 == 0
}
fn is_pure(replay: &Replay) -> bool {
    *replay == Replay::Pure
}
