//! The serde types of `*.graph.json`, from which its JSON Schema is made as well.
//!
//! Not for: names to ids and defaults that depend on the tensor ([`super::json`] does those).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::graph::{Dtype, Phase, Replay, Role};
use super::optimizer::{Group, Optimizer};
use crate::units::Bytes;

/// A job: one training or inference iteration, its tensors and its operators.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GraphFile<'a> {
    /// `neap.graph`.
    pub format: Tag<GraphTag>,
    /// 1, or 2 where the graph says what version 1 has no words for.
    pub version: Version,
    /// For people.
    pub name: Cow<'a, str>,
    /// The optimizer, where one was recognised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerForm>,
    /// The loss, where one was recognised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<OperandForm<'a>>,
    /// Liveness peak of the framework's own operators, before lowering.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded_peak_bytes: Option<Bytes>,
    /// Storages, in order of first appearance.
    pub tensors: Vec<TensorForm<'a>>,
    /// Operators. Any order will do: what reads a version runs after what writes it; between equals the listing decides.
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

/// One storage with a life.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Tensor")]
pub struct TensorForm<'a> {
    /// Unique among the tensors.
    pub name: Cow<'a, str>,
    /// What it is.
    pub role: Role,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Cow<'a, [u64]>,
    /// Size of the storage; by default that of its elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Bytes>,
    /// The framework keeps it past its last use, round the end of the iteration, and frees it before this operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_until: Option<Cow<'a, str>>,
}

/// How an operator sees a tensor.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Operand")]
pub struct OperandForm<'a> {
    /// The tensor's name.
    pub tensor: Cow<'a, str>,
    /// How many in-place writes came before; in an output, the version that is written.
    #[serde(default, skip_serializing_if = "is_zero_u32")]
    pub version: u32,
    /// Type of the elements; by default the tensor's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// First element.
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
    /// Unique among the operators.
    pub name: Cow<'a, str>,
    /// The framework's operator, such as `aten::conv2d`; anything for a job that is only planned and simulated.
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
    /// Written too, but not declared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hidden: Vec<OperandForm<'a>>,
    /// Scratch that it allocates and drops.
    #[serde(default, skip_serializing_if = "is_zero_bytes")]
    pub workspace_bytes: Bytes,
    /// Whether it may be run again.
    #[serde(default, skip_serializing_if = "is_pure")]
    pub replay: Replay,
    /// Draws random numbers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub random: bool,
    /// How long it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
    /// For an update operator, the position of its parameter group; the first by default (version 2).
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
    /// The values of the only group were recovered from rounded scalars rather than recorded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recovered: bool,
}

/// Parameters that are stepped with the same hyperparameters.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Group")]
pub struct GroupForm {
    /// `SGD`, `Adam`, `AdamW`, `RMSprop`, `Adagrad`, or the framework's name for another.
    pub class: String,
    /// Hyperparameters by the framework's names; betas are `beta1` and `beta2`, flags are 0 or 1.
    pub values: BTreeMap<String, Real>,
    /// Hyperparameters that change: the value of each step from the first; the last one stays.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub schedules: BTreeMap<String, Vec<Real>>,
    /// Values were recovered from rounded scalars rather than recorded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recovered: bool,
}

