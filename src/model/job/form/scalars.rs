//! Fields for which JSON has no type: a file's format and version, and every f64.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, MapAccess, Visitor, value::MapAccessDeserializer};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The name of a format.
pub trait FormatName {
    /// The name, such as `neap.graph`.
    const NAME: &'static str;
    /// What to do with a file of another format.
    const REMEDY: &'static str;
}

/// `neap.graph`.
#[derive(Default)]
pub struct GraphTag;

impl FormatName for GraphTag {
    const NAME: &'static str = "neap.graph";
    const REMEDY: &'static str = "`neap import` makes a graph of what a framework recorded";
}

/// The `format` field of a file. Reading fails if it names another format.
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

/// The `version` field of a file: 1 or 2. Files are written with the lowest version that has all
/// their fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version(u32);

impl Version {
    /// The newest version that this neap reads and writes.
    pub const NEWEST: u32 = 2;

    /// Version 2 if the content needs it, else version 1.
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

/// A floating-point number. A number that JSON lacks is written `{"float": "inf"}`, `{"float":
/// "-inf"}` or `{"float": "nan"}`.
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

/// The name of a number that JSON lacks.
#[derive(JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Word {
    Inf,
    #[serde(rename = "-inf")]
    MinusInf,
    Nan,
}

// Not derived: serde_json takes a number in place of a variant's name for a syntax error.
impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = Word;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`inf`, `-inf` or `nan`; any other number stands alone")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Word, E> {
                match word {
                    "inf" => Ok(Word::Inf),
                    "-inf" => Ok(Word::MinusInf),
                    "nan" => Ok(Word::Nan),
                    _ => Err(E::invalid_value(de::Unexpected::Str(word), &self)),
                }
            }
        }

        from.deserialize_str(Reader)
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NonFinite {
    pub(super) float: Word,
}

impl NonFinite {
    pub(super) const fn real(&self) -> Real {
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
