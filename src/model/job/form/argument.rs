//! Arguments of operators in their file form.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::scalars::{NonFinite, Word};
use super::{HostForm, OperandForm, Real};
use crate::job::graph::Dtype;

/// An argument, or an entry of a list argument.
pub enum Item<'a> {
    None,
    Bool(bool),
    /// A number written without point or exponent.
    Int(i64),
    Float(Real),
    Text(Cow<'a, str>),
    /// Boxed, because a list of millions of numbers would otherwise use an operand's memory for
    /// each.
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

/// Every object that may be an argument; its fields decide which one it is.
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

/// Reads an entry of a list. An entry is never a list itself, so nesting ends here.
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