impl OptimizerForm {
    /// The form that version 1 has where it suffices.
    pub fn of(optimizer: &Optimizer) -> Self {
        let mut groups: Vec<GroupForm> = optimizer.groups.iter().map(GroupForm::of).collect();
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

    /// What the form says; `None` where it says too little or contradicts itself.
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
    fn of(group: &Group) -> Self {
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
    /// For batch data: which host-to-device copy of the iteration this is, from 0.
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

/// The name of a format.
pub trait FormatName {
    /// Such as `neap.graph`.
    const NAME: &'static str;
    /// What to do with a file that is something else.
    const REMEDY: &'static str;
}

/// `neap.graph`.
#[derive(Default)]
pub struct GraphTag;

impl FormatName for GraphTag {
    const NAME: &'static str = "neap.graph";
    const REMEDY: &'static str = "`neap import` makes a graph of what a framework recorded";
}

/// The `format` field of a file: its presence says that the file is what it should be.
#[derive(Default)]
pub struct Tag<F>(std::marker::PhantomData<F>);

impl<F: FormatName> Serialize for Tag<F> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(F::NAME)
    }
}

impl<'de, F: FormatName> Deserialize<'de> for Tag<F> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let found = Cow::<'_, str>::deserialize(from)?;
        if found == F::NAME {
            return Ok(Self(std::marker::PhantomData));
        }
        Err(de::Error::custom(format_args!(
            "this is a `{found}` file, and a `{}` file is expected; {}",
            F::NAME,
            F::REMEDY
        )))
    }
}

impl<F: FormatName> JsonSchema for Tag<F> {
    fn schema_name() -> Cow<'static, str> {
        F::NAME.into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "const": F::NAME })
    }
}

/// The `version` field of a file: 1 or 2. A file says the lowest that has words for what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version(u32);

impl Version {
    /// The newest that this neap reads and writes.
    pub const NEWEST: u32 = 2;

    /// 2 where the content needs it, else 1.
    pub const fn needed(second: bool) -> Self {
        Self(if second { 2 } else { 1 })
    }
}

impl Default for Version {
    fn default() -> Self {
        Self(1)
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(self.0)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match u64::deserialize(from)? {
            1 => Ok(Self(1)),
            2 => Ok(Self(2)),
            found => Err(de::Error::custom(format_args!(
                "the file is of version {found}, and this neap reads versions 1 to {}; use a newer neap, or make the file again",
                Self::NEWEST
            ))),
        }
    }
}

impl JsonSchema for Version {
    fn schema_name() -> Cow<'static, str> {
        "Version".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "enum": [1, 2] })
    }
}

/// A floating-point number; one that JSON lacks is written `{"float": "inf"}`, `{"float": "-inf"}` or `{"float": "nan"}`.
#[derive(Clone, Copy)]
pub struct Real(pub f64);

impl Serialize for Real {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() {
            return to.serialize_f64(self.0);
        }
        let text = match self.0 {
            f64::INFINITY => "inf",
            f64::NEG_INFINITY => "-inf",
            _ => "nan",
        };
        let mut map = to.serialize_map(Some(1))?;
        map.serialize_entry("float", text)?;
        map.end()
    }
}

/// The word of a number that JSON lacks.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Word {
    Inf,
    #[serde(rename = "-inf")]
    MinusInf,
    Nan,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct NonFinite {
    float: Word,
}

impl NonFinite {
    const fn real(&self) -> Real {
        Real(match self.float {
            Word::Inf => f64::INFINITY,
            Word::MinusInf => f64::NEG_INFINITY,
            Word::Nan => f64::NAN,
        })
    }
}

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Real;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or {\"float\": \"inf\"}")
            }
            fn visit_f64<E: de::Error>(self, x: f64) -> Result<Real, E> {
                Ok(Real(x))
            }
            #[expect(
                clippy::cast_precision_loss,
                reason = "a whole number where a float belongs means the nearest float"
            )]
            fn visit_i64<E: de::Error>(self, n: i64) -> Result<Real, E> {
                Ok(Real(n as f64))
            }
            #[expect(clippy::cast_precision_loss, reason = "as above")]
            fn visit_u64<E: de::Error>(self, n: u64) -> Result<Real, E> {
                Ok(Real(n as f64))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Real, A::Error> {
                Ok(NonFinite::deserialize(MapAccessDeserializer::new(map))?.real())
            }
        }
        from.deserialize_any(Reader)
    }
}

impl JsonSchema for Real {
    fn schema_name() -> Cow<'static, str> {
        "Real".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let word = generator.subschema_for::<NonFinite>();
        json_schema!({ "anyOf": [{ "type": "number" }, word] })
    }
}

/// An argument, or an entry of a list argument.
pub enum Item<'a> {
    None,
    Bool(bool),
    /// A number written without point or exponent.
    Int(i64),
    Float(Real),
    Text(Cow<'a, str>),
    /// Boxed, as lists of millions of numbers would otherwise take an operand's room for each.
    Operand(Box<OperandForm<'a>>),
}

/// An argument.
pub enum ArgForm<'a> {
    One(Item<'a>),
    Many(Vec<Item<'a>>),
    Host(HostForm<'a>),
    /// `{"tensors": []}`; `[]` is an empty list of whole numbers.
    EmptyTensors,
    /// `{"floats": []}`.
    EmptyFloats,
    /// `{"bools": []}`.
    EmptyBools,
}

impl Serialize for Item<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => to.serialize_unit(),
            Self::Bool(b) => to.serialize_bool(*b),
            Self::Int(n) => to.serialize_i64(*n),
            Self::Float(x) => x.serialize(to),
            Self::Text(text) => to.serialize_str(text),
            Self::Operand(operand) => operand.serialize(to),
        }
    }
}

impl Serialize for ArgForm<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let empty = |to: S, key: &str| {
            let mut map = to.serialize_map(Some(1))?;
            map.serialize_entry(key, &[(); 0])?;
            map.end()
        };
        match self {
            Self::One(item) => item.serialize(to),
            Self::Many(items) => items.serialize(to),
            Self::Host(host) => host.serialize(to),
            Self::EmptyTensors => empty(to, "tensors"),
            Self::EmptyFloats => empty(to, "floats"),
            Self::EmptyBools => empty(to, "bools"),
        }
    }
}

/// Every object that may stand as an argument, told apart by its fields.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnyObject {
    tensor: Option<Cow<'static, str>>,
    version: Option<u32>,
    dtype: Option<Dtype>,
    offset: Option<u64>,
    stride: Option<Vec<u64>>,
    shape: Option<Vec<u64>>,
    host: Option<Dtype>,
    value: Option<Real>,
    input: Option<u32>,
    float: Option<Word>,
    tensors: Option<[(); 0]>,
    floats: Option<[(); 0]>,
    bools: Option<[(); 0]>,
}

impl AnyObject {
    fn arg<E: de::Error>(self) -> Result<ArgForm<'static>, E> {
        let alone = [
            self.float.is_some(),
            self.tensors.is_some(),
            self.floats.is_some(),
            self.bools.is_some(),
        ];
        let operand = self.version.is_some()
            || self.dtype.is_some()
            || self.offset.is_some()
            || self.stride.is_some();
        let host = self.value.is_some() || self.input.is_some();
        let heads = alone.iter().filter(|x| **x).count()
            + usize::from(self.tensor.is_some())
            + usize::from(self.host.is_some());
        if heads != 1
            || (operand && self.tensor.is_none())
            || (host && self.host.is_none())
            || (alone.contains(&true) && self.shape.is_some())
        {
            return Err(E::custom(
                "an argument object is an operand {\"tensor\": …}, a host tensor {\"host\": …, \"shape\": …}, {\"float\": \"inf\"}, \
                 {\"tensors\": []}, {\"floats\": []} or {\"bools\": []}",
            ));
        }
        Ok(match self {
            Self { tensor: Some(tensor), version, dtype, offset, stride, shape, .. } => {
                ArgForm::One(Item::Operand(Box::new(OperandForm {
                    tensor,
                    version: version.unwrap_or(0),
                    dtype,
                    offset: offset.unwrap_or(0),
                    shape: shape.map(Cow::Owned),
                    stride: stride.map(Cow::Owned),
                })))
            }
            Self { host: Some(host), shape, value, input, .. } => {
                let shape = Cow::Owned(shape.ok_or_else(|| E::missing_field("shape"))?);
                ArgForm::Host(HostForm { host, shape, value, input })
            }
            Self { float: Some(float), .. } => {
                ArgForm::One(Item::Float(NonFinite { float }.real()))
            }
            Self { tensors: Some(_), .. } => ArgForm::EmptyTensors,
            Self { floats: Some(_), .. } => ArgForm::EmptyFloats,
            _ => ArgForm::EmptyBools,
        })
    }
}

struct ArgReader;

impl<'de> Visitor<'de> for ArgReader {
    type Value = ArgForm<'static>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an argument: null, a flag, a number, a text, a list of these, or an object")
    }
    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(ArgForm::One(Item::None))
    }
    fn visit_bool<E: de::Error>(self, b: bool) -> Result<Self::Value, E> {
        Ok(ArgForm::One(Item::Bool(b)))
    }
    fn visit_i64<E: de::Error>(self, n: i64) -> Result<Self::Value, E> {
        Ok(ArgForm::One(Item::Int(n)))
    }
    fn visit_u64<E: de::Error>(self, n: u64) -> Result<Self::Value, E> {
        match i64::try_from(n) {
            Ok(n) => Ok(ArgForm::One(Item::Int(n))),
            Err(_) => Err(E::custom(format_args!(
                "{n} is beyond 64-bit signed numbers; write it with a point for a float"
            ))),
        }
    }
    fn visit_f64<E: de::Error>(self, x: f64) -> Result<Self::Value, E> {
        Ok(ArgForm::One(Item::Float(Real(x))))
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(ArgForm::One(Item::Text(Cow::Owned(text.to_owned()))))
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        AnyObject::deserialize(MapAccessDeserializer::new(map))?.arg()
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(item) = seq.next_element()? {
            all.push(item);
        }
        Ok(ArgForm::Many(all))
    }
}

/// Reads an entry of a list: an argument that is not a list itself, so that nesting ends here.
struct ItemReader;

impl<'de> Visitor<'de> for ItemReader {
    type Value = Item<'static>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an entry of a list argument: null, a flag, a number, or an operand")
    }
    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(Item::None)
    }
    fn visit_bool<E: de::Error>(self, b: bool) -> Result<Self::Value, E> {
        Ok(Item::Bool(b))
    }
    fn visit_i64<E: de::Error>(self, n: i64) -> Result<Self::Value, E> {
        Ok(Item::Int(n))
    }
    fn visit_u64<E: de::Error>(self, n: u64) -> Result<Self::Value, E> {
        one(ArgReader.visit_u64(n)?)
    }
    fn visit_f64<E: de::Error>(self, x: f64) -> Result<Self::Value, E> {
        Ok(Item::Float(Real(x)))
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        one(ArgReader.visit_map(map)?)
    }
}

fn one<E: de::Error>(arg: ArgForm<'static>) -> Result<Item<'static>, E> {
    if let ArgForm::One(item) = arg {
        Ok(item)
    } else {
        Err(E::custom("a list argument can't hold host tensors or further lists"))
    }
}

impl<'de> Deserialize<'de> for Item<'_> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ItemReader)
    }
}

impl<'de> Deserialize<'de> for ArgForm<'_> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ArgReader)
    }
}

impl JsonSchema for ArgForm<'_> {
    fn schema_name() -> Cow<'static, str> {
        "Argument".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let operand = generator.subschema_for::<OperandForm<'_>>();
        let host = generator.subschema_for::<HostForm<'_>>();
        let real = generator.subschema_for::<Real>();
        let only = |key: &str| json_schema!({ "type": "object", "properties": { key: { "type": "array", "maxItems": 0 } }, "required": [key], "additionalProperties": false });
        json_schema!({
            "description": "null, a flag, a number (one with a point or an exponent is a float), a text, a list, an operand, or a host tensor",
            "anyOf": [
                { "type": ["null", "boolean", "string"] },
                real.clone(),
                { "type": "array", "items": real },
                { "type": "array", "items": { "type": "boolean" } },
                { "type": "array", "items": { "anyOf": [{ "type": "null" }, operand.clone()] } },
                operand,
                host,
                only("tensors"),
                only("floats"),
                only("bools")
            ]
        })
    }
}
